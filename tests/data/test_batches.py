from collections import Counter
from itertools import islice

import pytest
import torch

from torchcaps.data.augment import brightness, flip, normalise, random_crop, scale, shift, standardise
from torchcaps.data.batches import Batches, Order
from torchcaps.data.random import Draws, permuted
from torchcaps.data.splits import Batch, Example, Stored

STEPS = (shift(2), flip(), brightness(0.2), standardise())


def stored(n=23, channels=3, several=False):
    """Images that name themselves: the first pixel is the image's number."""
    images = torch.randint(256, (n, channels, 9, 8), dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(n, dtype=torch.uint8)
    labels = torch.arange(n) % 5
    if several:
        labels = torch.stack([labels, torch.where(labels > 2, -1, 4 - labels)], 1)
    return Stored(images if channels > 1 else images[:, 0], labels, tuple("abcde"))


class Made:
    """A generated set with targets, as MultiMNIST has them."""

    image, classes, class_names = (1, 4, 4), 3, ("a", "b", "c")

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return Example(*(field[0] for field in self.gather(torch.tensor([index]))))

    def gather(self, indices):
        images = (indices[:, None, None, None] % 251).to(torch.uint8).expand(-1, 1, 4, 4)
        return Batch(
            images, torch.stack([indices % 3, (indices + 1) % 3], 1), images[:, None].expand(-1, 2, -1, -1, -1)
        )

    def to(self, device):
        return self


def numbers(batch):
    return (batch.images[:, 0, 0, 0] * 255).round().long().tolist()


def same(first, second):
    """Bit for bit, in every field of every batch."""
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.images.dtype == torch.float32
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("batch_size", [1, 4, 23, 100])
def test_each_image_once_an_epoch(batch_size):
    split = stored()
    batches = Batches(split, batch_size)
    seen = [batch for batch in batches.epoch(0)]
    assert len(seen) == len(batches) == -(-23 // batch_size)
    rows = [number for batch in seen for number in numbers(batch)]
    assert sorted(rows) == list(range(23))
    assert rows != sorted(rows)
    assert torch.equal(torch.cat([batch.labels for batch in seen]), split.labels[rows])
    assert torch.equal(torch.cat([batch.images for batch in seen]), split.images[rows].float() / 255)
    assert all(batch.targets is None for batch in seen)


def test_against_one_image_at_a_time():
    """The definition: the image at a position, with the draws of that position."""
    split = stored()
    batch = list(Batches(split, 5, transform=STEPS, seed=3).epoch(2))[1]
    for row, position in enumerate(range(5, 10)):
        place = torch.tensor([position])
        index = permuted(place, 23, 3, 2)
        image, draws = split.gather(index).images.float() / 255, Draws(3, 2, place)
        for step in STEPS:
            image = step(image, draws)
        torch.testing.assert_close(batch.images[row : row + 1], image, rtol=1e-6, atol=1e-6)


def test_seeds_and_epochs_differ_and_repeat():
    def rows(seed, epoch):
        return [n for batch in Batches(stored(), 6, seed=seed).epoch(epoch) for n in numbers(batch)]

    assert rows(0, 0) == rows(0, 0)
    assert len({tuple(rows(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    split = stored()
    first, second = (next(Batches(split, 23, transform=(shift(2),), seed=s, shuffle=False).epoch(0)) for s in (0, 1))
    assert not torch.equal(first.images, second.images)


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("together", [1, 4])
def test_interrupted_equals_uninterrupted(start, together):
    options = dict(transform=STEPS, seed=5)
    whole = list(Batches(stored(), 4, **options).epoch(3))
    torch.manual_seed(0)
    same(Batches(stored(), 4, together=together, **options).epoch(3, start), whole[start:])


def test_groups_begin_alike_when_resumed(monkeypatch):
    """A device may sum in another order when a group has another size, so a resumed run keeps the groups."""
    split, seen = stored(), []
    real = split.gather
    monkeypatch.setattr(split, "gather", lambda indices: seen.append(indices.tolist()) or real(indices))
    batches = Batches(split, 4, together=3)
    list(batches.epoch(0))
    assert [len(rows) for rows in seen] == [12, 11]
    list(batches.epoch(0, 5))
    assert seen[2] == seen[1]


def test_torch_random_state_does_not_matter():
    split = stored()
    batches = Batches(split, 4, transform=STEPS)
    first = list(batches.epoch(1))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    same(batches.epoch(1), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("together", [1, 3])
def test_ranks_share_the_batches_of_one_process(world, drop_last, together):
    options = dict(transform=STEPS, seed=1, drop_last=drop_last)
    split = stored(22, several=True)  # a last batch of 2 leaves the third rank nothing
    whole = list(Batches(split, 5, **options).epoch(1))
    ranks = [list(Batches(split, 5, rank=r, world=world, together=together, **options).epoch(1)) for r in range(world)]
    assert len(whole) == (4 if drop_last else 5)
    for number, batch in enumerate(whole):
        shares = [rank[number] for rank in ranks]
        for field in ("images", "labels"):
            merged = torch.full_like(getattr(batch, field), -7)
            for rank, share in enumerate(shares):
                merged[rank::world] = getattr(share, field)
            assert torch.equal(merged, getattr(batch, field))


def test_evaluation_takes_images_as_they_stand():
    split = stored()
    batches = Batches(split, 10, shuffle=False)
    assert [numbers(b) for b in batches.epoch(0)] == [list(range(10)), list(range(10, 20)), list(range(20, 23))]
    same(batches.epoch(0), batches.epoch(7))
    assert [numbers(b) for b in Batches(split, 4, shuffle=False, samples=6).epoch(1)] == [[0, 1, 2, 3], [4, 5]]


def test_short_epochs_go_through_the_whole_set():
    """60 million made images, 50 in an epoch: none comes again before all were seen."""
    batches = Batches(stored(), 4, samples=10)
    assert len(batches) == 3
    rows = [n for epoch in range(23) for batch in batches.epoch(epoch) for n in numbers(batch)]
    assert len(rows) == 230
    for lap in range(10):
        assert sorted(rows[23 * lap : 23 * (lap + 1)]) == list(range(23))
    huge = Batches(Made(60_000_000), 25, samples=50)
    assert [len(batch.images) for batch in huge.epoch(1_000_000)] == [25, 25]


def test_long_epochs_repeat_the_set():
    batches = Batches(stored(), 8, samples=50, transform=(shift(1),))
    indices = [index for _, indices in batches.order.shares(0) for index in indices.tolist()]
    assert set(Counter(indices).values()) == {2, 3}
    same(list(batches.epoch(4))[3:], batches.epoch(4, 3))


def test_grey_images_and_several_labels():
    batch = next(Batches(stored(channels=1, several=True), 7).epoch(0))
    assert batch.images.shape == (7, 1, 9, 8)
    assert batch.labels.shape == (7, 2)
    assert batch.labels.min() == -1


def test_targets():
    steps = (scale(0.5), normalise(0.5, 0.25), lambda images, draws: images + 3)  # a plain function may be a step
    batches = Batches(Made(100), 6, transform=steps)
    batch, raw = next(batches.epoch(0)), next(Batches(Made(100), 6).epoch(0))
    assert batch.targets.shape == (6, 2, 1, 4, 4)
    torch.testing.assert_close(batch.images, (raw.images / 2 - 0.5) / 0.25 + 3)
    for k in range(2):
        assert torch.equal(batch.targets[:, k], batch.images), "images and targets stay comparable"
    shares = [list(Batches(Made(7), 6, transform=steps, rank=rank, world=2).epoch(0)) for rank in range(2)]
    assert [share[-1].targets.shape[0] for share in shares] == [1, 0]
    assert torch.equal(batch.labels[:, 1], (batch.labels[:, 0] + 1) % 3)
    with pytest.raises(ValueError, match=r"random_crop\(size=3.* would part the images from their targets"):
        next(Batches(Made(100), 6, transform=(normalise(0.5, 0.5), random_crop(3))).epoch(0))
    with pytest.raises(ValueError, match=r"brightness\(delta=0.1\) would part the images from their targets"):
        next(Batches(Made(100), 6, transform=(brightness(0.1),)).epoch(0))


def test_a_plain_function_is_a_step():
    split = stored()
    whole = next(Batches(split, 23, transform=(lambda images, draws: 1 - images,), shuffle=False).epoch(0))
    assert torch.equal(whole.images, 1 - split.images.float() / 255)


def test_steps_run_on_through_the_epochs():
    batches = Batches(stored(), 10, transform=STEPS)
    run = list(islice(batches.steps(), 8))
    assert [(epoch, number) for epoch, number, _ in run] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
    ]
    for k, (epoch, number, _) in enumerate(run):
        resumed = islice(batches.steps(epoch, number), 8 - k)
        same([batch for *_, batch in resumed], [batch for *_, batch in run[k:]])
    end = next(batches.steps(0, 3))  # saved after the last batch of an epoch
    assert end[:2] == (1, 0)


def test_blocks_do_not_show(monkeypatch):
    order = Order(1000, 7, seed=2, rank=1, world=3)
    whole = [indices.tolist() for _, indices in order.shares(5)]
    monkeypatch.setattr("torchcaps.data.batches.BLOCK", 50)
    assert [indices.tolist() for _, indices in order.shares(5)] == whole
    assert [indices.tolist() for _, indices in order.shares(5, 100)] == whole[100:]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(batch_size=0), "batch_size 0 and samples 23"),
        (dict(batch_size=4, samples=0), "batch_size 4 and samples 0"),
        (dict(batch_size=4, rank=2, world=2), "rank 2 is not among 2 processes"),
        (dict(batch_size=2, world=3), "a batch of 2 cannot be shared by 3"),
        (dict(batch_size=4, shuffle=False, samples=24), "24 samples in order .* has 23"),
        (dict(batch_size=24, drop_last=True), "an epoch of 23 fills no batch of 24"),
        (dict(batch_size=4, together=0), "0 batches cannot be drawn together"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Batches(stored(), **options)


def test_bad_places():
    with pytest.raises(ValueError, match="the split is empty"):
        Batches(stored().take(torch.arange(0)), 4)
    for epoch, start in [(0, 7), (0, -1), (-1, 0)]:
        with pytest.raises(ValueError, match=f"epoch {epoch} from batch {start}: .* has 6 batches"):
            next(Batches(stored(), 4).epoch(epoch, start))
    assert list(Batches(stored(), 4).epoch(0, 6)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("together", [1, 3])
def test_the_device_is_never_waited_for(together):
    split = stored()
    batches = Batches(split, 4, transform=STEPS, device="cuda", together=together)
    list(batches.epoch(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = list(batches.epoch(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, expected in zip(made, Batches(split, 4, transform=STEPS).epoch(1), strict=True):
        assert batch.images.device.type == batch.labels.device.type == "cuda"
        assert torch.equal(batch.labels.cpu(), expected.labels)
        torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=1e-5, atol=1e-5)
