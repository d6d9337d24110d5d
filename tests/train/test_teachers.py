"""Learning from networks that have been trained already."""

import hashlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.test_knobs import SMALL, few_digits
from torchcaps.cli import main
from torchcaps.commands.words import Row, described
from torchcaps.data import Batch, Stored
from torchcaps.losses import binary_cross_entropy, cross_entropy, margin_loss
from torchcaps.recipes import Recipe, from_dict
from torchcaps.train import together, train, train_together
from torchcaps.train.prepare import check
from torchcaps.train.step import Step, loss_terms
from torchcaps.train.teachers import Teacher, Teachers, check_teacher, open_teacher
from torchcaps.types import Output

PLAIN = replace(SMALL, mixup=0.0, loss="margin")
HUB = Path(__file__).parents[2] / "hub"
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
                total -= t / max(1, sum(present)) * float(torch.tensor(row, dtype=torch.float64).log_softmax(0)[j])
            else:
                p = float(torch.tensor(x, dtype=torch.float64).sigmoid())
                total -= (t * torch.tensor(p).log() + (1 - t) * torch.tensor(1 - p).log()).item() / len(row)
    heft = sum(min(1, sum(row)) for row in taught.tolist()) if recipe.loss == "cross_entropy" else len(scores)
    return total / heft


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


def test_class_weights_and_the_official_scale_count_for_teachers_too():
    scores, taught = torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    recipe = replace(PLAIN, loss_scale="official", distillation=1.0)
    output, batch = Output(scores, None, None, None, scores), Batch(torch.zeros(6, 1, 2, 2), torch.zeros(6).long())
    found = loss_terms(recipe, output, batch, taught=taught, class_weights=weights)["distillation"]
    each = taught * (0.9 - scores).clamp(min=0) ** 2 + 0.5 * (1 - taught) * (scores - 0.1).clamp(min=0) ** 2
    torch.testing.assert_close(found, 0.5 * (weights * each).mean())


def test_an_image_of_which_teachers_say_little_counts_little():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]], dtype=torch.float64)
    soft = torch.tensor([[0.8, 0.4, 0.0], [0.0, 0.1, 0.1]], dtype=torch.float64)
    log_p = logits.log_softmax(1)
    expected = -(soft[0] / 1.2 * log_p[0]).sum() - (soft[1] * log_p[1]).sum()
    torch.testing.assert_close(cross_entropy(logits, soft), expected / 1.2)
    smooth = torch.stack([0.9 * soft[0] / 1.2 + 0.1 / 3, 0.9 * soft[1] + 0.1 / 3 * 0.2])
    torch.testing.assert_close(cross_entropy(logits, soft, label_smoothing=0.1), -(smooth * log_p).sum() / 1.2)


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
    network, recipe, image, class_names, sha256 = open_teacher(str(first.folder))
    assert recipe == first.recipe
    assert image == (1, 8, 8)
    assert class_names == tuple(map(str, range(10)))
    assert sha256 == hashlib.sha256((first.folder / "weights.safetensors").read_bytes()).hexdigest()
    assert not network.training
    torch.testing.assert_close(network.state_dict(), first.model.state_dict(), rtol=0, atol=0)
    teacher = open_teacher("efficient_capsnet_mnist")
    assert (teacher.recipe.data, teacher.recipe.loss, len(teacher.class_names)) == ("mnist", "margin", 10)
    student = replace(PLAIN, teachers=(str(first.folder),), distillation=1.0)
    teachers = Teachers(student, few_digits(), torch.device("cpu"))
    assert teachers.lengths == [True]
    assert teachers.networks[0].decoder is None
    assert not any(p.requires_grad for p in teachers.networks[0].parameters())


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
    sums = json.loads((whole.folder / "final.json").read_text())["teachers"]
    assert sums == {str(first.folder): open_teacher(str(first.folder)).sha256}
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


def test_a_compiled_student_is_taught_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    first = train(replace(PLAIN, loss="cross_entropy"), out=tmp_path / "first", **OPTIONS)
    student = replace(SMALL, teachers=(str(first.folder),), distillation=0.5)
    plain = train(student, out=tmp_path / "plain", **OPTIONS)
    compiled = train(student, out=tmp_path / "compiled", compiled=True, **OPTIONS)
    for one, other in zip(plain.metrics, compiled.metrics, strict=True):
        assert one["distillation"] == pytest.approx(other["distillation"], rel=1e-6)


@pytest.mark.parametrize("together", [False, True])
def test_a_run_does_not_go_on_with_another_teacher(tmp_path, together):
    def teach(seed):
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
        return str(train(PLAIN, out=tmp_path / "first", seed=seed, **OPTIONS).folder)

    def learn(**options):
        if together:
            train_together(student, [0, 1], out=tmp_path / "student", **OPTIONS, **options)
        else:
            train(student, out=tmp_path / "student", **OPTIONS, **options)

    student = replace(PLAIN, teachers=(teach(0),), distillation=0.5)
    learn(limit=2)
    teach(1)
    with pytest.raises(ValueError, match="first is not the network any more that this run began with"):
        learn(resume=True)


OURS = replace(PLAIN, data="mnist", protocol="ours", validation=0.05, data_args={"degrees": 15, "seed": 1})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": "digits", "protocol": None, "data_args": {}}, "trained with data 'digits', which must be 'mnist'"),
        ({"data_args": {"degrees": 15}}, "was trained with data_args {}, which must be {'seed': 1} as here"),
        ({"protocol": "mazzia2021", "data_args": {"seed": 1}}, r"was trained with preparation \(scale\("),
        ({"validation": 0.1}, r"was trained with validation 0.1, which must be 0.05 as here"),
        ({"validation": None}, r"was trained with validation 0.*, which must be 0.05 as here"),
        ({"data_args": {"seed": 1, "degrees": 5, "crops": 9, "padding": 2}, "select": "best"}, ""),
    ],
)
def test_what_a_teacher_must_have_been_trained_on(changes, sentence):
    data = few_digits()
    teacher = Teacher(Says(0.5), replace(OURS, **changes), data.image, tuple(data.class_names), "")
    if not sentence:
        check_teacher("t", teacher, OURS, data)
        return
    with pytest.raises(ValueError, match=sentence):
        check_teacher("t", teacher, OURS, data)


def test_teachers_that_cannot_teach_this(tmp_path):
    data = few_digits()
    good = Teacher(Says(0.5), PLAIN, data.image, tuple(data.class_names), "")
    check_teacher("t", good, PLAIN, data)
    with pytest.raises(ValueError, match="the teacher t knows other classes than few has: cat, dog"):
        check_teacher("t", good._replace(class_names=("cat", "dog")), PLAIN, data)
    with pytest.raises(ValueError, match="the teacher t takes images of 3 x 8 x 8, and these are 1 x 8 x 8"):
        check_teacher("t", good._replace(image=(3, 8, 8)), PLAIN, data)
    official = replace(PLAIN, data="mnist", protocol="mazzia2021-official", select="best")
    with pytest.raises(ValueError, match="the teacher t was chosen on the test set"):
        check_teacher("t", good._replace(recipe=official), official, data)
    both = torch.stack([data.train.labels, data.train.labels.flip(0)], 1)
    pairs = replace(data, train=Stored(torch.zeros(24, 8, 8, dtype=torch.uint8), both, good.class_names))
    softmax = good._replace(recipe=replace(PLAIN, loss="cross_entropy"))
    check_teacher("t", softmax, PLAIN, data)
    with pytest.raises(ValueError, match="shares one probability among an image's objects"):
        check_teacher("t", softmax, PLAIN, pairs)
    train(PLAIN, out=tmp_path / "begun", limit=1, **OPTIONS)
    with pytest.raises(ValueError, match="begun cannot be opened: it has not finished its own training"):
        open_teacher(str(tmp_path / "begun"))


def test_an_unfair_teacher_is_refused_where_it_is_asked_for(tmp_path):
    first = train(replace(PLAIN, validation=0.5), out=tmp_path / "first", **OPTIONS)
    student = replace(PLAIN, teachers=(str(first.folder),), distillation=0.5)
    with pytest.raises(ValueError, match=r"was trained with validation 0.5, which must be 0 as here"):
        train(student, out=tmp_path / "student", **OPTIONS)
    assert not (tmp_path / "student").exists()
    with pytest.raises(ValueError, match="which must be 0 as here"):
        train_together(student, [0, 1], out=tmp_path / "students", **OPTIONS)
    assert not (tmp_path / "students").exists()


@pytest.mark.parametrize("before", [{}, {"notes.txt": "mine"}, {"recipe.json": "mine"}])
def test_a_folder_is_left_as_it_was_where_a_run_cannot_begin(tmp_path, before):
    """But for the lock, which others may wait for."""
    student = replace(PLAIN, teachers=("nobody",), distillation=0.5)
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    for begin in (train, partial(train_together, seeds=[0])):
        with pytest.raises(ValueError, match="nobody cannot be opened"):
            begin(student, out=tmp_path, **OPTIONS)
        assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != ".lock"} == before
        with pytest.raises(ValueError, match="nobody cannot be opened"):
            begin(student, out=tmp_path / "new" / "run", **OPTIONS)
        assert not (tmp_path / "new").exists()


def test_a_run_that_cannot_begin_takes_nothing_of_another(tmp_path, monkeypatch):
    """The other one begins in the same folder while this one builds its network."""
    student = replace(PLAIN, teachers=("nobody",), distillation=0.5)
    own = together.create_network

    def meanwhile(*args):
        train(PLAIN, out=tmp_path / "run", **OPTIONS, limit=1)
        return own(*args)

    monkeypatch.setattr(together, "create_network", meanwhile)
    with pytest.raises(ValueError, match="nobody cannot be opened"):
        train_together(student, [0], out=tmp_path / "run", **OPTIONS)
    assert {"checkpoints", "recipe.json"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert train(PLAIN, out=tmp_path / "run", **OPTIONS, resume=True).finished


def test_seeds_that_cannot_follow_leave_those_before_them(tmp_path):
    once = replace(PLAIN, epochs=1)
    train_together(once, [0], out=tmp_path, **OPTIONS)
    there = sorted(tmp_path.rglob("*.safetensors"))
    with pytest.raises(ValueError, match="nobody cannot be opened"):
        train_together(replace(once, teachers=("nobody",), distillation=0.5), [1], out=tmp_path, **OPTIONS)
    assert sorted(tmp_path.rglob("*.safetensors")) == there
    assert train_together(once, [0], out=tmp_path, **OPTIONS, resume=True)[0].finished


def test_weights_that_do_not_say_how_they_were_trained(tmp_path):
    shutil.copytree(HUB / "efficient_capsnet_mnist_plain5", tmp_path / "teacher")
    config = tmp_path / "teacher" / "config.json"
    about = json.loads(config.read_text())
    del about["result"]["recipe"]
    config.write_text(json.dumps(about))
    with pytest.raises(ValueError, match="teacher does not say how it was trained: 'recipe' is missing"):
        open_teacher(str(tmp_path / "teacher"))


def test_a_teacher_that_is_not_there_leaves_no_folder(tmp_path, capsys):
    words = ["train", "quick:digits", "--teachers", "nobody", "--distillation", "0.5", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "the teacher nobody cannot be opened: there are no weights for nobody" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_recipes_keep_their_teachers_and_tell_of_them():
    recipe = Recipe(model="m", data="d", teachers=("a", "b/c"), distillation=1.0)
    assert from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert "1 of the loss by 2 teachers" in described(Row("t:r", "t", "r", recipe, recipe))[2]
