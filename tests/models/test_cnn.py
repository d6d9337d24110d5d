"""The convolutional baselines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torchcaps.models.cnn
import torchcaps.models.mazzia_cnn  # noqa: F401
from torchcaps.models.registry import create_model, find_preset
from torchcaps.types import ImageTooSmall

COUNTS = [  # name, options, parameters without decoder, of the decoder
    ("cnn_mnist", {}, 35_445_522, 0),
    ("cnn_multimnist", {}, 24_563_978, 0),
    ("cnn_multimnist", {"form": "official"}, 24_535_306, 0),
    ("cnn_affnist", {}, 11_277_866, 0),
    ("cnn_cifar10", {}, 18_919_434, 0),
    ("cnn_cifar100", {}, 19_011_684, 0),
    ("cnn_diverse_multimnist", {}, 19_553_162, 0),
    ("cnn_diverse_multimnist", {"head": "dense"}, 42_490_762, 0),
    ("resnet18_cifar10", {}, 11_173_962, 0),
    ("resnet18_cifar100", {}, 11_220_132, 0),
    ("mazzia_cnn_mnist", {}, 173_088, 1_412_368),
    ("mazzia_vector_cnn_mnist", {}, 182_798, 1_411_344),
    ("mazzia_cnn_smallnorb", {}, 198_099, 237_570),
    ("mazzia_vector_cnn_smallnorb", {}, 166_902, 229_570),
    ("mazzia_cnn_smallnorb", {"decoder": False}, 198_099, 0),
]
SMALL = [  # name, options, the smallest side that fits, whether several objects are told apart
    ("cnn_mnist", {}, 1, False),
    ("cnn_multimnist", {}, 4, True),
    ("cnn_affnist", {}, 4, False),
    ("cnn_cifar10", {}, 21, False),
    ("cnn_diverse_multimnist", {}, 13, True),
    ("cnn_diverse_multimnist", {"head": "dense"}, 13, True),
    ("resnet18_cifar10", {}, 1, False),
    ("mazzia_cnn_mnist", {}, 17, False),
    ("mazzia_vector_cnn_mnist", {}, 17, False),
    ("mazzia_cnn_smallnorb", {"decoder_output": "linear"}, 37, False),
    ("mazzia_vector_cnn_smallnorb", {}, 37, False),
]
MAZZIA = [name for name, *_ in SMALL if name.startswith("mazzia")]


@pytest.mark.parametrize(("name", "options", "network", "decoder"), COUNTS)
def test_counts(name, options, network, decoder):
    with torch.device("meta"):
        model = find_preset(name).build(**options)
    counts = {True: 0, False: 0}
    for key, p in model.named_parameters():
        counts[key.startswith("decoder.")] += p.numel()
    assert (counts[False], counts[True]) == (network, decoder)


@pytest.mark.parametrize(("name", "printed"), [(name, find_preset(name).parameters) for name in MAZZIA])
def test_assumed_widths_give_the_printed_size(name, printed):
    with torch.device("meta"):
        network = sum(p.numel() for p in find_preset(name).build(decoder=False).parameters())
    assert f"{round(network / 1000)}K" == printed


def test_affnist_baseline_is_as_large_as_capsnet():
    with torch.device("meta"):
        network = sum(p.numel() for p in find_preset("cnn_affnist").build().parameters())
    assert abs(network / 11_228_064 - 1) < 0.01


@pytest.mark.parametrize(("name", "options", "side", "several"), SMALL)
def test_trains_on_other_images(name, options, side, several):
    side = max(side, 5)
    image = (2, side, side + 1)
    model = create_model(name, image=image, classes=7, **options)
    images = torch.rand(4, *image)
    labels = torch.tensor([[0, 6], [3, -1], [1, 2], [5, 3]]) if several else torch.tensor([0, 6, 3, 1])
    out = model(images, labels)
    assert out.scores.shape == out.probabilities.shape == (4, 7)
    assert out.probabilities.min() >= 0
    assert out.probabilities.max() <= 1
    if several:
        loss = F.binary_cross_entropy_with_logits(out.scores, torch.rand(4, 7))
        assert torch.equal(out.probabilities, out.scores.sigmoid())
    else:
        loss = F.cross_entropy(out.scores, labels)
    if name in MAZZIA:
        assert out.reconstruction.shape == (4, 1, *image)
        loss = loss + (out.reconstruction - images[:, None]).square().sum()
    else:
        assert out.capsules is None
        assert out.reconstruction is None
    loss.backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert p.grad.abs().sum() > 0, key
    model.eval()
    torch._dynamo.reset()
    with torch.no_grad():
        many, one = model(images), model(images[:1])
        assert torch.allclose(many.scores[:1], one.scores, rtol=1e-4, atol=1e-5)
        compiled = torch.compile(model, fullgraph=True, backend="eager")(images)
    assert torch.equal(compiled.scores, many.scores)


@pytest.mark.parametrize(("name", "options", "side", "several"), [row for row in SMALL if row[2] > 1])
def test_smallest_image(name, options, side, several):
    build = find_preset(name).build
    with torch.device("meta"):
        build(image=(1, side, side), **options)
        with pytest.raises(ImageTooSmall, match=f"image 1 x {side - 1} x {side - 1} is too small"):
            build(image=(1, side - 1, side - 1), **options)
    with pytest.raises(ValueError, match=f"the smallest that fits has {side} x {side} pixels"):
        create_model(name, image=(1, side - 1, side - 1), **options)


@pytest.mark.parametrize("name", ["cnn_mnist", "resnet18_cifar10"])
def test_any_image_fits(name):
    with torch.device("meta"):
        model = find_preset(name).build(image=(5, 1, 1), classes=1)
        assert model.eval()(torch.empty(2, 5, 1, 1)).scores.shape == (2, 1)


def test_softmax_or_sigmoid():
    with torch.no_grad():
        one = create_model("cnn_affnist", image=(1, 8, 8)).eval()(torch.rand(3, 1, 8, 8))
    assert torch.allclose(one.probabilities.sum(1), torch.ones(3))
    assert torch.equal(one.probabilities, one.scores.softmax(1))


@pytest.mark.parametrize("name", ["mazzia_cnn_mnist", "mazzia_cnn_smallnorb"])
def test_plain_cnn_decodes_hidden_features_unmasked(name):
    image = find_preset(name).options["image"]
    model = create_model(name).eval()
    images = torch.rand(2, *image)
    with torch.no_grad():
        hidden = model.features(images)
        pair = model(images, torch.tensor([[0, 1], [2, -1]])).reconstruction
        single = model(images, torch.tensor([4, 3])).reconstruction
        free = model(images).reconstruction
    assert pair.shape == (2, 2, *image)
    assert torch.equal(free, single)
    assert torch.equal(free[:, 0], model.decoder(hidden))
    assert torch.equal(pair[:, 0], pair[:, 1])
    assert torch.equal(pair[:, :1], single)


def test_vector_cnn_decodes_the_vector_of_the_label():
    model = create_model("mazzia_vector_cnn_mnist").eval()
    images = torch.rand(3, 1, 28, 28)
    labels = torch.tensor([7, 0, 3])
    with torch.no_grad():
        out = model(images, labels)
        poses = model.vectors(model.features(images)).reshape(3, 10, 16)
        norm = poses.norm(dim=-1, keepdim=True)
        poses = (1 - (-norm).exp()) * poses / norm
        assert torch.allclose(out.capsules.poses, poses, atol=1e-6)
        assert torch.allclose(out.scores, poses.norm(dim=-1), atol=1e-6)
        for n, label in enumerate(labels):
            masked = torch.zeros(1, 10, 16)
            masked[0, label] = out.capsules.poses[n, label]
            assert torch.allclose(out.reconstruction[n], model.decoder(masked), atol=1e-6)


@pytest.mark.parametrize("name", MAZZIA)
def test_mazzia_precisions(name):
    image = find_preset(name).options["image"]
    model = create_model(name, decoder=False).eval()
    images = torch.rand(2, *image)
    with torch.no_grad():
        single = model(images).scores
        with torch.autocast("cpu", torch.bfloat16):
            half = model(images).scores
        double = model.double()(images.double()).scores
    assert double.dtype == torch.float64
    assert torch.allclose(single.double(), double, atol=1e-4)
    assert torch.allclose(half.double(), double, atol=0.1)


def test_keras_norms():
    batch = create_model("mazzia_cnn_mnist", decoder=False).features[2]
    assert (batch.eps, batch.momentum) == (1e-3, 0.01)
    instance = create_model("mazzia_cnn_smallnorb", decoder=False).features[2]
    assert instance.eps == 1e-3
    assert instance.weight.eq(1).all()
    assert instance.running_mean is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cnn_multimnist", {"form": "released"}, "form must be paper or official, got 'released'"),
        ("cnn_diverse_multimnist", {"head": "max"}, "head must be pooling or dense, got 'max'"),
        ("mazzia_cnn_smallnorb", {"decoder_output": "tanh"}, "output must be sigmoid or linear, got 'tanh'"),
        ("cnn_mnist", {"dropout": 1.5}, "dropout"),
    ],
)
def test_bad_options(name, options, words):
    with pytest.raises(ValueError, match=words):
        create_model(name, **options)
