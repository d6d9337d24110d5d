"""Every metric against plain loops, ties and padded labels included."""

import math

import pytest
import torch
from torch import nn

from torchcaps.data import Batches, load
from torchcaps.evaluate import (
    Bin,
    Predictions,
    at_least_one_error,
    calibration,
    checked,
    choose_members,
    confusion_matrix,
    ensemble,
    error,
    exact_match_error,
    expected_calibration_error,
    figures,
    headline_error,
    longest,
    per_digit_error,
    predict,
    reliability,
    standard_error,
)
from torchcaps.losses import multi_hot
from torchcaps.types import Output

N, J = 60, 7


def scores_with_ties():
    return torch.randint(0, 5, (N, J)).double() / 4


def padded_labels(k=3):
    """1 to k different labels, padded with -1 at random places; with k = 1 always one."""
    rows = []
    for _ in range(N):
        count = int(torch.randint(1, k + 1, ()))
        row = torch.randperm(J)[:count].tolist() + [-1] * (k - count)
        rows.append([row[place] for place in torch.randperm(k).tolist()])
    return torch.tensor(rows)


def best_classes(row, count):
    """By plain comparison: higher scores first, of equal ones the lower class."""
    return set(sorted(range(len(row)), key=lambda j: (-row[j], j))[:count])


def sets_of(labels):
    rows = labels.tolist() if labels.dim() == 2 else [[label] for label in labels.tolist()]
    return [{label for label in row if label >= 0} for row in rows]


class Affine(nn.Module):
    """Lengths and probabilities that are known, and a record of how it was called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, J))
        self.norm = nn.BatchNorm1d(J)
        self.modes = []

    def forward(self, images):
        self.modes.append((self.training, self.norm.training, torch.is_inference_mode_enabled(), len(images)))
        logits = images.flatten(1) @ self.weight
        return Output(logits, None, None, None, logits.softmax(dim=1))


def test_top_1_error_counts_the_highest_score_with_ties_for_the_lower_class():
    scores, labels = scores_with_ties(), torch.randint(0, J, (N,))
    wrong = sum(best_classes(row, 1) != {label} for row, label in zip(scores.tolist(), labels.tolist(), strict=True))
    assert error(scores, labels) == wrong / N
    assert error(torch.zeros(3, 4), torch.tensor([0, 1, 0])) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="one label an image"):
        error(scores, labels[:, None])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_metrics_of_several_labels_are_those_of_loops(k):
    scores, labels = scores_with_ties(), padded_labels(k)
    present = multi_hot(labels, J)
    for chosen, sets in (
        (
            longest(scores, present.sum(dim=1)),
            [best_classes(row, len(t)) for row, t in zip(scores.tolist(), sets_of(labels), strict=True)],
        ),
        (scores >= 0.5, [{j for j in range(J) if row[j] >= 0.5} for row in scores.tolist()]),
    ):
        unequal = missed = labelled = none = 0
        for mine, truth in zip(sets, sets_of(labels), strict=True):
            unequal += mine != truth
            labelled += len(truth)
            missed += sum(label not in mine for label in truth)
            none += not mine & truth
        assert exact_match_error(chosen, present) == pytest.approx(unequal / N)
        assert per_digit_error(chosen, present) == missed / labelled
        assert at_least_one_error(chosen, present) == none / N


def test_with_one_label_all_metrics_are_the_top_1_error():
    scores, labels = scores_with_ties(), torch.randint(0, J, (N,))
    found = figures(Predictions(scores, scores, labels[:, None]))
    for word in ("error", "exact_match_error", "exact_match_error_longest", "per_digit_error", "at_least_one_error"):
        assert found[word] == pytest.approx(error(scores, labels))
    assert found["chosen_by"] == "longest"


def test_repeated_labels_count_once_and_images_without_any_count_for_the_exact_match_alone():
    scores = torch.tensor([[0.9, 0.1, 0.2], [0.1, 0.2, 0.3]])
    labels = torch.tensor([[0, 0], [-1, -1]])
    present = multi_hot(labels, 3)
    chosen = longest(scores, present.sum(dim=1))
    assert chosen.tolist() == [[True, False, False], [False, False, False]]
    assert exact_match_error(chosen, present) == per_digit_error(chosen, present) == 0
    assert at_least_one_error(~present, present) == 1
    assert per_digit_error(chosen[1:], present[1:]) == at_least_one_error(chosen[1:], present[1:]) == 0


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_confusion_matrix_is_that_of_loops(k):
    scores, labels = scores_with_ties(), padded_labels(k) if k else torch.randint(0, J, (N,))
    wanted = [[0.0] * J for _ in range(J)]
    for row, truth in zip(scores.tolist(), sets_of(labels), strict=True):
        mine = best_classes(row, len(truth))
        for label in truth:
            if label in mine:
                wanted[label][label] += 1
            for other in mine - truth:
                if label not in mine:
                    wanted[label][other] += 1 / len(mine - truth)
    found = confusion_matrix(scores, labels)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(found.sum(dim=1), multi_hot(labels, J).sum(dim=0).double())


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_reliability_and_calibration_error_are_those_of_loops(bins):
    confidences = torch.cat([torch.rand(200).double(), torch.arange(bins + 1).double() / bins])
    correct = torch.rand(len(confidences)) < confidences
    table = reliability(confidences, correct, bins)
    gap = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        rows = [r for r, c in enumerate(confidences.tolist()) if low < c <= high or (c == 0 and b == 0)]
        sure = sum(float(confidences[r]) for r in rows) / max(1, len(rows))
        true = sum(bool(correct[r]) for r in rows) / max(1, len(rows))
        assert table[b] == pytest.approx(Bin(low, high, len(rows), sure, true))
        gap += len(rows) / len(confidences) * abs(sure - true)
    assert expected_calibration_error(table) == pytest.approx(gap)


def test_known_calibration_errors():
    sure, half = torch.ones(8), torch.tensor([True, False] * 4)
    assert expected_calibration_error(reliability(sure, torch.ones(8).bool())) == 0
    assert expected_calibration_error(reliability(sure, half)) == 0.5
    assert expected_calibration_error(reliability(sure / 2, half)) == 0
    assert expected_calibration_error(reliability(0 * sure, half)) == 0.5
    for bad, match in ((1.5 * sure, "between 0 and 1"), (sure[:3], "must be"), (sure * math.nan, "between 0 and 1")):
        with pytest.raises(ValueError, match=match):
            reliability(bad, half)
    with pytest.raises(ValueError, match="bins"):
        reliability(sure, half, 0)


def test_calibration_is_of_the_class_named_or_of_every_class():
    scores = scores_with_ties()
    probabilities, labels = torch.rand(N, J).double(), padded_labels()
    named = [min(best_classes(row, 1)) for row in scores.tolist()]
    one = calibration(Predictions(scores, probabilities, labels[:, 0].clamp(min=0)))
    mine = torch.stack([row[j] for row, j in zip(probabilities, named, strict=True)])
    assert one == reliability(mine, torch.tensor(named) == labels[:, 0].clamp(min=0))
    several = calibration(Predictions(scores, probabilities, labels))
    assert sum(each.cases for each in several) == N * J
    assert several == reliability(probabilities.flatten(), multi_hot(labels, J).flatten())


def test_the_standard_error_is_the_binomials():
    assert standard_error(0.0025, 10_000) == pytest.approx(0.0005, rel=0.01)
    assert standard_error(0.0, 5) == 0
    with pytest.raises(ValueError, match="share"):
        standard_error(1.2, 5)


def test_where_the_number_of_labels_varies_the_threshold_chooses():
    probabilities, labels = scores_with_ties(), padded_labels()
    found = figures(Predictions(probabilities, probabilities, labels))
    assert found["chosen_by"] == "threshold"
    assert found["error"] == found["exact_match_error"] == found["exact_match_error_threshold"]
    wrong = sum({j for j in range(J) if row[j] >= 0.5} != truth for row, truth in zip(
        probabilities.tolist(), sets_of(labels), strict=True))  # fmt: skip
    assert found["error"] == pytest.approx(wrong / N)
    assert found["accuracy"] == 1 - found["error"]


def test_predict_is_in_evaluation_mode_and_gives_every_mode_back():
    model = Affine().train()
    model.norm.eval()
    images, labels = torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 3, 4])
    found = predict(model, [(images[:3], labels[:3], None), (images[3:3], labels[3:3], None), (images[3:], labels[3:])])
    assert model.modes == [(False, False, True, 3), (False, False, True, 2)]
    assert model.training
    assert not model.norm.training
    torch.testing.assert_close(found.scores, (images.flatten(1) @ model.weight).detach())
    torch.testing.assert_close(found.probabilities, found.scores.softmax(dim=1))
    assert found.labels.tolist() == labels.tolist()
    assert not found.scores.is_inference()
    with pytest.raises(RuntimeError):
        predict(model, [(torch.randn(2, 1, 3, 3), labels[:2])])
    assert model.training
    with pytest.raises(ValueError, match="no images"):
        predict(model, [])


def test_crops_count_by_the_sum_of_their_probabilities():
    model, crops = Affine().eval(), torch.randn(3, 5, 1, 2, 2)
    found = predict(model, [(crops, torch.tensor([0, 1, 2]))])
    for row in range(3):
        total = sum((crops[row, n].flatten() @ model.weight).softmax(dim=0) for n in range(5))
        torch.testing.assert_close(found.probabilities[row], (total / 5).detach())
    assert torch.equal(found.scores, found.probabilities)


def test_predict_takes_batches_as_they_are():
    class Means(nn.Linear):
        def forward(self, images):
            scores = super().forward(images.flatten(1))
            return Output(scores, None, None, None, scores.sigmoid())

    split = load("digits").test
    model = Means(math.prod(split.image), split.classes)
    found = predict(model, Batches(split, 64, shuffle=False))
    assert found.labels.tolist() == split.labels.tolist()
    assert figures(found)["images"] == len(split)


def test_scores_that_are_no_numbers_are_refused():
    scores = torch.rand(4, 3)
    scores[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"1 of 4 images .* image 2; the network has diverged"):
        checked(Predictions(scores, torch.rand(4, 3), torch.zeros(4).long()))
    with pytest.raises(ValueError, match="must both be"):
        checked(Predictions(scores, torch.rand(4, 2), torch.zeros(4).long()))


def member(probabilities, labels):
    return Predictions(probabilities.log(), probabilities, labels)


def test_an_ensemble_sums_probabilities():
    labels = torch.randint(0, J, (N,))
    members = [member(torch.rand(N, J), labels) for _ in range(3)]
    together = ensemble(members)
    wrong = 0
    for row in range(N):
        total = [sum(float(each.probabilities[row, j]) for each in members) for j in range(J)]
        wrong += best_classes(total, 1) != {int(labels[row])}
    assert headline_error(together) == pytest.approx(wrong / N)
    assert torch.equal(together.scores, together.probabilities)
    assert ensemble(members[:1]) is members[0]
    with pytest.raises(ValueError, match="at least one"):
        ensemble([])
    with pytest.raises(ValueError, match="member 2"):
        ensemble([members[0], member(torch.rand(N, J), labels.flip(0))])


def test_members_are_chosen_for_what_they_add():
    """`twin` is the second best alone but errs where `best` does; `other` errs elsewhere."""
    labels = torch.zeros(6).long()

    def of(*right):
        return member(torch.tensor([[p, 1 - p] for p in right]), labels)

    networks = {
        "twin": of(0.4, 0.4, 0.9, 0.9, 0.9, 0.8),
        "best": of(0.4, 0.4, 0.9, 0.9, 0.9, 0.9),
        "other": of(0.9, 0.9, 0.4, 0.4, 0.4, 0.9),
    }
    assert choose_members(networks, 1) == ("best",)  # equal errors: the surer one
    assert choose_members(networks, 2) == ("best", "other")
    assert set(choose_members(networks, 3)) == set(networks)
    for size in (0, 4):
        with pytest.raises(ValueError, match=f"ensemble of {size} cannot be chosen from 3"):
            choose_members(networks, size)
    fewer = member(torch.tensor([[0.4, 0.6]] * 5), torch.zeros(5).long())
    with pytest.raises(ValueError, match="seed-9 held out other images than twin, so which is better cannot be told"):
        choose_members({**networks, "seed-9": fewer}, 1)
