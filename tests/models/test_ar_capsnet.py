import math

import pytest
import torch
import torch.nn.functional as F

from torchcaps.models.ar_capsnet import ar_capsnet, ar_capsnet_affnist, ar_capsnet_cifar10, ar_capsnet_mnist
from torchcaps.models.registry import create_model, find_preset

BATCH_STATISTICS = 256  # the moving averages of two batch norms, which Keras prints among the parameters
TABLE_2 = {  # depth: dim 16, dim 32, as Keras counts; the paper prints them in millions
    0: ((7_293_408, "7.3"), (12_637_568, "12.6")),
    1: ((3_520_096, "3.5"), (7_716_480, "7.7")),
    2: ((3_678_944, "3.7"), (8_333_184, "8.3")),  # printed as 8.4
    3: ((3_837_792, "3.8"), (8_949_888, "8.9")),
    4: ((3_996_640, "4.0"), (9_566_592, "9.6")),
}
SMALL = {"image": (2, 9, 6), "classes": 3, "dim": 4}


def count(preset, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in preset(**options).parameters())


@pytest.mark.parametrize("depth", TABLE_2)
@pytest.mark.parametrize("dim", [16, 32])
def test_parameters_of_table_2(depth, dim):
    expected, printed = TABLE_2[depth][dim // 32]
    assert count(ar_capsnet_cifar10, depth=depth, dim=dim) == expected - BATCH_STATISTICS
    assert f"{expected / 1e6:.1f}" == printed


def test_parameters():
    assert count(ar_capsnet_mnist) == 5_312_528
    assert count(ar_capsnet_affnist) == 3_500_832
    assert count(ar_capsnet_cifar10) == 9_566_336
    assert count(ar_capsnet_mnist, attention="own") == 5_280_272  # the paper's text; its own figure is 5.31M
    assert count(ar_capsnet_mnist, decoder=False) == 5_312_528 - 829_200


def keras(model, images):
    """The network as the released code builds it: for each parent, a convolution for each child, a 3-D convolution over
    (h, w, d), a softmax over the children, a 1 x 1 convolution. Capsules are lists of channels [b, d, h, w]."""

    def padded(x, stride):
        pads = []
        for size in (x.shape[3], x.shape[2]):
            total = max(3 - (stride if size % stride == 0 else size % stride), 0)
            pads += [total // 2, total - total // 2]
        return F.pad(x, pads)

    def activation(s, part, n):
        return F.conv2d(s, part.weight[n].T[:, :, None, None], part.bias[n])

    def caps(children, layer, stride):
        outs = []
        for n in range(layer.weight.shape[1]):
            moved = [
                F.conv2d(u if stride is None else padded(u, stride), layer.weight[m, n], layer.bias[m, n], stride or 1)
                for m, u in enumerate(children)
            ]
            volume = torch.stack([s.permute(0, 2, 3, 1) for s in moved], 1)  # [b, m, h, w, d]
            kernel = layer.routing.kernel[:, :, n].transpose(0, 1)[:, :, None, None]  # [i, m, 1, 1, d]
            c = F.conv3d(volume, kernel).softmax(1)  # [b, i, h, w, 1]
            s = (c * volume).sum(1).permute(0, 3, 1, 2)
            outs.append(activation(s, layer.routing.activation, n))
        return outs

    x = images
    for conv, norm in ((model.stem[0], model.stem[1]), (model.stem[3], model.stem[4])):
        x = F.conv2d(padded(x, 1), conv.weight, conv.bias)
        mean, var = (s[:, None, None] for s in (norm.running_mean, norm.running_var))
        x = F.relu((x - mean) / (var + 1e-3).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None])
    primary = model.primary
    features = F.relu(F.conv2d(padded(x, 2), primary.conv.weight, primary.conv.bias, 2)).split(16, 1)
    u = [activation(s, primary.activation, n).tanh() for n, s in enumerate(features)]
    first, *others, last = model.body.layers
    u = [s.tanh() for s in caps(u, first, 2)]
    for residual in others:
        u = [(below + s).tanh() for below, s in zip(u, caps(u, residual.layer, 1), strict=True)]
    poses = torch.stack([s.tanh()[:, :, 0, 0] for s in caps(u, last, None)], 1)
    scores = (poses**2).sum(-1).sqrt() / math.sqrt(poses.shape[-1])
    return poses, scores


@pytest.mark.parametrize("depth", [1, 3])
def test_equals_the_network_pair_by_pair(depth):
    model = ar_capsnet_cifar10(**SMALL, depth=depth).double().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias") or "running" in name:
                tensor.uniform_(0.1, 0.9)
    images = torch.rand(2, 2, 9, 6).double()
    out = model(images)
    poses, scores = keras(model, images)
    torch.testing.assert_close(out.capsules.poses, poses)
    torch.testing.assert_close(out.scores, scores)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("attention", ["all", "own"])
def test_every_parameter_gets_a_gradient(depth, attention):
    model = ar_capsnet_cifar10(**SMALL, depth=depth, attention=attention)
    out = model(torch.rand(3, 2, 9, 6), torch.tensor([0, 1, 2]))
    assert out.reconstruction.shape == (3, 1, 2, 9, 6)
    assert out.penalty is None
    (out.scores.sum() + out.reconstruction.sum()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        if not name.startswith(("stem.0.bias", "stem.3.bias")):  # batch norm takes those out again
            assert p.grad.abs().sum() > 0, name


def test_zero_images_have_finite_gradients():
    model = ar_capsnet_cifar10(**SMALL)
    model(torch.zeros(2, 2, 9, 6)).scores.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_batch_of_one_equals_the_first_of_many():
    model = ar_capsnet_cifar10(**SMALL).double().eval()
    images = torch.rand(4, 2, 9, 6).double()
    torch.testing.assert_close(model(images[:1]).scores, model(images).scores[:1])
    torch.testing.assert_close(model(images[:1]).reconstruction, model(images).reconstruction[:1])
    assert model.train()(images[:1]).scores.isfinite().all()


def test_dropout_in_training_only():
    images = torch.rand(2, 2, 9, 6)
    model = ar_capsnet_cifar10(**SMALL).train()
    assert not torch.equal(model(images).scores, model(images).scores)
    model.eval()
    assert torch.equal(model(images).scores, model(images).scores)
    without = ar_capsnet_cifar10(**SMALL, dropout=0.0).train()
    assert torch.equal(without(images).scores, without(images).scores)


def test_dropout_leaves_the_way_around_alone():
    """With nothing let through a residual layer is tanh(u + what its biases give)."""
    model = ar_capsnet_cifar10(**SMALL, depth=2, dropout=1.0)
    residual = model.body.layers[1]
    poses = torch.rand(2, 8, 4, 3, 2)
    torch.testing.assert_close(residual(poses).poses, poses.tanh())  # biases start at 0


def test_compiles_whole():
    model = ar_capsnet_cifar10(**SMALL, depth=2).eval()
    images = torch.rand(2, 2, 9, 6)
    labels = torch.tensor([0, 2])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, labels).scores, model(images, labels).scores)
    torch.testing.assert_close(compiled(images, labels).reconstruction, model(images, labels).reconstruction)


def test_autocast_is_close():
    model = ar_capsnet_cifar10(**SMALL, depth=2).eval()
    images = torch.rand(2, 2, 9, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = model(images)
    assert ours.scores.dtype == torch.float32
    torch.testing.assert_close(ours.scores, model(images).scores, rtol=0.03, atol=0.01)


@pytest.mark.parametrize("preset", [ar_capsnet_mnist, ar_capsnet_affnist, ar_capsnet_cifar10], ids=lambda p: p.__name__)
def test_statistics_at_the_start(preset):
    model = preset()
    images, labels = torch.rand(8, *model.image), torch.arange(8)
    scores = model(images).scores
    assert 0.05 < scores.mean() < 0.5
    target = F.one_hot(labels, 10)
    margin = target * (0.9 - scores).clamp(min=0) ** 2 + 0.5 * (1 - target) * (scores - 0.1).clamp(min=0) ** 2
    assert 0.5 < margin.sum(1).mean() < 0.9
    coupling = model.body(model.primary(model.stem(images)).poses).coupling
    assert coupling.shape == (8, 8, 10)
    torch.testing.assert_close(coupling.sum(1), torch.ones(8, 10))


def test_batch_norm_and_start_are_those_of_keras():
    model = ar_capsnet_mnist()
    assert (model.stem[1].eps, model.stem[1].momentum) == (1e-3, 0.01)
    for layer, fans in ((model.stem[3], 9 * 128), (model.primary.conv, 9 * 192), (model.decoder.layers[0], 320 + 512)):
        limit = math.sqrt(6 / fans)
        assert 0.99 * limit < layer.weight.abs().max() <= limit
        assert not layer.bias.any()


def test_weights_start_as_in_the_released_code():
    """The limits of Keras's glorot_uniform for the kernels that it has there, as [..., ins, outs]."""
    model = ar_capsnet_cifar10(kernel_start="whole")
    first, second, last = model.body.layers[0], model.body.layers[1].layer, model.body.layers[4]
    shapes = {
        model.primary.conv.weight: (3, 3, 64, 128),
        model.primary.activation.weight: (1, 1, 16, 16 * 8),
        first.weight: (3, 3, 16, 8 * 32 * 8),
        first.routing.kernel: (1, 1, 32, 8, 8 * 8),
        second.weight: (3, 3, 32, 8 * 32 * 8),
        second.routing.activation.weight: (1, 1, 32, 32 * 8),
        last.weight: (8, 8, 32, 8 * 32 * 10),
        last.routing.kernel: (1, 1, 32, 8, 8 * 10),
        last.routing.activation.weight: (1, 1, 32, 32 * 10),
    }
    for weight, (*field, ins, outs) in shapes.items():
        limit = math.sqrt(6 / (math.prod(field) * (ins + outs)))
        assert 0.98 * limit < weight.abs().max() <= limit
    with pytest.raises(ValueError, match="kernel_start must be pair or whole, got 'keras'"):
        ar_capsnet_cifar10(kernel_start="keras")


@pytest.mark.parametrize("image", [(1, 1, 1), (3, 2, 5), (1, 17, 30), (4, 64, 48)])
@pytest.mark.parametrize("preset", ["ar_capsnet_mnist", "ar_capsnet_affnist", "ar_capsnet_cifar10", "ar_capsnet"])
def test_any_image_and_classes(preset, image):
    model = create_model(preset, image=image, classes=7, dim=4).eval()
    out = model(torch.rand(2, *image))
    assert out.scores.shape == (2, 7)
    assert out.reconstruction.shape == (2, 1, *image)
    assert ((out.probabilities >= 0) & (out.probabilities <= 1)).all()


def test_the_alias_is_the_papers_network_for_its_images_and_halves_larger_ones():
    for image in ((1, 28, 28), (3, 32, 32), (1, 40, 40)):
        assert count(ar_capsnet, image=image) == count(ar_capsnet_cifar10, image=image)
    for side, halved in ((41, 2), (64, 2), (96, 3), (224, 4)):
        with torch.device("meta"):
            *layers, last = ar_capsnet(image=(3, side, side)).body.layers
        assert [getattr(layer, "stride", 1) for layer in layers] == [2] * halved + [1] * (4 - halved)
        assert max(last.weight.shape[4:]) <= 10


def test_bad_options():
    with pytest.raises(ValueError, match="depth must be a whole number from 0, got -1"):
        ar_capsnet_cifar10(depth=-1)
    with pytest.raises(ValueError, match="dim must be a whole number from 1, got 0"):
        ar_capsnet_cifar10(dim=0)
    with pytest.raises(ValueError, match="attention must be all or own, got 'vector'"):
        ar_capsnet_cifar10(attention="vector")
    with pytest.raises(ValueError, match="more than the budget"):
        create_model("ar_capsnet_mnist", image=(3, 1000, 1000))


def test_what_the_paper_prints():
    assert find_preset("ar_capsnet_mnist").parameters == "5.31M with decoder"
    assert find_preset("ar_capsnet_cifar10").parameters == "9.6M with decoder"
    assert find_preset("ar_capsnet_mnist").operations == "0.098G"
