import pytest
import torch
import torch.nn.functional as F

import torchcaps.models.encapnet
import torchcaps.models.li_cnn  # noqa: F401
from torchcaps.losses import margin_loss
from torchcaps.models.registry import count_on_meta, create_model, find_preset

SMALL = {"image": (3, 16, 16), "layers": (1, 1, 0, 0), "aide_modules": (1, 2)}
TINY = {"image": (3, 8, 8), "layers": (1, 0, 0, 0), "aide_modules": (1,)}
RESNET = {"image": (3, 8, 8), "blocks": (2, 1, 1, 1)}


def small(**options):
    torch.manual_seed(0)
    return create_model("encapnet", **{**SMALL, **options})


def tiny(**options):
    return small(**{**TINY, **options})


def images(batch=4, image=(3, 16, 16), dtype=torch.float32):
    return torch.rand(batch, *image, generator=torch.Generator().manual_seed(1)).to(dtype)


def warm(network, x):
    """To eval mode with the statistics of `x`; those of the start let squash shrink everything to nothing."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(x)
    return network.eval()


COUNTS = [
    ("encapnet18_cifar10", {}, 36_474_944),
    ("encapnet18_cifar10", {"aide_modules": ()}, 1_743_680),
    ("encapnet18_cifar10", {"aide_modules": (), "skips": "type1"}, 1_743_680),
    ("encapnet18_cifar10", {"aide_modules": (), "skips": "none"}, 176_000),
    ("encapnet18_cifar10", {"skips": "none"}, 34_907_264),
    ("encapnet18_cifar10", {"skips": "type2"}, 34_907_264),
    ("encapnet18_cifar10", {"aide": "complement"}, 36_474_944),
    ("encapnet18_cifar100", {}, 36_474_944 + 90 * 512 * 16),
    ("encapnet18_svhn", {}, 36_474_944),
    ("encapnet", {"image": (1, 28, 28)}, 36_474_944 - 2 * 9 * 32),  # 28, 14, 7, 4: as many class weights as 32
    ("encapnet14_cifar10", {}, 1_729_920),
    ("encapnet14_cifar10", {"aide_modules": (3, 4)}, 26_195_456),
    ("encapnet6_cifar10", {"aide_modules": ()}, 1_702_400),
    ("encapnet6_cifar10", {}, 10_254_656),
    ("li_cnn6_cifar10", {}, 1_575_690),
    ("li_cnn6_cifar10", {"pooling": False}, 1_652_490),
    ("li_cnn6_cifar10", {"width": 79}, 9_570_860),
    ("li_resnet18_cifar10", {}, 11_156_778),
]


@pytest.mark.parametrize(("name", "options", "count"), COUNTS, ids=str)
def test_counts(name, options, count):
    assert count_on_meta(find_preset(name), options) == count


@pytest.mark.parametrize("name", ["encapnet18_cifar10", "encapnet14_cifar10", "li_resnet18_cifar10"])
def test_feedback_is_counted_apart(name):
    with torch.device("meta"):
        network = find_preset(name).build(feedback="ot")
    apart = sum(p.numel() for n, p in network.named_parameters() if n.startswith("feedback."))
    assert apart > 0
    assert sum(p.numel() for p in network.parameters()) - apart == count_on_meta(find_preset(name), {})


def test_depth():
    def convolutions(**options):
        """What the paper counts: the masters, the first convolution and the class capsules."""
        with torch.device("meta"):
            network = find_preset("encapnet").build(**options)
        return 2 + sum(1 + len(module.type2) for module in network.body)

    for depth in (6, 10, 14, 18, 101):
        assert convolutions(depth=depth, aide_modules=()) == depth
    assert convolutions(layers=(0, 1, 2, 3)) == 2 + 10


def test_deep_networks_have_no_aide_in_shallow_modules():
    with torch.device("meta"):
        network = find_preset("encapnet18_cifar10").build(depth=101)
    assert [module.type1.routing is not None for module in network.body] == [False, False, True, True]


@pytest.mark.parametrize("skips", ["none", "type1", "type2", "both"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_skips_of_a_module_by_hand(skips, layerwise):
    network = tiny(layers=(3, 0, 0, 0), aide_modules=(), skips=skips, layerwise=layerwise).eval().double()
    module = network.body[0]
    u = torch.rand(2, 32, 1, 5, 5, dtype=torch.float64)
    assert (module.type1.skip is not None) == (skips in ("type1", "both"))
    first = module.type1(u).poses
    around = first if skips in ("type2", "both") else torch.zeros_like(first)
    v = first
    states = []
    for n, layer in enumerate(module.type2):
        core = layer.master(v.flatten(1, 2)) + (layerwise or n == 2) * around.flatten(1, 2)
        v = layer.activation(core)
        states.append(v)
    path = module(u)
    torch.testing.assert_close(path.end, v)
    torch.testing.assert_close(path.half, states[0])
    assert path.start is u


@pytest.mark.parametrize("options", [{}, {"feedback": "ot"}, {"feedback": "kl", "wiring": "within"}], ids=str)
def test_every_parameter_gets_a_gradient(options):
    network, labels = small(**options), torch.tensor([0, 3, 9, 3])
    output = network(images(), labels)
    loss = margin_loss(output.scores, labels)
    if options:
        loss = loss + output.penalty
    else:
        assert output.penalty is None
    loss.backward()
    assert output.capsules.poses.shape == (4, 10, 16)
    assert output.reconstruction is None
    assert output.probabilities.min() >= 0
    assert output.probabilities.max() <= 1
    for name, p in network.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
@pytest.mark.parametrize("aide", ["full", "complement"])
def test_zeroing_the_aide_changes_the_training_loss(version, aide):
    network, labels = tiny(version=version, aide=aide), torch.tensor([0, 3, 9, 3])
    x = images(image=TINY["image"])
    before = margin_loss(network(x, labels).scores, labels)
    with torch.no_grad():
        network.body[0].type1.aide[0].weight.zero_()
    assert (margin_loss(network(x, labels).scores, labels) - before).abs() > 1e-6


def test_gates_and_skips_change_what_comes_out():
    x = images(image=TINY["image"])
    scores = [
        tiny(**o)(x).scores
        for o in ({}, {"gate": "both"}, {"version": "v4"}, {"skips": "none"}, {"skips": "type1"}, {"skips": "type2"})
    ]
    for n, one in enumerate(scores):
        assert not any(torch.equal(one, other) for other in scores[:n])


def test_feedback_is_weighted_and_in_training_alone():
    x, network = images(image=TINY["image"]), tiny(feedback="ot")
    ten = network(x).penalty
    assert ten.shape == ()
    assert ten > 0
    network.feedback.weight = 1.0
    torch.testing.assert_close(10 * network(x).penalty, ten)
    assert tiny(feedback="ot", feedback_weight=0.0)(x).penalty == 0
    assert network.eval()(x).penalty is None


@pytest.mark.parametrize("name", ["encapnet", "li_resnet18_cifar10"])
def test_evaluation_is_the_same_without_the_feedback_unit(name):
    options, x = (TINY if name == "encapnet" else RESNET), images(image=(3, 8, 8))
    network = warm(create_model(name, **options, feedback="ot"), x)
    with_unit = network(x)
    network.feedback = None
    without = network(x)
    assert with_unit.scores.abs().mean() > 0.05
    assert torch.equal(with_unit.scores, without.scores)
    assert torch.equal(with_unit.probabilities, without.probabilities)


SWITCHES = [
    {"feedback": "kl"},
    {"bias_fix": False},
    {"extractor": False},
    {"generator": "vanilla"},
    {"cost": "l2"},
    {"wiring": "within"},
    {"wiring": "within2"},
    {"wiring": ("none", "none", "within", "within2")},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_switches_reach_the_feedback(switch):
    x, standard = images(image=TINY["image"]), tiny(feedback="ot")
    other = tiny(**{"feedback": "ot", **switch})
    mine = {k: v for k, v in standard.state_dict().items() if k in other.state_dict()}
    other.load_state_dict({k: v for k, v in mine.items() if v.shape == other.state_dict()[k].shape}, strict=False)
    assert (standard(x).penalty - other(x).penalty).abs() > 1e-6


def test_gradient_through_the_plan_reaches_the_feedback():
    gradients = []
    for through_plan in (False, True):
        network = tiny(feedback="ot", through_plan=through_plan)
        network(images(image=TINY["image"])).penalty.backward()
        gradients.append(network.feedback.units["within2_1"].generator.conv.weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-3)


def test_released_feedback():
    with torch.device("meta"):
        network = find_preset("encapnet14_cifar10").build(feedback="ot")
    assert list(network.feedback.units) == ["within_3", "within2_4"]
    assert network.feedback.weight == 1
    unit = network.feedback.units["within2_4"]
    assert unit.sinkhorn["through_plan"]
    assert unit.sinkhorn["cost"] == "l2"
    assert unit.generator.conv.groups == 1


@pytest.mark.parametrize("feedback", ["ot", "kl"])
@pytest.mark.parametrize("generator", ["vanilla", "capsule"])
def test_li_resnet_with_feedback(feedback, generator):
    network = create_model("li_resnet18_cifar10", **RESNET, feedback=feedback, generator=generator, wiring="both")
    labels = torch.tensor([0, 3, 9, 3])
    output = network(images(image=RESNET["image"]), labels)
    (F.cross_entropy(output.scores, labels) + output.penalty).backward()
    assert output.capsules is None
    torch.testing.assert_close(output.probabilities, output.scores.softmax(dim=1))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 13, 19), (1, 5, 5)])
def test_any_image(image):
    x = images(3, image)
    for network in (
        tiny(image=image, classes=4, feedback="ot"),
        create_model("li_cnn6_cifar10", image=image, classes=4, width=4),
        create_model("li_cnn6_cifar10", image=image, classes=4, width=4, pooling=False),
    ):
        output = network(x)
        assert output.scores.shape == (3, 4)
        assert output.penalty is None or output.penalty.isfinite()


@pytest.mark.parametrize("name", ["encapnet", "li_resnet18_cifar10", "li_cnn6_cifar10"])
def test_a_batch_of_one_equals_the_first_of_many(name):
    options = {"encapnet": SMALL, "li_resnet18_cifar10": RESNET}.get(name, {"image": (3, 8, 8), "width": 4})
    x = images(image=options["image"], dtype=torch.float64)
    network = warm(create_model(name, **options).double(), x)
    scores = network(x).scores
    assert scores.abs().mean() > 0.05
    torch.testing.assert_close(scores[0], network(x[:1]).scores[0])


@pytest.mark.parametrize(("name", "training"), [("encapnet", True), ("encapnet", False), ("li_resnet18_cifar10", True)])
def test_compile(name, training):
    options, x = (TINY if name == "encapnet" else RESNET), images(image=(3, 8, 8))
    wiring = ("within2", "none", "none", "none")
    network = warm(create_model(name, **options, feedback="ot", wiring=wiring), x).train(training)
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    labels = torch.tensor([0, 3, 9, 3])
    expected, output = network(x, labels), compiled(x, labels)
    torch.testing.assert_close(output.scores, expected.scores)
    if training:
        torch.testing.assert_close(output.penalty, expected.penalty)


def test_autocast_keeps_the_feedback_in_float32():
    network = small(feedback="ot", wiring=("both", "none", "none", "none"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = network(images())
    assert output.penalty.dtype == torch.float32
    assert output.penalty.isfinite()
    torch.testing.assert_close(output.scores.float(), network(images()).scores, atol=0.05, rtol=0)


def test_save_and_load():
    x, options = images(image=TINY["image"]), {"aide": "complement", "feedback": "ot"}
    one, other = warm(tiny(**options), x), warm(tiny(**options, bias_init="normal"), x)
    assert not torch.allclose(one(x).scores, other(x).scores)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x).scores, other(x).scores)


def test_decoder():
    network = tiny(decoder=True)
    output = network(images(image=TINY["image"]), torch.tensor([0, 3, 9, 3]))
    assert output.reconstruction.shape == (4, 1, 3, 8, 8)
    assert any(name.startswith("decoder.") for name, _ in network.named_parameters())


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_statistics_at_the_start(version):
    network, x = small(version=version), images(16)
    labels = torch.arange(16) % 10
    output = network((x - 0.5) / 0.29)
    assert 0.05 < output.scores.mean() < 0.5
    assert 0.4 < margin_loss(output.scores, labels) < 0.9


def test_biases_start_at_zero_or_as_released():
    zero, normal = tiny(), tiny(bias_init="normal")
    assert not zero.body[0].type1.routing.m1.bias.any()
    assert normal.body[3].type1.master.bias.std().item() == pytest.approx(1, abs=0.15)
    weight = zero.body[3].type1.skip.weight  # Xavier: 2 / (fan in + fan out)
    assert weight.std().item() == pytest.approx((2 / (9 * (256 + 512))) ** 0.5, rel=0.02)


BAD = [
    ({"depth": 20}, "depth must be one of 6, 10, 14, 18, 101, got 20"),
    ({"layers": (1, 2)}, "layers must be 4 numbers from 0"),
    ({"aide_modules": (0, 5)}, "aide_modules must be a sequence of modules from 1 to 4"),
    ({"skips": "all"}, "skips must be none, type1, type2 or both, got 'all'"),
    ({"version": "v5"}, "version must be one of"),
    ({"aide": "half"}, "aide must be full or complement"),
    ({"feedback": "mmd"}, "feedback must be ot or kl, got 'mmd'"),
    ({"bias_init": "ones"}, "bias_init must be zero or normal, got 'ones'"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_options(options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        find_preset("encapnet").build(**options)


def test_bad_options_of_the_plain_networks():
    with pytest.raises(ValueError, match="blocks must be 4 numbers"):
        find_preset("li_resnet18_cifar10").build(blocks=(2, 0, 2, 2))
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        find_preset("li_cnn6_cifar10").build(width=0)


def test_presets_show_their_options():
    for name in ("encapnet", "encapnet18_cifar100", "encapnet14_cifar10", "encapnet6_cifar10"):
        assert set(find_preset(name).options) == set(find_preset("encapnet").options)
    assert find_preset("encapnet18_cifar100").options["classes"] == 100
    assert find_preset("encapnet14_cifar10").options["aide_modules"] == ()
    assert find_preset("encapnet14_cifar10").build.__doc__.startswith("The released code's default")
