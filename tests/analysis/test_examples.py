"""Which images a figure shows, and what was said of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchcaps.analysis import costs
from torchcaps.analysis.examples import lengths, told, worst_mistakes
from torchcaps.analysis.sample import chosen
from torchcaps.evaluate import Predictions
from torchcaps.models.heads import ActivationHead, LengthHead, LogitHead


def test_the_worst_mistakes_have_the_largest_margin():
    generator = np.random.default_rng(0)
    values = generator.random((200, 5))
    labels = generator.integers(0, 5, 200)
    present = np.eye(5, dtype=bool)[labels]
    chosen = np.eye(5, dtype=bool)[values.argmax(axis=1)]
    margins = {}
    for n in range(200):
        if values[n].argmax() != labels[n]:
            margins[n] = max(values[n][k] for k in range(5) if k != labels[n]) - values[n][labels[n]]
    wanted = sorted(margins, key=lambda n: -margins[n])[:7]
    assert worst_mistakes(values, present, chosen, 7) == wanted


def test_worst_mistakes_of_several_labels_and_of_none():
    values = np.array([[0.9, 0.8, 0.1], [0.9, 0.2, 0.7], [0.6, 0.1, 0.1], [0.9, 0.1, 0.8]])
    present = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]], bool)
    chosen = np.array([[1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 0, 1]], bool)
    assert worst_mistakes(values, present, chosen) == [3, 1, 2]  # 0.7, 0.5, and 0.6 - 0.5
    assert worst_mistakes(values[:1], present[:1], chosen[:1]) == []


def test_bars_are_lengths_activations_or_probabilities():
    scores, probabilities = torch.tensor([[1.5, -2.0]]), torch.tensor([[0.97, 0.03]])
    said = Predictions(scores, probabilities, torch.tensor([0]))
    for head, values, name in (
        (LengthHead(), scores, "capsule length"),
        (ActivationHead(), probabilities, "activation"),
        (LogitHead(), probabilities, "probability"),
    ):
        found, word = lengths(SimpleNamespace(model=SimpleNamespace(head=head)), said)
        assert (found is values, word) == (True, name)


def test_weights_without_a_run_are_asked_anew(made, tmp_path, monkeypatch):
    """The pixels are the poses: of six images the four with a row that outweighs the others are recognised."""
    images = torch.zeros(6, 4, 4, dtype=torch.uint8)
    for n, row in enumerate((0, 1, 2, 3, 0, 1)):
        images[n, row] = 40 + n
    labels = [0, 1, 2, 3, 2, 3]
    monkeypatch.chdir(tmp_path)
    run = made(images, labels, folder="efficient_capsnet_mnist")
    found = told(run)
    assert found.said.int().argmax(dim=1).tolist() == [0, 1, 2, 3, 0, 1]
    assert (found.labels.tolist(), found.indices.tolist()) == (labels, list(range(6)))
    assert costs._test_accuracy(run) == 4 / 6
    with pytest.raises(ValueError, match="runs/made has not been tested yet; torchcaps evaluate runs/made does it"):
        told(made(images, labels))
    assert list(tmp_path.iterdir()) == []


def test_what_was_said_of_varying_numbers_of_labels():
    probabilities = torch.tensor([[0.9, 0.6, 0.2], [0.4, 0.3, 0.2]])
    varying = Predictions(probabilities, probabilities, torch.tensor([[0, 1], [2, -1]]))
    assert chosen(varying).tolist() == [[True, True, False], [False, False, False]]
    fixed = varying._replace(labels=torch.tensor([[0, 1], [2, 1]]))
    assert chosen(fixed).tolist() == [[True, True, False], [True, True, False]]
