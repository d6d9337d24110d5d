from __future__ import annotations

import logging

import pytest
import torch

from torchcaps.data.splits import Batch, DataSet, Stored, by_viewpoint, hold_out, shared_out


def numbered(labels, **about):
    """A split whose images carry their own number, so that overlaps show."""
    labels = torch.as_tensor(labels)
    number = torch.arange(len(labels))
    images = torch.stack([number // 256, number % 256], 1).to(torch.uint8).reshape(-1, 1, 2)
    names = tuple(map(str, range(int(labels.max()) + 1)))
    return Stored(images, labels, names, {word: torch.as_tensor(values) for word, values in about.items()})


def numbers(split):
    return (split.images.long()[:, 0, 0] * 256 + split.images.long()[:, 0, 1]).tolist()


def uneven(classes=10, n=997):
    return [(k * k // 7) % classes for k in range(n)]


def test_stored_gives_examples_and_batches():
    images = torch.arange(2 * 3 * 4 * 5).to(torch.uint8).reshape(2, 3, 4, 5)
    split = Stored(images, torch.tensor([1, 0], dtype=torch.int32), ("a", "b"))
    assert (len(split), split.image, split.classes) == (2, (3, 4, 5), 2)
    assert torch.equal(split[1].image, images[1])
    assert split[-1].label == 0
    assert split[0].label.dtype == torch.int64
    assert split[0].target is None
    batch = split.gather(torch.tensor([1, 1, 0]))
    assert isinstance(batch, Batch)
    assert torch.equal(batch.images, images[[1, 1, 0]])
    assert batch.labels.tolist() == [0, 0, 1]
    assert "2 images of 3 x 4 x 5, 2 classes" in repr(split)
    assert [example.label.item() for example in split] == [1, 0]
    with pytest.raises(IndexError, match="example 2 of 2"):
        split[2]


def test_grey_images_get_a_channel():
    split = Stored(torch.zeros(2, 4, 5, dtype=torch.uint8), torch.tensor([[1, -1], [0, 1]]), ("a", "b"))
    assert split.image == (1, 4, 5)
    assert split[0].image.shape == (1, 4, 5)
    assert split.gather(torch.tensor([0])).images.shape == (1, 1, 4, 5)
    assert split[0].label.tolist() == [1, -1]


def test_stored_moves_as_a_whole():
    split = numbered([0, 1, 0], instance=[4, 5, 6]).to("meta")
    assert {split.images.device.type, split.labels.device.type, split.about["instance"].device.type} == {"meta"}


def test_stored_refuses():
    images = torch.zeros(2, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="labels run from 0 to 2, but 2 classes"):
        Stored(images, torch.tensor([0, 2]), ("a", "b"))
    with pytest.raises(ValueError, match="2 images need labels"):
        Stored(images, torch.tensor([0]), ("a", "b"))
    with pytest.raises(ValueError, match=r"uint8 \[n, h, w\]"):
        Stored(images.float(), torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(ValueError, match="instance of 2 images"):
        Stored(images, torch.tensor([0, 1]), ("a", "b"), {"instance": torch.zeros(3)})


@pytest.mark.parametrize("validation", [1, 10, 100, 996, 0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 3])
def test_hold_out_shares_nothing_and_is_stratified(validation, seed):
    split = numbered(uneven())
    train, held = hold_out(split, validation, seed)
    count = validation if isinstance(validation, int) else round(validation * 997)
    assert len(held) == count
    assert sorted(numbers(train) + numbers(held)) == list(range(997))
    for part in (train, held):
        assert numbers(part) == sorted(numbers(part))
        assert part.labels.tolist() == split.labels[numbers(part)].tolist()
    of_all, of_held = (torch.bincount(part.labels, minlength=10) for part in (split, held))
    assert ((of_held - of_all * count / 997).abs() < 1).all()


def test_hold_out_repeats_by_seed():
    split = numbered(uneven())
    assert numbers(hold_out(split, 100, 5)[1]) == numbers(hold_out(split, 100, 5)[1])
    assert numbers(hold_out(split, 100, 5)[1]) != numbers(hold_out(split, 100, 6)[1])
    assert numbers(hold_out(split, 8, 0)[1]) == [105, 200, 322, 376, 582, 693, 768, 821], "the same on every machine"


def test_hold_out_of_several_labels():
    labels = torch.tensor([[0, 1], [2, -1], [0, 1], [2, -1], [0, 1], [2, -1], [0, 1], [2, -1]])
    train, held = hold_out(numbered(labels), 4)
    assert held.labels.tolist().count([0, 1]) == held.labels.tolist().count([2, -1]) == 2
    assert sorted(numbers(train) + numbers(held)) == list(range(8))


def test_the_first_are_held_out_by_name():
    train, held = hold_out(numbered(uneven()), "first-100", seed=9)
    assert numbers(held) == list(range(100))
    assert numbers(train) == list(range(100, 997))


def test_parts_are_held_out_in_one_piece():
    parts = [hold_out(numbered(uneven()), f"part-{part}-of-3", seed=9) for part in (1, 2, 3)]
    assert [numbers(held) for _, held in parts] == [
        list(range(332)),
        list(range(332, 664)),
        list(range(664, 997)),
    ]
    assert all(sorted(numbers(train) + numbers(held)) == list(range(997)) for train, held in parts)


REFUSED = [997, 998, -1, 1.0, 1.5, 0.0, True, "first-997", "first-0", "first", "last-3"]
REFUSED += ["part-0-of-3", "part-4-of-3", "part-1-of-1", "part-1-of-998", "part-1-of-0", "part-1", "part--1-of-3"]


@pytest.mark.parametrize("validation", REFUSED)
def test_hold_out_refuses(validation):
    with pytest.raises(ValueError, match="validation="):
        hold_out(numbered(uneven()), validation)


def norb(images_each=6):
    rows = [
        (label, instance, elevation, azimuth)
        for label in range(5)
        for instance in (4, 6, 7, 8, 9)
        for elevation in range(3, 9, 4)
        for azimuth in (0, 10, 34)
    ]
    label, instance, elevation, azimuth = zip(*rows, strict=True)
    return numbered(label, instance=instance, elevation=elevation, azimuth=azimuth)


@pytest.mark.parametrize(("validation", "toys"), [(0.2, 1), (0.4, 2), (1, 1), (30, 1), (60, 2), (149, 4)])
def test_whole_instances_are_held_out(validation, toys):
    split = norb()
    train, held = hold_out(split, validation, seed=1, group="instance")
    assert sorted(numbers(train) + numbers(held)) == list(range(150))
    apart = [
        {(label, toy) for label, toy in zip(part.labels.tolist(), part.about["instance"].tolist(), strict=True)}
        for part in (train, held)
    ]
    assert not apart[0] & apart[1]
    assert [sum(label == k for label, _ in apart[1]) for k in range(5)] == [toys] * 5
    assert len(held) == 5 * toys * 6


def test_instances_are_chosen_by_seed_for_each_class(caplog):
    with caplog.at_level(logging.INFO, "torchcaps"):
        choices = {tuple(hold_out(norb(), 10, seed, "instance")[1].about["instance"].tolist()) for seed in range(9)}
    assert len(choices) > 5
    assert any(len(set(choice)) > 1 for choice in choices)
    assert "whole instances: 30 images where 10 were asked for" in caplog.text


def test_a_single_instance_cannot_be_held_out():
    with pytest.raises(ValueError, match="class 1 has a single instance"):
        hold_out(numbered([0, 0, 1, 1], instance=[1, 2, 3, 3]), 1, group="instance")


def test_viewpoints():
    azimuths = list(range(0, 36, 2))
    split = numbered([0] * 18 * 9, azimuth=azimuths * 9, elevation=[k // 18 for k in range(18 * 9)])
    familiar, novel = by_viewpoint(split, "azimuth")
    assert {10 * a for a in familiar.about["azimuth"].tolist()} == {300, 320, 340, 0, 20, 40}
    assert {10 * a for a in novel.about["azimuth"].tolist()} == set(range(60, 281, 20))
    assert len(familiar) * 3 == len(split), "a third of the data, as in Hinton et al. 2018"
    assert sorted(numbers(familiar) + numbers(novel)) == list(range(len(split)))
    familiar, novel = by_viewpoint(split, "elevation")
    assert set(familiar.about["elevation"].tolist()) == {0, 1, 2}
    assert set(novel.about["elevation"].tolist()) == {3, 4, 5, 6, 7, 8}
    with pytest.raises(ValueError, match="azimuth, elevation"):
        by_viewpoint(split, "lighting")


@pytest.mark.parametrize(("count", "sizes"), [(10, [3, 3, 3, 91]), (1, [1, 1]), (7, [5, 0, 5]), (99, [33, 66])])
def test_shares_add_up(count, sizes):
    parts = shared_out(count, sizes)
    assert sum(parts) == count
    assert all(abs(part - count * size / sum(sizes)) < 1 for part, size in zip(parts, sizes, strict=True))


def test_a_data_set_moves_with_all_its_splits():
    train, test = numbered([0, 1, 0, 1]), numbered([1, 0])
    data = DataSet("some", *hold_out(train, 2), test, familiar=test)
    assert list(data.splits()) == ["train", "validation", "test", "familiar"]
    assert {split.device.type for split in data.to("meta").splits().values()} == {"meta"}
    assert (data.image, data.classes, data.class_names) == ((1, 1, 2), 2, ("0", "1"))
