from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.train.test_train import RECIPE, Tiny, few_digits
from torchcaps import margin_loss, reconstruction_loss
from torchcaps.data import Batch, Batches
from torchcaps.train import capture
from torchcaps.train.capture import WARM_UP, Captured, Compiled
from torchcaps.train.fabric import Fabric
from torchcaps.train.optim import create_optimizer, load_moments, set_rates
from torchcaps.train.prepare import drawn_together, may_capture, seed_of, training_batches
from torchcaps.train.step import Step, Tally


class Graph:
    """Stands for a CUDA graph: what is recorded is called again, on the tensors it was recorded with."""

    def replay(self):
        self.again()


@pytest.fixture
def graphs(monkeypatch):
    """A CPU that seems to have CUDA graphs. A recording does nothing; its replay does."""

    @contextmanager
    def record(graph, stream):
        graph.stream = stream
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(capture, "renew_generator", lambda device: None)


def recorded(captured, update):
    """Makes a Captured that records without running, as CUDA does, and runs when it is replayed."""
    terms = {"loss": torch.zeros(())}

    def record(batch):
        graph = original(batch)
        graph.again = lambda: terms["loss"].copy_(update(captured.batch)["loss"])
        captured.terms = terms
        return graph

    captured.update, original = (lambda batch: {"loss": torch.tensor(-1.0)}), captured.record
    captured.record = lambda batch: record(batch)
    return captured


def test_full_batches_are_replayed_and_others_are_not(graphs):
    seen = []

    def update(batch):
        seen.append(float(batch.images.sum()))
        return {"loss": batch.images.sum()}

    captured = Captured(update, 4, pytest.fail)
    sizes = [4] * WARM_UP + [2, 4, 4, 3, 4]
    batches = [Batch(torch.full((size, 1), float(k)), torch.zeros(size)) for k, size in enumerate(sizes)]
    for batch in batches[: WARM_UP + 1]:
        captured(batch)
    assert captured.graph is None
    assert seen == [float(batch.images.sum()) for batch in batches[: WARM_UP + 1]]
    recorded(captured, update)
    seen.clear()
    found = [float(captured(batch)["loss"]) for batch in batches[WARM_UP + 1 :]]
    assert captured.graph.stream == "stream"
    assert found == [4 * 4, 4 * 5, -1.0, 4 * 7]  # -1 is the small one, not replayed
    assert seen == [16, 20, 28]


def test_a_recording_that_fails_is_said_once(graphs, monkeypatch):
    @contextmanager
    def fails(graph, stream):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    said, calls = [], []

    def update(batch):
        calls.append(1)
        return {"loss": torch.tensor(1.0)}

    captured = Captured(update, 4, said.append)
    for _ in range(WARM_UP + 3):
        assert captured(Batch(torch.zeros(4, 1), torch.zeros(4)))["loss"] == 1
    sentence = "the step cannot be captured in a CUDA graph and runs without one: operation not permitted"
    assert said == [f"{sentence} when stream is capturing"]
    assert len(calls) == WARM_UP + 4  # the failed recording ran nothing on a device


def a_step(recipe=RECIPE, **options):
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    network = Tiny()
    model, optimizer = fabric.setup(network, create_optimizer(recipe, network.parameters()))
    return Step(recipe, 3, fabric, network, model, optimizer, 8, **options)


def test_a_step_is_the_plain_one():
    eps = 1e-3  # or the bias before a norm, whose gradient is rounding and nothing else, would move as far as the rest
    recipe = replace(RECIPE, clip=None, optimizer_args={"eps": eps})
    step, batches = a_step(recipe), Batches(few_digits().train, 16, seed=0)
    torch.manual_seed(0)
    network = Tiny()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, eps=eps)
    for number, batch in zip(range(4), batches.epoch(0), strict=False):
        terms = step(batch, number)
        torch.manual_seed(seed_of(3, number, 0))
        output = network(batch.images, batch.labels)
        margin = margin_loss(output.scores, batch.labels)
        picture = 0.01 * reconstruction_loss(output.reconstruction, batch.images, reduction="sum")
        optimizer.zero_grad()
        (margin + picture + output.penalty).backward()
        optimizer.step()
        expected = {"margin": margin, "reconstruction": picture, "penalty": output.penalty}
        torch.testing.assert_close(terms, {name: value.detach() for name, value in expected.items()})
    torch.testing.assert_close(dict(step.network.state_dict()), dict(network.state_dict()))
    assert step.tally.images == 64
    assert step.ema.updates == 4


def test_a_compiled_step_is_the_plain_one(monkeypatch):
    """Full batches go through what torch.compile makes, without what Fabric adds; a smaller one does not."""
    compiled = []

    def stand_in(function, dynamic):
        def run(*args):
            compiled.append(len(args[0]))
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", stand_in)
    recipe = replace(RECIPE, clip=None)
    plain, other = a_step(recipe), a_step(recipe, compiled=True, say=pytest.fail)
    batches = list(Batches(few_digits().train, recipe.batch_size, seed=0).epoch(0))[:3]
    batches.append(Batch(batches[0].images[:5], batches[0].labels[:5]))
    for number, batch in enumerate(batches):
        torch.testing.assert_close(other(batch, number), plain(batch, number), rtol=0, atol=0)
    assert compiled == [recipe.batch_size] * 3
    torch.testing.assert_close(other.network.state_dict(), plain.network.state_dict(), rtol=0, atol=0)


def test_what_cannot_be_compiled_is_said_once(monkeypatch):
    def fails(*args):
        raise RuntimeError("no compiler found\nand more")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    said = []
    step = Compiled(lambda x: {"loss": 2 * x}, said.append)
    assert [step(k)["loss"] for k in range(3)] == [0, 2, 4]
    assert said == ["the network cannot be compiled and runs as it is: no compiler found"]


def test_the_tally_means_and_names_the_step_that_spoilt_it():
    tally = Tally(torch.device("cpu"))
    assert tally.means() == {}
    assert tally.first_bad() is None
    for value, images in ((1.0, 10), (3.0, 30)):
        tally.add(("a", "b"), torch.tensor([value, 2 * value]), images)
        tally.count(images)
    assert tally.means() == {"a": 2.5, "b": 5.0}
    assert tally.first_bad() is None
    other = Tally(torch.device("cpu"))
    other.load_state_dict(tally.state_dict())
    assert other.means() == tally.means()
    for value in (1.0, float("inf"), 1.0, float("nan")):
        tally.add(("a", "b"), torch.tensor([1.0, value]), 1)
        tally.count(1)
    assert tally.first_bad() == (3, "b")
    totals = tally.totals
    tally.clear()
    assert tally.first_bad() is None
    assert tally.totals is totals


@pytest.mark.parametrize("name", ["sgd", "adam_keras", "rmsprop_keras"])
def test_a_rate_on_the_device_is_the_same_rate(name):
    recipe = replace(RECIPE, optimizer=name, lr=0.1, schedule="exponential_steps", schedule_args={"decay": 0.5})

    def descend(rate):
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer = create_optimizer(recipe, [weight])
        optimizer.param_groups[0]["lr"] = rate
        for step in range(5):
            set_rates(optimizer, recipe, step, 10)
            weight.grad = weight.detach() * (step + 1)
            optimizer.step()
        return weight.detach()

    on_device = torch.tensor(0.1, dtype=torch.float64)
    torch.testing.assert_close(descend(on_device), descend(0.1), rtol=1e-12, atol=0)
    assert on_device != 0.1


def test_moments_lie_as_their_weights_do():
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = create_optimizer(RECIPE, network.parameters())
    network(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()["state"]
    saved = {key: {name: value.contiguous() for name, value in each.items()} for key, each in before.items()}
    other = create_optimizer(RECIPE, network.parameters())
    load_moments(other, saved)
    moment = other.state[network.weight]["exp_avg"]
    assert moment.stride() == network.weight.stride()
    assert torch.equal(moment, optimizer.state[network.weight]["exp_avg"])


class On:
    """Where a run is, as far as capturing asks."""

    def __init__(self, device, world_size=1):
        self.device, self.world_size = torch.device(device), world_size


@pytest.mark.parametrize(
    ("on", "precision", "sentence"),
    [
        (On("cpu"), "32", "this run is on cpu, not on a CUDA device"),
        (On("cuda", 2), "32", "several processes have to wait for each other"),
        (On("cuda"), "fp16", "fp16 asks the device"),
    ],
)
def test_what_cannot_be_captured_is_not_unless_asked_for(on, precision, sentence):
    recipe = replace(RECIPE, precision=precision)
    assert may_capture(recipe, on, None) is False
    assert may_capture(recipe, on, False) is False
    with pytest.raises(ValueError, match=sentence):
        may_capture(recipe, on, True)


def test_one_cuda_device_captures_by_default():
    assert may_capture(RECIPE, On("cuda"), None)
    assert may_capture(replace(RECIPE, precision="bf16"), On("cuda"), True)
    assert not may_capture(RECIPE, On("cuda"), False)


def test_small_batches_are_drawn_together_on_cuda_alone():
    data = few_digits()
    assert drawn_together(RECIPE, data) == 256
    assert drawn_together(replace(RECIPE, batch_size=1 << 13), data) == 16
    assert drawn_together(replace(RECIPE, batch_size=1 << 20), data) == 1
    batches = training_batches(RECIPE, data, 0, {"device": torch.device("cpu"), "rank": 0, "world": 1})
    assert batches.together == 1


def test_a_recording_that_fails_leaves_the_seed(monkeypatch):
    """Random numbers begin anew at the step's own seed, not at PyTorch's."""
    states = []
    monkeypatch.setattr(torch.cuda, "default_generators", [SimpleNamespace(graphsafe_set_state=states.append)])
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    capture.renew_generator(torch.device("cpu", 0))
    assert torch.equal(torch.rand(3, generator=states[0]), expected)
