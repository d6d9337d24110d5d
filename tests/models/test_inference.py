"""Answers from recordings: when one is made, when it may be used again, and on a GPU that they are the network's."""

from typing import ClassVar

import pytest
import torch

import torchcaps
from torchcaps import create_model, ops
from torchcaps.models import inference
from torchcaps.models.inference import Inference

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = {"image": (1, 20, 20), "decoder": False}


def network(**options):
    torch.manual_seed(0)
    return create_model("efficient_capsnet_mnist", **options).eval()


def same(output, expected, **tolerance):
    for x, y in zip(output, expected, strict=True):
        if isinstance(y, tuple):
            same(x, y, **tolerance)
        elif y is None:
            assert x is None
        else:
            torch.testing.assert_close(x, y, **tolerance)


class Fake:
    """Stands for a recording on a machine without a GPU."""

    made: ClassVar[list] = []

    def __init__(self, network, images):
        self.network = network
        self.made.append(tuple(images.shape))

    def __call__(self, images):
        return self.network(images)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(inference, "_recordable", lambda images: True)
    monkeypatch.setattr(inference, "Recording", Fake)
    monkeypatch.setattr(Fake, "made", [])
    return Fake.made


def test_on_a_cpu_it_is_the_network_without_gradients():
    net, images = network(), torch.rand(3, 1, 28, 28)
    output = torchcaps.Inference(net)(images)
    same(output, net(images), rtol=0, atol=0)
    assert not output.scores.requires_grad
    assert net(images).scores.requires_grad


def test_a_network_in_training_is_refused():
    net = network().train()
    with pytest.raises(ValueError, match="must be in eval mode"):
        Inference(net)(torch.rand(1, 1, 28, 28))


def test_no_room_for_a_recording():
    with pytest.raises(ValueError, match="sizes must be at least 1, got 0"):
        Inference(network(), sizes=0)


def test_wrong_images_are_refused_as_by_the_network(fake):
    with pytest.raises(ValueError, match=r"images must be \[b, 1, 28, 28\]"):
        Inference(network())(torch.rand(1, 3, 28, 28))
    assert fake == []


def test_one_recording_for_each_size_and_for_what_is_asked(fake):
    answer = Inference(network(**SMALL))
    one, two = torch.rand(1, 1, 20, 20), torch.rand(2, 1, 20, 20)
    for images in (one, two, one, two):
        same(answer(images), answer.network(images))
    assert fake == [(1, 1, 20, 20), (2, 1, 20, 20)]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            answer(one)
        with ops.backend("torch"):
            answer(one)
    assert len(fake) == 4


def test_the_one_not_used_for_longest_is_forgotten(fake):
    answer = Inference(network(**SMALL), sizes=2)
    for size in (1, 2, 1, 3, 1, 2):
        answer(torch.rand(size, 1, 20, 20))
    assert [shape[0] for shape in fake] == [1, 2, 3, 2]


def test_weights_may_change_in_place_but_not_move(fake):
    net, images = network(**SMALL), torch.rand(1, 1, 20, 20)
    answer = Inference(net)
    before = answer(images).scores
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(answer(images).scores, before)
    assert len(fake) == 1
    net.double()
    assert answer(images.double()).scores.dtype == torch.float64
    assert len(fake) == 2
    assert len(answer._recordings) == 1
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    answer(images.double())
    assert len(fake) == 3


def test_a_module_may_be_replaced(fake):
    net, other, images = network(**SMALL), network(**SMALL), torch.rand(1, 1, 20, 20)
    answer = Inference(net)
    answer(images)
    with torch.no_grad():
        for parameter in other.primary.parameters():
            parameter.mul_(1.5)
    net.primary = other.primary
    same(answer(images), net(images))
    assert len(fake) == 2


def test_hooks_are_called(fake):
    net, seen = network(**SMALL), []
    net.primary.register_forward_hook(lambda *_: seen.append(1))
    answer = Inference(net)
    for _ in range(3):
        answer(torch.rand(1, 1, 20, 20))
    assert (len(seen), fake) == (3, [])


def test_what_cannot_be_recorded_runs_as_it_is(fake, monkeypatch, caplog):
    def fails(net, images):
        fake.append(len(images))
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(inference, "Recording", fails)
    net, images = network(**SMALL), torch.rand(1, 1, 20, 20)
    answer = Inference(net)
    for _ in range(3):
        same(answer(images), net(images))
    assert fake == [1]
    (record,) = caplog.records
    assert record.message.endswith("runs without one: operation not permitted when stream is capturing")


@ON_GPU
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("efficient_capsnet_mnist", {}),
        ("capsnet_mnist", {}),
        ("inverted_cifar10", {}),
        ("em_cifar10", {"backbone": "simple"}),
        ("ar_capsnet_mnist", {}),
        ("encapnet6_cifar10", {}),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_recorded_answers_are_the_networks(name, options, half):
    torch.manual_seed(0)
    net = create_model(name, **options).cuda().to(memory_format=torch.channels_last).eval()
    answer = Inference(net)
    given = [torch.rand(n, *net.image, device="cuda") for n in (1, 5, 1, 5)]
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        answers = [answer(images) for images in given]
        assert len(answer._recordings) == 2
        assert None not in answer._recordings.values()
        with torch.no_grad():
            expected = [net(images) for images in given]
    for output, of_network in zip(answers, expected, strict=True):
        same(output, of_network, rtol=1e-3, atol=1e-4)


@ON_GPU
def test_a_recording_on_a_gpu_reads_weights_where_they_lie_in_any_mode():
    net, images = network().cuda(), torch.rand(2, 1, 28, 28, device="cuda")
    answer = Inference(net)
    with torch.inference_mode():
        first = answer(images)
    kept = first.scores.clone()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)
    second = answer(images)
    assert torch.equal(first.scores, kept)
    with torch.no_grad():
        same(second, net(images), rtol=1e-3, atol=1e-4)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        third = answer(images.flip(3))
    side.synchronize()
    with torch.no_grad():
        same(third, net(images.flip(3)), rtol=1e-3, atol=1e-4)
