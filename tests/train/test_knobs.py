"""What our own rows train with beyond the papers: schedules, decay that spares norms, smoothing, mixup."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchcaps.data import Batch, DataSet, Stored
from torchcaps.data.stronger import mirrored
from torchcaps.losses import binary_cross_entropy
from torchcaps.models import create_model
from torchcaps.recipes import Recipe
from torchcaps.train import folder, train, train_together
from torchcaps.train.optim import create_optimizer, learning_rate, set_rates, trained_names
from torchcaps.train.prepare import check
from torchcaps.train.step import loss_terms, mixed, mixup_share
from torchcaps.types import Output

RECIPE = Recipe(model="cnn_cifar10", data="cifar10", lr=0.2, epochs=4)
SMALL = Recipe(
    model="efficient_capsnet",
    model_args={"image": (1, 8, 8), "first_kernel": 2, "strides": (1, 1, 1, 1)},
    data="digits",
    loss="cross_entropy",
    mixup=0.4,
    epochs=2,
    batch_size=8,
    precision="32",
)


def rates(schedule, steps_per_epoch=5, **args):
    recipe = replace(RECIPE, schedule=schedule, schedule_args=args)
    return [learning_rate(recipe, step, steps_per_epoch) for step in range(4 * steps_per_epoch + 1)]


def test_linear_rises_then_falls_to_nothing():
    found = rates("linear", warmup=1)
    assert found[:5] == pytest.approx([0.2 * (k + 1) / 6 for k in range(5)])
    assert found[5:] == pytest.approx([0.2 * (15 - k) / 15 for k in range(16)])
    assert rates("linear", floor=0.1)[10] == pytest.approx(0.15)


@pytest.mark.parametrize(("rise", "start"), [(0.3, 0.04), (0.5, 0.2)])
def test_one_cycle_is_torchs(rise, start):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=20, pct_start=rise, div_factor=1 / start, final_div_factor=100, cycle_momentum=False
    )
    for step, rate in enumerate(rates("one_cycle", rise=rise, start=start, floor=0.2 * start / 100)[:20]):
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        if step < 19:
            optimizer.step()
            schedule.step()
    assert rates("one_cycle", 1, rise=0.0)[0] == 0.2


@pytest.mark.parametrize(
    ("preset", "spared"),
    [
        ("efficient_capsnet_mnist", {"prior", "bias"}),
        ("em_cifar10", {"bias", "beta_a", "beta_u"}),
        ("ar_capsnet_mnist", {"bias"}),
        ("inverted_cifar10", {"bias"}),
    ],
)
def test_norms_biases_and_priors_do_not_decay(preset, spared):
    network = create_model(preset)
    how = replace(RECIPE, optimizer_args={"decay_on": "weights"})
    decayed, left = trained_names(how, network)
    assert sorted([*decayed, *left]) == sorted(name for name, _ in network.named_parameters())
    assert all(network.get_parameter(name).dim() > 1 for name in decayed)
    assert {name.rpartition(".")[2] for name in decayed} <= {"weight", "kernel"}
    assert {name.rpartition(".")[2] for name in left} - {"weight"} == spared
    norms = [name for name in left if name.endswith(".weight")]
    assert all("Norm" in type(network.get_submodule(name.rpartition(".")[0])).__name__ for name in norms)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "adam_keras", "rmsprop_keras"])
def test_decay_goes_to_the_weights_alone(name):
    """With no gradient at all, what is left of a step is its decay."""
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    before = {key: value.clone() for key, value in network.named_parameters()}
    how = replace(RECIPE, optimizer=name, optimizer_args={"weight_decay": 0.1, "decay_on": "weights"})
    optimizer = create_optimizer(how, network)
    set_rates(optimizer, how, 0, 5)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(network.named_parameters())
    for key in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[key], before[key])
    if name in ("adamw", "sgd"):
        torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.2 * 0.1))
    else:
        assert not torch.equal(after["0.weight"], before["0.weight"])
    with pytest.raises(ValueError, match="decay_on is 'all' or 'weights', got 'some'"):
        create_optimizer(replace(how, optimizer_args={"decay_on": "some"}), network)


def test_nesterov_is_sgds_own():
    how = replace(RECIPE, optimizer="sgd", optimizer_args={"momentum": 0.9, "nesterov": True})
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = create_optimizer(how, [weight])
    expected, velocity = weight.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(4):
        gradient = torch.randn(2, dtype=torch.float64)
        set_rates(optimizer, how, step, 5)
        weight.grad = gradient
        optimizer.step()
        velocity = 0.9 * velocity + gradient
        expected = expected - 0.2 * (gradient + 0.9 * velocity)
    torch.testing.assert_close(weight.detach(), expected)


def test_smoothing_of_each_class_by_itself():
    logits, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([[0, 1], [2, -1], [1, 2], [-1, -1]])
    total = 0.0
    for row, present in zip(logits.tolist(), ({0, 1}, {2}, {1, 2}, set()), strict=True):
        for j, logit in enumerate(row):
            wanted = 0.95 if j in present else 0.05
            p = 1 / (1 + math.exp(-logit))
            total -= wanted * math.log(p) + (1 - wanted) * math.log(1 - p)
    assert float(binary_cross_entropy(logits, labels, label_smoothing=0.1)) == pytest.approx(total / 12, rel=1e-12)


def test_mixup_is_a_loss_with_both_labels_in_their_shares():
    images, scores = torch.rand(5, 1, 4, 4), torch.randn(5, 3, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1, 0])
    seen = mixed(images, 0.7)
    for k in range(5):
        torch.testing.assert_close(seen[k], 0.7 * images[k] + 0.3 * images[4 - k])
    targets = 0.7 * F.one_hot(labels, 3).double() + 0.3 * F.one_hot(labels.flip(0), 3).double()
    expected = -(targets * scores.log_softmax(1)).sum(1).mean()
    output = Output(scores, None, None, None, scores.softmax(1))
    terms = loss_terms(SMALL, output, Batch(seen, labels), share=0.7)
    torch.testing.assert_close(terms["cross_entropy"], expected)
    plain = loss_terms(replace(SMALL, mixup=0.0), output, Batch(seen, labels), share=0.7)
    torch.testing.assert_close(plain["cross_entropy"], F.cross_entropy(scores, labels))
    lengths = scores.sigmoid()
    expected = targets * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - targets) * F.relu(lengths - 0.1) ** 2
    terms = loss_terms(replace(SMALL, loss="margin"), output._replace(scores=lengths), Batch(seen, labels), share=0.7)
    torch.testing.assert_close(terms["margin"], expected.sum(1).mean())


def test_shares_are_drawn_anew_at_each_step():
    shares = torch.tensor([mixup_share(0.4, 1, step) for step in range(4000)], dtype=torch.float64)
    assert shares[:9].tolist() == [mixup_share(0.4, 1, step) for step in range(9)]
    assert len(set(shares.tolist())) == 4000
    assert abs(float(shares.mean()) - 0.5) < 0.02
    assert abs(float(shares.var()) - 0.25 / 1.8) < 0.01  # of Beta(a, a): 1 / (4 (2a + 1))
    assert mixup_share(0.4, 2, 0) != mixup_share(0.4, 1, 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss": "spread"}, "mixup goes with every loss but spread"),
        ({"loss": "margin", "mixup": 0.0, "label_smoothing": 0.1}, "label_smoothing goes with the losses"),
        ({"reconstruction": 0.1}, "mixup leaves no single picture"),
        ({"loss": "spread", "mixup": 0.0, "label_smoothing": 0.1}, "label_smoothing goes with the losses"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(replace(SMALL, **changes))
    with pytest.raises(ValueError, match="mixup must be at least 0, got -1"):
        replace(SMALL, mixup=-1.0)


def few_digits(images=24):
    pixels = (torch.arange(images * 64) * 37 % 251).to(torch.uint8).view(images, 8, 8)
    names = tuple(map(str, range(10)))
    split = Stored(pixels, torch.arange(images) % 10, names)
    return DataSet("few", split, split, split)


def test_seeds_together_mix_as_each_does_alone(tmp_path):
    """All knobs at once: decay in groups, averages, one cycle, mixup; and a run that goes on has the same weights."""
    how = replace(
        SMALL,
        optimizer="sgd",  # Adam would make steps of the rounding of gradients that are 0
        optimizer_args={"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decay_on": "weights"},
        lr=0.05,
        schedule="one_cycle",
        ema=0.9,
        label_smoothing=0.1,
        clip=1.0,
    )
    options = {"data": few_digits(), "device": "cpu", "log": None}
    both = train_together(how, [0, 5], out=tmp_path / "both", **options)
    for run in both:
        alone = train(how, out=tmp_path / f"alone-{run.seed}", seed=run.seed, **options)
        torch.testing.assert_close(alone.model.state_dict(), run.model.state_dict(), rtol=2e-4, atol=2e-5)
    train(how, out=tmp_path / "halved", seed=0, limit=4, **options)
    again = train(how, out=tmp_path / "halved", seed=0, resume=True, **options)
    whole = train(how, out=tmp_path / "whole", seed=0, **options)
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_several_views_leave_the_routing_log_one(tmp_path):
    views = replace(few_digits(), test_transform=(mirrored(),))
    how = replace(SMALL, epochs=1, mixup=0.0)
    train(how, out=tmp_path / "alone", data=views, device="cpu", log=None)
    train_together(how, [0, 1], out=tmp_path / "both", data=views, device="cpu", log=None)
    for place in ("alone", "both/seed-0", "both/seed-1"):
        assert len((tmp_path / place / "routing.jsonl").read_text().splitlines()) == 1
        assert "validation_error" in (tmp_path / place / "metrics.csv").read_text()


def test_a_folder_from_before_a_field_can_be_resumed(tmp_path):
    old = {name: value for name, value in SMALL.to_dict().items() if name != "ema"}
    saved = tmp_path / "checkpoints"
    folder.checkpoint.save(saved, 1, {"w": torch.zeros(1)}, {})
    (tmp_path / "recipe.json").write_text(folder.json.dumps({"seed": 0, "recipe": old}))
    folder.check_folder(tmp_path, SMALL, 0, resume=True)
    with pytest.raises(ValueError, match=r"ema is 0.0 there and 0.9 here"):
        folder.check_folder(tmp_path, replace(SMALL, ema=0.9), 0, resume=True)
