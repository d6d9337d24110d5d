from __future__ import annotations

import math

import pytest
import torch

from torchcaps.data.random import Draws, _grid, hashed, permuted

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def mix(word):
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15) * 0xD35A2D97 % 2**32
    return word ^ word >> 15


def absorb(state, value):
    first = mix(state[0] ^ value & MASK32)
    return first, mix((state[1] + first + (value >> 32 & MASK32)) & MASK32)


def words(*values):
    """The hash in Python's own integers, one index at a time."""
    state = (0, 0x9E3779B9)
    for value in values:
        state = absorb(state, value & MASK64)
    return mix((state[0] + state[1]) & MASK32), state[1]


def chi_square(values, bins):
    counts = torch.bincount(values.flatten(), minlength=bins).double()
    assert len(counts) == bins
    expected = values.numel() / bins
    return ((counts - expected) ** 2 / expected).sum().item()


def assert_uniform(values, bins):
    """Chi-square within five deviations of its mean."""
    assert abs(chi_square(values, bins) - (bins - 1)) < 5 * math.sqrt(2 * bins)


def test_the_hash_is_the_one_in_plain_integers():
    indices = [0, 1, 2, 7_654_321, 2**31, 2**32 + 5, 2**40, 10**12]
    for seed, stream in [(0, 0), (1, 3), (-1, 2), (2**50 + 3, 2**33)]:
        ours = hashed(seed, stream, torch.tensor(indices)).tolist()
        assert ours == [(b >> 2) << 32 | a for a, b in (words(seed, stream, index) for index in indices)]


def test_the_draws_are_the_ones_in_plain_integers():
    positions = [0, 5, 59_999, 2**33 + 1]
    draws = Draws(7, 3, torch.tensor(positions))
    uniform, integers, again = draws.uniform(2, 3), draws.integers(-5, 12), draws.uniform()
    for row, position in enumerate(positions):
        numbers = [words(7, 3, position, 0, k)[1] >> 8 for k in range(6)]
        assert uniform[row].flatten().tolist() == [k / 2**24 for k in numbers]
        a, b = words(7, 3, position, 0x9E3779B9)
        assert integers[row] == ((b >> 2) << 32 | a) % 17 - 5
        assert again[row] == (words(7, 3, position, 2 * 0x9E3779B9 & MASK32)[1] >> 8) / 2**24


def test_hashes_are_pinned():
    assert hashed(0, 0, torch.arange(3)).tolist() == [1693828576710318124, 853895799053240835, 2416926294371588524]


def test_draws_do_not_depend_on_the_batch():
    positions = torch.randint(0, 10**9, (50,))

    def everything(at):
        draws = Draws(3, 11, at)
        limits = at[:, None] % 7 + 1 + torch.arange(3)
        return draws.uniform(4), draws.normal(2, 3), draws.integers(0, 9, 5), draws.uniform(), draws.below(limits)

    whole = everything(positions)
    order = torch.randperm(50)
    parts = [everything(part) for part in positions[order].split([1, 30, 19])]
    for k, values in enumerate(whole):
        assert torch.equal(torch.cat([part[k] for part in parts]), values[order])


def test_an_epoch_may_be_a_tensor():
    at = torch.arange(100)
    assert torch.equal(Draws(1, torch.tensor(6), at).uniform(2), Draws(1, 6, at).uniform(2))
    assert torch.equal(permuted(at, 100, 1, torch.tensor(6)), permuted(at, 100, 1, 6))


def test_seed_epoch_position_and_call_all_count():
    at = torch.arange(1000)
    draws = Draws(0, 0, at)
    streams = [draws.uniform(), draws.uniform(), Draws(1, 0, at).uniform(), Draws(0, 1, at).uniform()]
    streams.append(Draws(0, 0, at + 1000).uniform())
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(5)
    assert correlation.abs().max() < 5 / math.sqrt(1000)
    assert torch.equal(Draws(0, 0, at).uniform(), streams[0])


@pytest.mark.parametrize("positions", [torch.arange(60_000), torch.arange(60_000) * 4096, 2**35 + torch.arange(60_000)])
def test_uniform_and_integers_are_uniform(positions):
    draws = Draws(0, 0, positions)
    values = draws.uniform(2)
    assert values.dtype == torch.float32
    assert values.min() >= 0
    assert values.max() < 1
    assert_uniform((values[:, 0] * 500).long(), 500)
    assert_uniform((values[:, 0] * 20).long() * 20 + (values[:, 1] * 20).long(), 400)
    assert_uniform((values[:, 0] * 2**24).long() % 256, 256)
    assert_uniform(draws.integers(4, 23) - 4, 19)
    assert_uniform(draws.integers(-3, 4, 2)[:, 1] + 3, 7)
    neighbours = (draws.uniform() * 20).long()
    assert_uniform(neighbours[:-1] * 20 + neighbours[1:], 400)


def test_normal_is_normal():
    z = Draws(0, 0, torch.arange(100_000)).normal(2)
    cells = (0.5 * (1 + torch.erf(z.double() / math.sqrt(2))) * 200).long()
    assert_uniform(cells[:, 0], 200)
    assert abs(torch.corrcoef(z.T)[0, 1]) < 5 / math.sqrt(100_000)
    assert abs((z.double() ** 4).mean() - 3) < 0.15
    assert z.dtype == torch.float32


def test_below_has_a_limit_for_each_sample():
    limit = torch.arange(20_000) % 5 + 1
    values = Draws(0, 0, torch.arange(20_000)).below(limit)
    assert (values >= 0).all()
    assert (values < limit).all()
    assert_uniform(values[limit == 5], 5)
    large = Draws(0, 0, torch.arange(20_000)).below(torch.full((20_000,), 10**12))
    assert_uniform(large // 10**10, 100)


def test_large_ranges_have_no_gaps():
    values = Draws(0, 0, torch.arange(20_000)).integers(0, 2**40)
    assert_uniform(values >> 33, 128)
    assert_uniform(values & 127, 128)


def test_empty_ranges_are_refused():
    with pytest.raises(ValueError, match="from 3 to below 3"):
        Draws(0, 0, torch.arange(2)).integers(3, 3)
    with pytest.raises(ValueError, match="length must be at least 1"):
        permuted(torch.arange(0), 0, 0, 0)


@pytest.mark.parametrize("length", [*range(1, 130), 997, 1024, 1797, 54_321, 60_000])
def test_permuted_is_a_bijection(length):
    for seed, epoch in [(0, 0), (3, 5)]:
        index = permuted(torch.arange(length), length, seed, epoch)
        assert torch.equal(index.sort().values, torch.arange(length))


def test_permuted_works_on_lengths_too_large_to_store():
    for length in (60_000_000, 99_999_989, 10**12 + 39):
        rows, columns = _grid(length)
        assert length <= rows * columns < length + 8  # a few steps of walking at most
        near = torch.cat([torch.arange(50_000), length - 1 - torch.arange(50_000)])
        index = permuted(near, length, 0, 0)
        assert index.min() >= 0
        assert index.max() < length
        assert len(index.unique()) == len(near)
        assert_uniform(index * 100 // length, 100)


def test_permuted_does_not_depend_on_the_batch():
    index = permuted(torch.arange(1797), 1797, 4, 2)
    order = torch.randperm(1797)
    assert torch.equal(torch.cat([permuted(part, 1797, 4, 2) for part in order.split(100)]), index[order])


def test_all_orders_of_few_are_equally_likely():
    orders = torch.stack([permuted(torch.arange(4), 4, seed, epoch) for seed in range(60) for epoch in range(40)])
    _, which = (orders * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_inverse=True)
    assert_uniform(which, 24)


def test_places_and_neighbours_are_equally_likely():
    length = 100
    orders = torch.stack([permuted(torch.arange(length), length, seed, 0) for seed in range(2000)])
    assert_uniform(orders[:, 37], length)
    assert_uniform(orders[:, 99], length)
    assert_uniform((orders[:, 1:] - orders[:, :-1]) % length - 1, length - 1)


def test_draws_compile():
    def draw(positions):
        draws = Draws(2, 1, positions)
        return draws.uniform(3), draws.normal(2), draws.integers(0, 7), draws.below(positions + 1)

    at = torch.arange(33)
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    for x, y in zip(draw(at), compiled(at), strict=True):
        assert torch.equal(x, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same():
    at = torch.arange(100_000) * 977
    here, there = Draws(3, 4, at), Draws(3, 4, at.cuda())
    assert torch.equal(there.uniform(3).cpu(), here.uniform(3))
    assert torch.equal(there.integers(-4, 5, 2).cpu(), here.integers(-4, 5, 2))
    assert torch.equal(there.below(at.cuda() + 1).cpu(), here.below(at + 1))
    z, expected = there.normal(2).cpu(), here.normal(2)
    assert (z != expected).double().mean() < 1e-4
    assert (z - expected).abs().max() < 1e-6
    assert torch.equal(hashed(5, 6, at.cuda()).cpu(), hashed(5, 6, at))
    at = torch.arange(54_321)
    assert torch.equal(permuted(at.cuda(), 54_321, 1, 2).cpu(), permuted(at, 54_321, 1, 2))
