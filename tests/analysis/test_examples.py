"""Which images a figure shows, and what was said of them."""

from types import SimpleNamespace

import numpy as np
import torch

from torchcaps.analysis.examples import lengths, worst_mistakes
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


def test_what_was_said_of_varying_numbers_of_labels():
    probabilities = torch.tensor([[0.9, 0.6, 0.2], [0.4, 0.3, 0.2]])
    varying = Predictions(probabilities, probabilities, torch.tensor([[0, 1], [2, -1]]))
    assert chosen(varying).tolist() == [[True, True, False], [False, False, False]]
    fixed = varying._replace(labels=torch.tensor([[0, 1], [2, 1]]))
    assert chosen(fixed).tolist() == [[True, True, False], [True, True, False]]
