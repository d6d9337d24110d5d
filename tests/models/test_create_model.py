"""Building for other images, and what is said when that cannot be."""

import re

import pytest
import torch
from torch import nn

from torchcaps import create_model, list_models
from torchcaps.models.registry import find_preset

SYSTEMS = ["capsnet", "encapnet", "ar_capsnet", "inverted_capsnet", "efficient_capsnet", "em_capsnet"]


def test_list_models():
    assert list_models() == sorted(list_models())
    assert list_models("capsnet_*") == [
        "capsnet_affnist",
        "capsnet_cifar10",
        "capsnet_mnist",
        "capsnet_multimnist",
        "capsnet_smallnorb",
        "capsnet_svhn",
    ]
    assert set(SYSTEMS) <= set(list_models())
    assert list_models("nothing*") == []


@pytest.mark.parametrize("name", list_models())
def test_every_preset_takes_image_and_classes(name):
    preset = find_preset(name)
    channels, height, width = preset.options["image"]
    image = (channels + 1, height + 5, width + 8)
    with torch.device("meta"):
        model = preset.build(image=image, classes=7)
        out = model(torch.empty(2, *image))
    assert out.scores.shape == (2, 7)
    assert preset.paper


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("image", [(1, 28, 28), (3, 64, 48), (3, 224, 224), (4, 300, 200)], ids=str)
def test_systems_for_own_images(name, image):
    with torch.device("meta"):
        model = find_preset(name).build(image=image, classes=23)
        out = model(torch.empty(1, *image))
    assert out.scores.shape == (1, 23)
    weights = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("decoder."))
    assert weights < 100e6


@pytest.mark.parametrize("name", [name for name in list_models() if "backbone" in find_preset(name).options])
def test_a_backbone_of_ones_own(name):
    backbone = nn.Sequential(nn.Conv2d(2, 24, 3, stride=2), nn.BatchNorm2d(24), nn.GELU())
    model = create_model(name, image=(2, 50, 46), classes=3, backbone=backbone)
    assert any(module is backbone for module in model.modules())
    assert model(torch.rand(2, 2, 50, 46)).scores.shape == (2, 3)


def test_hidden_capsule_layers():
    model = create_model("efficient_capsnet_mnist", hidden=((12, 10), (7, 5)), decoder=False)
    assert [tuple(layer.weight.shape) for layer in model.body.layers] == [
        (16, 8, 12, 10),
        (12, 10, 7, 5),
        (7, 5, 10, 16),
    ]
    assert model(torch.rand(2, 1, 28, 28)).scores.shape == (2, 10)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": False},
        {"scaled": False},
        {"concurrent": False, "iterations": 3},
        {"activations": True},
        {"start": "random"},
        {"start": "learnt"},
        {"windows": "scrambled"},
        {"iterations": 1},
        {"iterations": 4},
        {"routing": "dynamic"},
        {"routing": "em"},
        {"routing": "self_attention"},
        {"decoder": True},
    ],
    ids=str,
)
def test_ablations_train(options):
    torch.manual_seed(0)
    model = create_model("inverted_cifar10", backbone="simple", image=(3, 16, 16), classes=4, **options)
    out = model(torch.rand(2, 3, 16, 16), torch.tensor([0, 3]))
    loss = (out.scores * torch.randn(2, 4)).sum()
    if out.reconstruction is not None:
        loss = loss + out.reconstruction.square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("capsnet_mnits", {}, r"there is no preset 'capsnet_mnits'; did you mean capsnet_mnist, .*\?"),
        ("xyzzy", {}, r"there is no preset 'xyzzy'; list_models\(\) has them all"),
        ("capsnet_mnist", {"iteration": 2}, r"capsnet_mnist has no option 'iteration'; did you mean iterations\?"),
        ("capsnet_mnist", {"image": (28, 28)}, r"image must be three positive integers .* got \(28, 28\)"),
        ("capsnet_mnist", {"image": (1, 28, -3)}, r"image must be three positive integers .* got \(1, 28, -3\)"),
        ("capsnet_mnist", {"classes": 0}, r"classes must be a positive integer, got 0"),
        ("capsnet_mnist", {"iterations": 0}, r"iterations must be a whole number from 1, got 0"),
        ("inverted_cifar10", {"iterations": 0}, r"iterations must be a whole number from 1, got 0"),
        ("em_cifar10", {"iterations": -1}, r"iterations must be a whole number from 1, got -1"),
        ("capsnet_mnist", {"form": "fancy"}, r'form must be "paper" or "official", got \'fancy\''),
        (
            "capsnet_mnist",
            {"routing": "rounting"},
            r"routing must be 'dynamic', 'em', 'self_attention' or .*, got 'rounting'",
        ),
        (
            "inverted_cifar10",
            {"backbone": "vgg"},
            r"backbone must be 'simple', 'resnet', 'plain3', .*, got 'vgg'",
        ),
        ("inverted_cifar10", {"windows": "odd"}, r'windows must be "true" or "scrambled", got \'odd\''),
        ("inverted_cifar10", {"start": "warm"}, r'start must be "zero", "random" or "learnt", got \'warm\''),
        ("inverted_diverse_multimnist", {"pose": "quaternion"}, r'pose must be "vector" or "matrix", got .*'),
        ("capsnet_mnist", {"objects": 20}, r"objects must lie between 1 and the 10 classes, got 20"),
        ("capsnet_multimnist", {"classes": 1}, r"objects must lie between 1 and the 1 classes, got 2"),
        ("capsnet_mnist", {"objects": 0}, r"objects must lie between 1 and the 10 classes, got 0"),
        ("capsnet_mnist", {"decoder": "conv"}, r"decoder must be True or False, got 'conv'"),
        ("capsnet_mnist", {"iterations": 2.5}, r"iterations must be a whole number from 1, got 2.5"),
        ("capsnet_mnist", {"routing": 3}, r"routing must be a word, or a part of your own, got 3"),
        (
            "capsnet_mnist",
            {"routing": "self_attention", "iterations": 2},
            r"the routing 'self_attention' takes no iterations, got iterations=2",
        ),
        ("capsnet_mnist", {"routing": "em", "leak": True}, r"the routing 'em' takes no leak, got leak=True"),
        ("capsnet_mnist", {"routing": "inverted_attention"}, r"routing must be 'dynamic', .*"),
        ("inverted_cifar10", {"routing": "dynamic", "start": "learnt"}, r"concurrent, norm, .* belong to inverted .*"),
        ("inverted_cifar10", {"hidden": (0,)}, r"hidden must be a whole number from 1, got 0"),
        ("inverted_diverse_multimnist", {"width": 0}, r"width must be a whole number from 1, got 0"),
        ("efficient_capsnet_mnist", {"hidden": 5}, r"hidden must be a sequence, got 5"),
        ("efficient_capsnet_mnist", {"hidden": (8, 16)}, r"hidden must be pairs of .* got \(8, 16\)"),
        ("efficient_capsnet_mnist", {"hidden": ((0, 16),)}, r"hidden capsules must be a whole number from 1, got 0"),
        ("efficient_capsnet", {"backbone": "vgg"}, r"backbone must be 'conv', 'resnet', 'plain3', .*, got 'vgg'"),
        ("em_smallnorb", {"types": (32, 32)}, r"types must be three numbers, .* got \(32, 32\)"),
        ("em_smallnorb", {"types": 32}, r"types must be a sequence, got 32"),
        ("em_smallnorb", {"types": (0, 8, 8)}, r"types must be a whole number from 1, got 0"),
        ("em_smallnorb", {"channels": 0}, r"channels must be a whole number from 1, got 0"),
        ("ar_capsnet_mnist", {"depth": 1.5}, r"depth must be a whole number, got 1.5"),
        ("encapnet", {"aide_modules": 3}, r"aide_modules must be a sequence of modules from 1 to 4, got 3"),
        ("encapnet", {"layers": 3}, r"layers must be 4 numbers from 0, one for each module, got 3"),
        ("encapnet", {"cost": "foo"}, r"cost must be cosine or l2, got 'foo'"),
        ("encapnet", {"version": "v5", "aide_modules": ()}, r"version must be one of v1, v2, v3, v4, got 'v5'"),
        ("li_resnet18_cifar10", {"blocks": 2}, r"blocks must be a sequence, got 2"),
        ("li_cnn6_cifar10", {"width": 2.5}, r"width must be a whole number, got 2.5"),
        (None, {}, r"a preset is asked for by name, got None"),
        (
            "capsnet_mnist",
            {"image": (1, 12, 40)},
            r"capsnet_mnist cannot take image 1 x 12 x 40, which is too small; "
            r"the smallest that fits has 17 x 17 pixels",
        ),
        (
            "efficient_capsnet_mnist",
            {"image": (1, 9, 9)},
            r".* cannot take image 1 x 9 x 9, which is too small; the smallest that fits has 11 x 11 pixels",
        ),
        (
            "capsnet_mnist",
            {"image": (3, 600, 600)},
            r"capsnet_mnist for image 3 x 600 x 600 and 10 classes would have [\d,]{13,} weights, "
            r"more than the budget of 1,000,000,000; the largest image that fits has \d+ x \d+ pixels",
        ),
    ],
)
def test_bad_options(name, options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        create_model(name, **options)


def test_the_largest_image_named_fits_and_the_next_does_not():
    with pytest.raises(ValueError, match="budget of 5,000,000") as error:
        create_model("capsnet_svhn", image=(3, 300, 300), decoder=False, budget=5_000_000)
    side = int(re.search(r"(\d+) x \1 pixels", str(error.value))[1])
    create_model("capsnet_svhn", image=(3, side, side), decoder=False, budget=5_000_000)
    with pytest.raises(ValueError, match="budget"):
        create_model("capsnet_svhn", image=(3, side + 1, side + 1), decoder=False, budget=5_000_000)


def test_options_reach_a_routing_given_as_a_class():
    from torchcaps.routing import DynamicRouting

    model = create_model("capsnet_svhn", routing=DynamicRouting, iterations=5, priors=True, form="official")
    routing = model.body.layers[0].routing
    assert routing.iterations == 5
    assert routing.logits is not None
    assert routing.bias is not None
    model = create_model("inverted_cifar10", routing=DynamicRouting, iterations=4)
    assert {layer.routing.iterations for layer in model.body.layers} == {4}


@pytest.mark.parametrize("routing", ["dynamic", "self_attention", "em"])
def test_probabilities_stay_probabilities(routing):
    model = create_model("capsnet_svhn", routing=routing)
    for parameter in model.parameters():
        parameter.data *= 100
    probabilities = model(torch.rand(2, 3, 32, 32)).probabilities
    assert (probabilities >= 0).all()
    assert (probabilities <= 1).all()


def test_layers_refuse_other_children():
    from torchcaps.layers import ConvCaps, LinearCaps, SharedCaps
    from torchcaps.routing import DynamicRouting

    linear = LinearCaps(6, 4, 5, 4, DynamicRouting)
    for poses in (torch.rand(2, 12, 4), torch.rand(2, 6, 8)):
        with pytest.raises(ValueError, match=r"built for 6 children of 4, got (12 of 4|6 of 8)"):
            linear(poses)
    with pytest.raises(ValueError, match=r"built for 3 children of 4, got 3 of 8"):
        ConvCaps(3, 4, 5, 4, 3, 1, DynamicRouting)(torch.rand(2, 3, 8, 5, 5))
    with pytest.raises(ValueError, match="a window of 3 does not fit 2 pixels"):
        ConvCaps(3, 4, 5, 4, 3, 1, DynamicRouting)(torch.rand(2, 3, 4, 2, 5))
    with pytest.raises(ValueError, match="matrix pose"):
        SharedCaps(2, 8, 4, 3, 4, DynamicRouting, coordinates=True)
    with pytest.raises(ValueError, match="spatial poses"):
        SharedCaps(2, 8, 4, 3, 4, DynamicRouting, coordinates=True, pose="matrix")(torch.rand(2, 8, 4))


def test_a_backbone_of_unfit_channels():
    with pytest.raises(ValueError, match="needs a multiple of 8 channels, got 6"):
        create_model("efficient_capsnet", backbone=nn.Conv2d(3, 6, 3))


def test_a_backbone_for_other_colours():
    with pytest.raises(ValueError, match="the backbone cannot take image 3 x 32 x 32"):
        create_model("inverted_cifar10", backbone=nn.Conv2d(1, 8, 3))


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (torch.zeros(2, 1, 28, 28, dtype=torch.uint8), None, "images must be floating point, got torch.uint8"),
        (torch.zeros(2, 3, 28, 28), None, r"images must be \[b, 1, 28, 28\], got \[2, 3, 28, 28\]"),
        (torch.zeros(2, 1, 32, 32), None, r"images must be \[b, 1, 28, 28\], got \[2, 1, 32, 32\]"),
        (torch.zeros(1, 28, 28), None, r"images must be \[b, 1, 28, 28\], got \[1, 28, 28\]"),
        ([[0.0]], None, "images must be a tensor, got list"),
        (
            torch.zeros(2, 1, 28, 28).double(),
            None,
            "images must be torch.float32 like the network's weights, got torch.f",
        ),
        (torch.zeros(2, 1, 28, 28), [0, 1], "labels must be a tensor, got list"),
        (torch.zeros(2, 1, 28, 28), torch.tensor([0, 10]), "labels must lie between 0 and 9, got 0 to 10"),
        (torch.zeros(2, 1, 28, 28), torch.tensor([-1, 3]), "labels must lie between 0 and 9, got -1 to 3"),
        (torch.zeros(2, 1, 28, 28), torch.tensor([[1, -1], [3, -2]]), "labels must lie between -1 and 9, got -2 to 3"),
        (torch.zeros(2, 1, 28, 28), torch.tensor([0.0, 1.0]), "labels must be int64, got torch.float32"),
        (torch.zeros(2, 1, 28, 28), torch.tensor([0, 1, 2]), r"labels must be \[2\] or \[2, k\], got \[3\]"),
    ],
)
def test_bad_batches(images, labels, sentence):
    model = create_model("efficient_capsnet_mnist")
    with pytest.raises(ValueError, match=sentence):
        model(images, labels)


def test_a_pose_that_is_no_square():
    from functools import partial

    from torchcaps.layers import ConvCaps, LinearCaps
    from torchcaps.routing import DynamicRouting

    for layer in (partial(LinearCaps, 5, 12, 3, 12), partial(ConvCaps, 5, 12, 3, 12, 3, 1)):
        with pytest.raises(ValueError, match="square number of entries, got 12; the nearest that fit are 9 and 16"):
            layer(DynamicRouting, pose="matrix")


def test_labels_choose_what_is_decoded():
    model = create_model("capsnet_multimnist", image=(1, 20, 20)).eval()
    images = torch.rand(2, 1, 20, 20)
    with torch.no_grad():
        free = model(images)
        best = free.scores.topk(2).indices
        told = model(images, best)
        swapped = model(images, best.flip(1))
        padded = model(images, torch.tensor([[0, -1], [1, 2]]))
    assert free.reconstruction.shape == (2, 2, 1, 20, 20)
    torch.testing.assert_close(free.reconstruction, told.reconstruction)
    torch.testing.assert_close(free.reconstruction, swapped.reconstruction.flip(1))
    nothing = model.decoder(torch.zeros(1, 10, 16))
    torch.testing.assert_close(padded.reconstruction[0, 1], nothing[0])


def test_half_precision_throughout():
    """A network turned to bfloat16 as a whole, not by autocast, still routes."""
    for name, options in (("efficient_capsnet_mnist", {}), ("inverted_cifar10", {"backbone": "simple"})):
        model = create_model(name, **options).to(torch.bfloat16).eval()
        out = model(torch.rand(2, *model.image, dtype=torch.bfloat16))
        assert out.scores.dtype == torch.bfloat16
        assert out.scores.isfinite().all()
