"""Parameters, operations, memory and layers of networks, by hand and against a real training step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchcaps.layers import ConvCaps, LinearCaps
from torchcaps.models import create_model, list_models
from torchcaps.models.measure import layers, operations, parameters, training_memory
from torchcaps.ops import vote_budget
from torchcaps.routing import DynamicRouting

ROOT = Path(__file__).parents[1]


def on_meta(name, **options):
    with torch.device("meta"):
        return create_model(name, **options)


def test_parameters_are_told_apart_by_where_they_live():
    model = on_meta("encapnet6_cifar10", feedback="ot", decoder=True)
    network, decoder, feedback = parameters(model)
    assert network == 10_254_656
    assert decoder == sum(p.numel() for p in model.decoder.parameters()) > 0
    assert feedback == sum(p.numel() for p in model.feedback.parameters()) > 0
    assert network + decoder + feedback == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_do_not_count():
    model = on_meta("capsnet_mnist")
    model.stem.requires_grad_(False)
    assert parameters(model).network == 6_804_224 - 20_992


@pytest.mark.parametrize(
    ("name", "giga"), [("capsnet_mnist", 0.402), ("efficient_capsnet_mnist", 0.060), ("ar_capsnet_mnist", 0.128)]
)
def test_operations_of_mazzia_table_1(name, giga):
    assert round(operations(name) / 1e9, 3) == giga


def test_operations_by_hand():
    conv = 20**2 * 81 * 256 + 6**2 * 81 * 256 * 256
    votes = 1152 * 10 * 8 * 16
    assert operations("capsnet_mnist") == 2 * (conv + votes)


def test_operations_leave_out_decoder_and_iterations():
    assert operations("capsnet_mnist", decoder=False, iterations=1) == operations("capsnet_mnist")


def test_concurrent_iterations_form_votes_again():
    """Where they still reach the class capsules: one layer further down with each iteration."""
    one, two, three, four, five = (
        operations("inverted_cifar10", backbone="simple", iterations=n) for n in (1, 2, 3, 4, 5)
    )
    first, second, last = 49 * 288 * 32 * 64, 25 * 288 * 32 * 64, 800 * 10 * 64  # each pair a 4 x 4 product
    assert two - one == 2 * last
    assert three - two == 2 * (second + last)
    assert four - three == five - four == 2 * (first + second + last)


class Flat(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, images):
        return self.layer(images.flatten(2).mT if isinstance(self.layer, LinearCaps) else images[:, :, None]).poses


@pytest.mark.parametrize(
    ("layer", "multiply_adds"),
    [
        (LinearCaps(15, 4, 3, 7, DynamicRouting), 15 * 3 * 4 * 7),
        (LinearCaps(15, 4, 3, 4, DynamicRouting, pose="matrix"), 15 * 3 * 2 * 2 * 2),
        (ConvCaps(4, 1, 3, 7, 2, 1, DynamicRouting), (2 * 4) * 4 * 4 * 3 * 7),
    ],
    ids=["vector", "matrix", "conv"],
)
def test_every_vote_is_formed_once(layer, multiply_adds):
    """In networks of one's own too, whose weights stay where they are."""
    assert operations(Flat(layer), image=(4, 3, 5)) == 2 * multiply_adds
    assert layer.weight.device.type == "cpu"


def test_a_network_keeps_its_modes_and_weights():
    model = create_model("efficient_capsnet_mnist")
    model.stem.eval()
    modes = [part.training for part in model.modules()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    operations(model), training_memory(model, 8), layers(model)
    assert modes == [part.training for part in model.modules()]
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("name", list_models())
def test_every_preset_is_measured(name):
    model = on_meta(name)
    rows = layers(model)
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
    assert all(row.shape for row in rows)
    weights = 4 * 4 * sum(p.numel() for p in model.parameters())
    assert weights < training_memory(model, 32) < 20e9
    assert operations(model) > 1e6


def test_layers_follow_the_image():
    rows = {row.name: row for row in layers("capsnet_mnist", image=(3, 36, 28), classes=7)}
    assert list(rows) == ["stem.0", "primary", "body.layers.0", "head", "decoder"]
    assert rows["stem.0"].shape == (256, 28, 20)
    assert rows["primary"].shape == (32, 8, 10, 6)
    assert rows["body.layers.0"] == ("body.layers.0", "LinearCaps (DynamicRouting)", (7, 16), 1920 * 8 * 7 * 16)
    assert rows["decoder"].shape == (3, 36, 28)


def test_layers_of_training_alone_come_last_without_shape():
    row = layers("encapnet6_cifar10", feedback="ot")[-1]
    assert (row.name, row.shape) == ("feedback", None)


def test_memory_is_the_tensors_that_training_holds():
    """Each sigmoid keeps its output and the convolution its input; two more are for gradients."""
    chain = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid())
    size, weights = 4 * 10 * 2 * 6 * 5, 4 * 6
    assert training_memory(chain, 10, image=(2, 6, 5)) == 4 * weights + 4 * size + 2 * size


def test_memory_of_votes_follows_their_budget():
    model = on_meta("inverted_cifar10", iterations=4)  # with 2, no agreement of the large layers reaches the classes
    with vote_budget(2**40):
        stored = training_memory(model, 128)
    assert training_memory(model, 128) < stored / 2


def test_a_batch_is_at_least_one():
    with pytest.raises(ValueError, match="batch must be 1 or more, got 0"):
        training_memory("capsnet_mnist", 0)


STEP = """
import json, re, torch
from torchcaps.models import create_model
from torchcaps.models.measure import training_memory

def train(name, batch):
    model = create_model(name)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        output = model(torch.rand(batch, *model.image))
        optimizer.zero_grad()
        (output.scores.square().mean() + output.reconstruction.square().mean()).backward()
        optimizer.step()
        del output

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

train("efficient_capsnet_mnist", 2)
training_memory("efficient_capsnet_mnist", 2)
before = peak()
train({name!r}, {batch})
print(json.dumps([peak() - before, training_memory({name!r}, {batch})]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
@pytest.mark.parametrize(("name", "batch"), [("capsnet_mnist", 32), ("ar_capsnet_mnist", 32)])
def test_memory_against_a_real_step(name, batch):
    """The resident set also has the scratch memory of convolutions on this CPU, so it may be half as much again."""
    run = subprocess.run(
        [sys.executable, "-c", STEP.replace("{name!r}", repr(name)).replace("{batch}", str(batch))],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    real, estimate = json.loads(run.stdout)
    assert 0.67 < real / estimate < 1.5, f"{real / 1e6:.0f} MB for {estimate / 1e6:.0f} estimated"
