"""Alignment, variance and paths, on capsules whose answers are known."""

import math

import numpy as np
import pytest
import torch

from torchcaps.analysis.alignment import align_vectors, alignment_ratios, random_ratios
from torchcaps.analysis.perturb import amounts, perturbed
from torchcaps.analysis.segments import overlap
from torchcaps.analysis.trajectory import principal, principal_path
from torchcaps.analysis.variance import random_variance, variance_shares


def test_a_perfectly_linear_pose_has_ratio_1():
    direction = torch.randn(32, dtype=torch.float64)
    by = torch.tensor([0.1, 0.3, -0.2, 2.0, 1.0], dtype=torch.float64)
    ratios = alignment_ratios(by[:, None] * direction)
    assert torch.allclose(ratios, torch.ones(5, dtype=torch.float64), atol=1e-12)
    shares = variance_shares(by[:, None] * direction)
    assert torch.allclose(shares, torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64), atol=1e-12)


def test_a_known_ratio():
    """Of (3, 0) and (0, 1) the first singular vector is (1, 0): one lies on it, one across."""
    ratios = alignment_ratios(torch.tensor([[3.0, 0.0], [0.0, 1.0], [4.0, 3.0]]))
    differences = np.array([[3.0, 0.0], [0.0, 1.0], [4.0, 3.0]])
    values, vectors = np.linalg.eigh(differences.T @ differences)
    first = vectors[:, values.argmax()]
    expected = [abs(row @ first) / math.sqrt(row @ row) for row in differences]
    assert ratios.tolist() == pytest.approx(expected, abs=1e-12)
    assert alignment_ratios(torch.tensor([[3.0, 0.0], [0.0, 1.0]])).tolist() == pytest.approx([1, 0], abs=1e-12)


def test_random_vectors_have_the_ratio_of_equation_15_and_not_the_printed_one():
    mean, deviation = random_ratios(32)
    assert (mean, deviation) == pytest.approx((0.4628, 0.2687), abs=0.0004)
    assert random_ratios(16) == pytest.approx((0.4980, 0.2772), abs=0.0004)


def test_an_align_vector_points_to_where_the_differences_do():
    direction = torch.tensor([0.6, -0.8], dtype=torch.float64)
    by = torch.tensor([[1.0, 2, 3], [-1, -2, -3], [-1, -1, 5]], dtype=torch.float64)
    found = align_vectors(by[..., None] * direction)
    assert torch.allclose(found, torch.stack([direction, -direction, direction]), atol=1e-12)
    plus, minus = found[0], found[1]
    assert float(plus @ minus) == pytest.approx(-1)


def test_a_difference_of_nothing_has_no_ratio():
    ratios = alignment_ratios(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert float(ratios[0]) == pytest.approx(1)
    assert math.isnan(float(ratios[1]))


def test_shares_are_those_of_the_covariance():
    poses = torch.randn(4, 11, 6, dtype=torch.float64)
    for one, found in zip(poses.numpy(), variance_shares(poses), strict=True):
        mean = [sum(row[d] for row in one) / 11 for d in range(6)]
        covariance = np.zeros((6, 6))
        for row in one:
            z = row - mean
            covariance += np.outer(z, z) / 11
        values = sorted(np.linalg.eigvalsh(covariance), reverse=True)
        assert found.tolist() == pytest.approx([value / sum(values) for value in values], abs=1e-12)


def test_a_circle_takes_two_components():
    angle = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    circle = torch.stack([angle.cos(), angle.sin(), 0 * angle + 3], -1)
    assert variance_shares(circle).tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-12)
    assert bool(variance_shares(torch.ones(4, 3)).isnan().all())


@pytest.mark.parametrize(("vectors", "share"), [(11, 0.2554), (51, 0.1350)])
def test_uniform_vectors_have_the_printed_variance(vectors, share):
    found = random_variance(vectors, 16)
    assert float(found[:, 0].mean()) == pytest.approx(share, abs=0.0003)
    assert torch.allclose(found.sum(dim=1), torch.ones(len(found), dtype=torch.float64))
    assert bool((found.diff(dim=1) <= 1e-12).all())


def test_a_flat_path_keeps_its_distances():
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(16, 2, generator=generator, dtype=torch.float64)).Q
    path = principal_path(flat @ basis.T + 7)
    assert torch.allclose(torch.cdist(path, path), torch.cdist(flat, flat), atol=1e-7)
    assert bool((path[-1] >= path[0]).all())
    assert torch.allclose(path.mean(dim=0), torch.zeros(2, dtype=torch.float64), atol=1e-12)
    with pytest.raises(ValueError, match="two poses of two dimensions"):
        principal_path(torch.ones(1, 5))


def test_a_projected_path_is_the_path():
    poses = torch.randn(9, 5, dtype=torch.float64)
    mean, axes, shares = principal(poses)
    assert torch.allclose(shares, variance_shares(poses)[:2], atol=1e-12)
    assert torch.allclose(((poses - mean) @ axes).abs(), principal_path(poses).abs(), atol=1e-12)


def test_amounts_are_exact():
    expected = [-0.25, -0.2, -0.15, -0.1, -0.05, 0, 0.05, 0.1, 0.15, 0.2, 0.25]
    assert amounts() == expected
    assert amounts(math.sqrt(32)) == [math.sqrt(32) * each for each in expected]


def test_one_dimension_moves_at_a_time():
    pose = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    found = perturbed(pose, [-0.25, 0, 0.25])
    for d in range(3):
        for s, by in enumerate((-0.25, 0, 0.25)):
            expected = pose.tolist()
            expected[d] += by
            assert found[d, s].tolist() == expected


def test_overlap_counts_pixels():
    ours, theirs = torch.zeros(2, 1, 3, 3), torch.zeros(2, 1, 3, 3)
    ours[0, 0, 0] = 0.9
    theirs[0, 0, :, 0] = 1.0
    ours[1, 0, 1, 1] = 0.4
    assert overlap(ours, theirs).tolist() == [1 / 5, 0]
    assert overlap(theirs, theirs).tolist() == [1, 0]
