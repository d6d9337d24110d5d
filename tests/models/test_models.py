"""Every preset, by walking the registry: a new one is tested without a new line, but for its count."""

from functools import cache

import pytest
import safetensors.torch
import torch
from torch import nn

import torchcaps
from torchcaps import create_model, list_models
from torchcaps.losses import margin_loss
from torchcaps.models.registry import find_preset

COUNTS = [  # without decoder and feedback, exactly
    ("capsnet_mnist", {"form": "official"}, 6_804_384),
    ("capsnet_mnist", {}, 6_804_384 - 160),
    ("capsnet_mnist", {"routing": "self_attention"}, 6_804_224 + 1152 * 10),
    ("capsnet_multimnist", {"form": "official"}, 9_425_824),
    ("capsnet_multimnist", {}, 9_425_824 - 160),
    ("capsnet_cifar10", {"form": "official"}, 22_476_448),
    ("capsnet_cifar10", {}, 22_476_448 - 160),
    ("capsnet_smallnorb", {"form": "official"}, 6_661_200),
    ("capsnet_smallnorb", {}, 6_661_200 - 80),
    ("capsnet_svhn", {"form": "official"}, 1_004_976),
    ("capsnet_svhn", {}, 1_004_976 - 80),
    ("capsnet_affnist", {"form": "official"}, 11_228_064),
    ("capsnet_affnist", {}, 11_228_064 - 160),
    ("efficient_capsnet_mnist", {}, 161_824),
    ("efficient_capsnet_smallnorb", {}, 151_664),
    ("efficient_capsnet_multimnist", {}, 154_656),
    ("inverted_cifar10", {"backbone": "simple"}, 561_297),
    ("inverted_cifar10", {}, 1_828_817),
    ("inverted_cifar100", {"backbone": "simple"}, 1_462_989),
    ("inverted_cifar100", {}, 2_799_629),
    ("inverted_diverse_multimnist", {}, 9_963_969),
    ("inverted_diverse_multimnist", {"pose": "vector"}, 42_478_017),
    ("dynamic_diverse_multimnist", {}, 42_478_017 - 3 * 128),
    ("dynamic_cifar10", {"backbone": "simple"}, 7_992_576),
    ("dynamic_cifar10", {}, 12_451_136),
    ("dynamic_cifar100", {"backbone": "simple"}, 31_585_536),
    ("dynamic_cifar100", {}, 36_044_096),
    ("em_cifar10", {"backbone": "simple"}, 453_044),
    ("em_cifar10", {}, 1_710_580),
    ("em_cifar100", {"backbone": "simple"}, 499_304),
    ("em_cifar100", {}, 1_756_840),
    ("em_smallnorb", {}, 316_650),
    ("em_smallnorb", {"channels": 64, "types": (8, 16, 16)}, 68_618),
    ("encapnet18_cifar10", {}, 36_474_944),
    ("encapnet18_cifar10", {"aide_modules": ()}, 1_743_680),
    ("encapnet14_cifar10", {}, 1_729_920),
    ("encapnet14_cifar10", {"aide_modules": (3, 4)}, 26_195_456),
    ("encapnet6_cifar10", {"aide_modules": ()}, 1_702_400),
    ("encapnet6_cifar10", {}, 10_254_656),
    ("capnet_dynamic_cifar10", {}, 9_913_600),
    ("capnet_em_cifar10", {}, 9_991_540),
    ("cnn_mnist", {}, 35_445_522),
    ("cnn_multimnist", {}, 24_563_978),
    ("cnn_cifar10", {}, 18_919_434),
    ("cnn_cifar100", {}, 19_011_684),
    ("cnn_diverse_multimnist", {}, 19_553_162),
    ("cnn_diverse_multimnist", {"head": "dense"}, 42_490_762),
    ("resnet18_cifar10", {}, 11_173_962),
    ("resnet18_cifar100", {}, 11_220_132),
]
WITH_DECODER = [
    ("capsnet_mnist", {"form": "official"}, 8_215_728),
    ("capsnet_multimnist", {"form": "official"}, 11_361_968),
    ("efficient_capsnet_mnist", {}, 161_824 + 1_411_344),
    ("efficient_capsnet_smallnorb", {}, 151_664 + 229_570),
    ("efficient_capsnet_multimnist", {}, 154_656 + 1_936_144),
    ("ar_capsnet_mnist", {}, 5_312_528),
    ("ar_capsnet_affnist", {}, 3_500_832),
    ("ar_capsnet_cifar10", {}, 9_566_336),
    ("ar_capsnet_cifar10", {"depth": 0, "dim": 16}, 7_293_408 - 256),
    ("dynamic_cifar10", {"backbone": "simple", "decoder": True}, 11_749_120),
]
SMALLER = {name: {"image": (3, 16, 16)} for name in list_models("capnet_*")}  # 2,048 x 2,048 votes take their time
LENGTHS = [  # scores are lengths of squashed capsules, trained by the margin loss
    name
    for name in list_models()
    if name.startswith(("capsnet", "efficient", "ar_", "dynamic_cifar", "encapnet", "capnet_dynamic", "mazzia_vector"))
]


def on_meta(name, options):
    with torch.device("meta"):
        return find_preset(name).build(**options)


def count(model, decoder=False):
    aside = ("feedback.",) if decoder else ("decoder.", "feedback.")
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(aside))


@pytest.mark.parametrize(("name", "options", "parameters"), COUNTS)
def test_count(name, options, parameters):
    assert count(on_meta(name, options)) == parameters


@pytest.mark.parametrize(("name", "options", "parameters"), WITH_DECODER)
def test_count_with_decoder(name, options, parameters):
    assert count(on_meta(name, options), decoder=True) == parameters


def test_wide_matrix_network_has_the_papers_42_million():
    assert count(on_meta("inverted_diverse_multimnist", {"width": 2128})) == pytest.approx(42e6, rel=0.01)


def pictures(batch, image):
    """Soft strokes on black: low frequencies, mostly dark, in [0, 1]."""
    coarse = torch.randn(batch, image[0], 6, 6)
    return nn.functional.interpolate(coarse, image[1:], mode="bicubic").sub(0.5).clamp(0, 1)


@cache
def network(name):
    torch.manual_seed(0)
    return create_model(name, **SMALLER.get(name, {}))


@pytest.fixture(params=list_models())
def model(request):
    model = network(request.param)
    yield model.train()
    model.zero_grad(set_to_none=True)
    if request.param != list_models()[-1]:
        network.cache_clear()


def warm(model, images):
    """Batch norms that have seen data; before that they are the identity and capsules vanish layer by layer."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return model.eval()


def labels_for(model, batch):
    labels = torch.arange(batch) % model.classes
    if model.objects == 1:
        return labels
    second = (labels + 1) % model.classes
    second[-1] = -1
    return torch.stack([labels, second], dim=1)


def test_forward_backward_and_what_comes_out(model):
    images = pictures(2, model.image)
    out = model(images, labels_for(model, 2))
    assert isinstance(out, torchcaps.Output)
    assert out.scores.shape == out.probabilities.shape == (2, model.classes)
    assert (out.probabilities >= 0).all()
    assert (out.probabilities <= 1).all()
    loss = (out.scores * torch.randn_like(out.scores)).sum()
    if out.reconstruction is not None:
        assert out.reconstruction.shape == (2, model.objects, *model.image)
        loss = loss + (out.reconstruction * torch.randn_like(out.reconstruction)).mean()
    if out.penalty is not None:
        loss = loss + out.penalty
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert name.endswith("bias") or parameter.grad.any(), name  # a batch norm takes away what a bias before it adds


def test_one_is_the_first_of_many_and_weights_travel(model, tmp_path):
    images = pictures(3, model.image)
    warm(model, images)
    with torch.no_grad():
        many, one = model(images), model(images[:1])
        assert many.scores.std() > 1e-5
        torch.testing.assert_close(one.scores, many.scores[:1], rtol=1e-3, atol=1e-5)
        if many.reconstruction is not None:
            assert many.reconstruction.shape[1] == model.objects
            torch.testing.assert_close(one.reconstruction, many.reconstruction[:1], rtol=1e-3, atol=1e-4)
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        expected = model(images).scores
        for parameter in model.parameters():
            parameter.zero_()
        model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
        assert torch.equal(model(images).scores, expected)


def test_autocast_keeps_routing_in_float32(model):
    images = pictures(2, model.image)
    warm(model, images)
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images)
    assert out.scores.isfinite().all()
    torch.testing.assert_close(out.probabilities.float(), expected.probabilities, rtol=0.1, atol=0.05)
    if out.capsules is not None and out.capsules.coupling is not None:
        assert out.capsules.coupling.dtype == torch.float32


def test_compiles_without_a_break(model):
    images = pictures(2, model.image)
    warm(model, images)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(images)
        torch.testing.assert_close(compiled.scores, model(images).scores)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("efficient_capsnet_mnist", {"decoder": False}),
        ("capsnet_svhn", {"decoder": False, "image": (1, 20, 20)}),
        ("inverted_cifar10", {"backbone": "simple", "image": (1, 20, 20)}),
    ],
)
def test_inductor(name, options):
    torch._dynamo.reset()
    model = create_model(name, **options)
    images = pictures(2, model.image)
    warm(model, images)
    compiled = torch.compile(model, fullgraph=True)(images)
    expected = model(images)
    torch.testing.assert_close(compiled.scores, expected.scores, rtol=1e-3, atol=1e-5)
    compiled.scores.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected.scores.sum().backward()
    for gradient, (name, parameter) in zip(gradients, model.named_parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2, atol=1e-4, msg=name)


OFFICIAL = [(name, {"form": "official"}) for name in LENGTHS if name.startswith("capsnet")]
DEEPER = [("efficient_capsnet_mnist", {"hidden": ((16, 8),) * n}) for n in (1, 3)]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in LENGTHS), *OFFICIAL, *DEEPER])
def test_statistics_at_the_start(name, options):
    model = create_model(name, **options).train()
    labels = torch.arange(8) % model.classes
    with torch.no_grad():
        out = model(pictures(8, model.image))
    mean = out.scores.mean().item()
    low = 0.01 if name.startswith("efficient") else 0.03 if name.startswith("ar_") else 0.05  # starts as released
    assert low < mean < 0.5, mean
    loss = margin_loss(out.scores, labels).item()
    assert (0.4 if options.get("form") == "official" else 0.5) < loss < (0.9 if model.classes <= 10 else 1.5), loss


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dynamic_diverse_multimnist", {}),
        *(
            (name, {"routing": routing, "iterations": iterations})
            for name in list_models("inverted_*")
            for routing, iterations in (("dynamic", 2), ("em", 1), ("em", 2), ("em", 3), ("self_attention", 2))
        ),
    ],
)
def test_capsules_below_a_linear_head_start_alive(name, options):
    """Where lengths vanish at the start, all images score alike and SGD learns nothing but the classes' shares."""
    model = create_model(name, **options).train()
    with torch.no_grad():
        out = model(pictures(8, model.image))
    length, spread = torchcaps.length(out.capsules.poses).mean(), out.scores.std(dim=0).mean()
    if options.get("routing") == "em":  # its poses are means, and activations scale the scores
        assert length > 0.01
        assert spread > 0.001
    else:
        assert 0.05 < length < 0.95
        assert spread > 0.005
