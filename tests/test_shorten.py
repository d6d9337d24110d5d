"""A shortened schedule is the row's own, seen through a smaller window."""

from dataclasses import replace

import pytest

from torchcaps.losses import spread_margin
from torchcaps.recipes import Recipe, find
from torchcaps.shorten import is_shortened, shortened
from torchcaps.train.optim import learning_rate

STEPS = 1000  # of an epoch
ROWS = (
    "mazzia2021_table2:efficient",
    "sabour2017_table1:routing3",
    "tsai2020_table1:inverted-resnet-cifar10",
    "li2018_table3:8-two-ots",
    "choi2019_table1:ours-c10",
    "ours:cifar10",
)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_rate_at_each_share_of_the_way_is_the_rows(row, share):
    recipe = replace(find(row), schedule_args={k: v for k, v in find(row).schedule_args.items() if k != "warmup"})
    short = shortened(recipe, round(share * recipe.epochs))
    for epoch in range(short.epochs):
        there = round(epoch / share)
        rates = [learning_rate(short, epoch * STEPS, STEPS), learning_rate(recipe, there * STEPS, STEPS)]
        assert rates[0] == pytest.approx(rates[1], rel=5e-3)


def test_fewer_images_in_an_epoch_move_what_is_counted_in_steps():
    recipe = find("sabour2017_table1:routing1-multimnist")
    short = shortened(recipe, 49, 100_000)
    assert (short.epochs, short.samples, short.schedule_args["every"]) == (49, 100_000, 255)
    assert shortened(recipe, 64) == recipe


def test_the_margin_at_each_share_of_the_way_is_the_rows():
    recipe = find("tsai2020_figure4:em-2")
    short = shortened(recipe, 7)
    assert (recipe.epochs, recipe.spread_steps, short.spread_steps) == (350, 50_000, 1000)
    assert spread_margin(7 * STEPS, short.spread_steps) == spread_margin(350 * STEPS, recipe.spread_steps)
    assert is_shortened(recipe, short.to_dict(), 7)
    assert not is_shortened(recipe, {**short.to_dict(), "spread_steps": 50_000}, 7)


def test_what_is_no_part_of_the_schedule_stays():
    recipe = replace(find("ours:cifar10"), keep_epochs=(1, 20, 80))
    short = shortened(recipe, 30)
    assert short.keep_epochs == (1, 20)
    assert replace(short, epochs=120, keep_epochs=recipe.keep_epochs) == recipe


def test_whether_a_run_was_shortened_so():
    recipe = find("mazzia2021_table2:efficient")
    run = shortened(recipe, 30).to_dict()
    assert is_shortened(recipe, run, 30)
    assert not is_shortened(recipe, run, 40)
    assert not is_shortened(recipe, run, 101)
    assert not is_shortened(recipe, recipe.to_dict(), 30)
    assert is_shortened(recipe, {"schedule_args": {"decay": 0.935, "floor": 5e-5}}, 30)


@pytest.mark.parametrize(("epochs", "samples"), [(0, None), (51, None), (5, 10), (-1, None)])
def test_refusals(epochs, samples):
    with pytest.raises(ValueError, match=r"epochs can be shortened to|of this recipe has all images"):
        shortened(Recipe(model="capsnet_mnist", data="mnist", epochs=50), epochs, samples)


def test_an_epoch_cannot_grow():
    with pytest.raises(ValueError, match="an epoch of this recipe has 600,000 images, so it cannot have 700,000"):
        shortened(find("mazzia2021_multimnist:efficient"), 10, 700_000)
