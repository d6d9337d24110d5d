"""Learning from networks that have been trained already."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.train.test_knobs import SMALL, few_digits
from torchcaps.cli import main
from torchcaps.commands.words import Row, described
from torchcaps.data import Batch
from torchcaps.losses import binary_cross_entropy, cross_entropy, margin_loss
from torchcaps.recipes import Recipe, from_dict
from torchcaps.train import train, train_together
from torchcaps.train.prepare import check
from torchcaps.train.step import Step, loss_terms
from torchcaps.train.teachers import Teachers, check_teacher, open_teacher
from torchcaps.types import Output

PLAIN = replace(SMALL, mixup=0.0, loss="margin")
OPTIONS = {"data": few_digits(), "device": "cpu", "log": None}


class Says(nn.Module):
    """A network that has one answer, whatever it is shown, and keeps what that was."""

    def __init__(self, *probabilities):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(probabilities))

    def forward(self, images):
        self.seen = images
        answer = self.weight.expand(len(images), -1)
        return Output(answer, None, None, None, answer)


def teachers_of(*networks, lengths):
    teachers = Teachers(PLAIN, few_digits(), torch.device("cpu"))
    teachers.networks, teachers.lengths = list(networks), list(lengths)
    return teachers


def by_hand(recipe, scores, taught):
    """The loss of each class by itself, weighed by how present it is."""
    total = 0.0
    for row, present in zip(scores.tolist(), taught.tolist(), strict=True):
        for j, (x, t) in enumerate(zip(row, present, strict=True)):
            if recipe.loss == "margin":
                total += t * max(0, 0.9 - x) ** 2 + 0.5 * (1 - t) * max(0, x - 0.1) ** 2
            elif recipe.loss == "cross_entropy":
                total -= t / sum(present) * float(torch.tensor(row, dtype=torch.float64).log_softmax(0)[j])
            else:
                p = float(torch.tensor(x, dtype=torch.float64).sigmoid())
                total -= (t * torch.tensor(p).log() + (1 - t) * torch.tensor(1 - p).log()).item() / len(row)
    return total / len(scores)


@pytest.mark.parametrize("loss", ["margin", "cross_entropy", "binary_cross_entropy"])
def test_the_teachers_share_of_the_loss_is_that_of_soft_labels(loss):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 4, dtype=torch.float64, generator=generator)
    taught = torch.rand(6, 4, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 3, 1, 1, 2, 0])
    recipe = replace(PLAIN, loss=loss, distillation=0.3, label_smoothing=0.0 if loss == "margin" else 0.1)
    output, batch = Output(scores, None, None, None, scores), Batch(torch.zeros(6, 1, 2, 2), labels)
    terms = loss_terms(recipe, output, batch, taught=taught)
    alone = loss_terms(recipe, output, batch)
    assert list(terms) == [loss, "distillation"]
    assert float(terms[loss]) == pytest.approx(0.7 * float(alone[loss]), rel=1e-12)
    assert float(terms["distillation"]) == pytest.approx(0.3 * by_hand(recipe, scores, taught), rel=1e-6)


@pytest.mark.parametrize("loss", [margin_loss, cross_entropy, binary_cross_entropy])
def test_soft_labels_without_doubt_are_labels(loss):
    scores = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 1], [2, -1], [1, 2], [0, -1], [-1, -1]])
    soft = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    losses = [loss(scores, labels), loss(scores, soft)]
    torch.testing.assert_close(*losses, rtol=1e-14, atol=0)
    gradients = [torch.autograd.grad(each, scores)[0] for each in losses]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-16)
    with pytest.raises(ValueError, match=r"soft labels must be \[5, 3\] like \w+, got \[5, 2\]"):
        loss(scores, soft[:, :2])


def test_several_teachers_are_heard_alike_and_lengths_are_read_between_their_margins():
    sure, vague = Says(0.95, 0.1, 0.3), Says(0.5, 0.05, 0.45)
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(teachers_of(vague, lengths=[False])(images), torch.tensor([[0.5, 0.05, 0.45]] * 2))
    both = teachers_of(sure, vague, lengths=[True, False])(images)
    expected = torch.tensor([[(1 + 0.5) / 2, (0 + 0.05) / 2, (0.25 + 0.45) / 2]] * 2)
    torch.testing.assert_close(both, expected)
    assert not both.requires_grad
    assert torch.equal(sure.seen, images)


def test_a_run_and_exported_weights_teach(tmp_path):
    first = train(PLAIN, out=tmp_path / "first", **OPTIONS)
    network, recipe, class_names = open_teacher(str(first.folder))
    assert recipe == first.recipe
    assert class_names == tuple(map(str, range(10)))
    assert not network.training
    torch.testing.assert_close(network.state_dict(), first.model.state_dict(), rtol=0, atol=0)
    network, recipe, class_names = open_teacher("efficient_capsnet_mnist")
    assert (recipe.data, recipe.loss, len(class_names)) == ("mnist", "margin", 10)


def test_students_go_on_as_if_not_stopped_and_learn_together_as_alone(tmp_path):
    first = train(replace(PLAIN, loss="cross_entropy"), out=tmp_path / "first", **OPTIONS)
    student = replace(
        SMALL,
        loss="margin",
        optimizer="sgd",  # Adam would make steps of the rounding of gradients that are 0
        optimizer_args={"momentum": 0.9},
        lr=0.1,
        teachers=(str(first.folder),),
        distillation=0.5,
    )
    whole = train(student, out=tmp_path / "whole", **OPTIONS)
    assert whole.metrics[-1]["distillation"] > 0
    train(student, out=tmp_path / "halved", limit=4, **OPTIONS)
    again = train(student, out=tmp_path / "halved", resume=True, **OPTIONS)
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    untaught = train(replace(student, teachers=(), distillation=0.0), out=tmp_path / "untaught", **OPTIONS)
    names = [name for name, value in whole.model.state_dict().items() if "primary" in name and value.dim() > 1]
    assert names
    for name in names:
        assert not torch.equal(untaught.model.state_dict()[name], whole.model.state_dict()[name])
    for run in train_together(student, [0, 5], out=tmp_path / "both", **OPTIONS):
        alone = train(student, out=tmp_path / f"alone-{run.seed}", seed=run.seed, **OPTIONS)
        torch.testing.assert_close(alone.model.state_dict(), run.model.state_dict(), rtol=2e-4, atol=2e-5)
        for one, other in zip(alone.metrics, run.metrics, strict=True):
            assert one["distillation"] == pytest.approx(other["distillation"], rel=1e-4)


def test_teachers_see_what_the_student_sees(tmp_path, monkeypatch):
    seen = {}

    def keep(self, images):
        seen["teachers"] = images.clone()
        return torch.full((len(images), 10), 0.1)

    def watch(self, part):
        seen["student"] = part.images.clone()
        return original(self, part)

    original = Step.output_of
    first = train(PLAIN, out=tmp_path / "first", **OPTIONS)
    monkeypatch.setattr(Teachers, "__call__", keep)
    monkeypatch.setattr(Step, "output_of", watch)
    train(replace(SMALL, teachers=(str(first.folder),), distillation=1.0), out=tmp_path / "second", **OPTIONS)
    assert torch.equal(seen["teachers"], seen["student"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"teachers": ("somebody",)}, "teachers without distillation, the share of the loss that they decide"),
        ({"distillation": 0.5}, r"a distillation of 0.5 without teachers"),
        ({"teachers": ("x",), "distillation": 0.5, "loss": "spread"}, "teachers go with every loss but spread"),
    ],
)
def test_what_would_be_ignored_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(replace(PLAIN, **changes))
    with pytest.raises(ValueError, match=r"distillation is a share of the loss, from 0 to 1, got 1.5"):
        replace(PLAIN, distillation=1.5)


def test_teachers_that_cannot_teach_this(tmp_path):
    data = few_digits()
    digits = tuple(data.class_names)
    check_teacher("t", PLAIN, digits, PLAIN, data)
    with pytest.raises(ValueError, match="the teacher t knows other classes than few has: cat, dog"):
        check_teacher("t", PLAIN, ("cat", "dog"), PLAIN, data)
    with pytest.raises(ValueError, match="the teacher t was trained with data 'mnist', which must be 'digits' as here"):
        check_teacher("t", replace(PLAIN, data="mnist"), digits, PLAIN, data)
    with pytest.raises(ValueError, match="trained with protocol 'ours', which must be None"):
        check_teacher("t", replace(PLAIN, protocol="ours"), digits, PLAIN, data)
    with pytest.raises(ValueError, match=r"has seen images that are held out here: its validation is 0.1"):
        check_teacher("t", replace(PLAIN, validation=0.1), digits, PLAIN, data)
    check_teacher("t", replace(PLAIN, validation=0.1), digits, PLAIN, replace(data, validation=None))
    train(PLAIN, out=tmp_path / "begun", limit=1, **OPTIONS)
    with pytest.raises(ValueError, match="begun has not finished its own training"):
        open_teacher(str(tmp_path / "begun"))


def test_a_teacher_that_is_not_there_leaves_no_folder(tmp_path, capsys):
    words = ["train", "quick:digits", "--teachers", "nobody", "--distillation", "0.5", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "there are no weights for nobody" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_recipes_keep_their_teachers_and_tell_of_them():
    recipe = Recipe(model="m", data="d", teachers=("a", "b/c"), distillation=1.0)
    assert from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert "1 of the loss by 2 teachers" in described(Row("t:r", "t", "r", recipe, recipe))[2]
