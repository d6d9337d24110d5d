"""What the figures of class capsules show, read back from what was drawn."""

import numpy as np
import pytest

from torchcaps.figures import alignment, perturbations, png, robustness, segments, trajectory, variance
from torchcaps.figures.catalog import KINDS, find
from torchcaps.figures.kind import Kind, resolve
from torchcaps.figures.segments import FIRST, SECOND, overlaid
from torchcaps.figures.style import DARK, svg
from torchcaps.pictures import packed

GREY = packed(np.full((6, 6), 90, np.uint8))
WAYS = ("Rot+", "Rot-", "x+", "x-", "y+", "y-")


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)


def perturbation_numbers(dims=2, scale=1.0):
    by = [0.05 * k * scale for k in range(-5, 6)]
    effect = [0.1, 0.4, 0.2][:dims]
    return {"name": "one", "class": "7", "image": 12, "amounts": by, "effect": effect, "shown": [1], "scale": scale,
            "scale_is": "√32, the most that a capsule can be long", "pictures": [[GREY] * 11]}  # fmt: skip


def alignment_numbers():
    shares = {way: [0.5, None] for way in WAYS}
    return {"ways": list(WAYS), "names": ["a", "b"], "images": 9, "data": "made", "dim": 16, "ratios": shares,
            "all": dict.fromkeys(WAYS, 0.5),
            "random": {"16": {"mean": 0.498, "deviation": 0.277}, "32": {"mean": 0.463, "deviation": 0.269}},
            "printed": {"all": dict.fromkeys(WAYS, 0.84), "random": {"mean": 0.311, "deviation": 0.262}}}  # fmt: skip


def segment_numbers(**more):
    column = {"labels": [0, 1], "reconstructed": [0, 1], "mark": "", "input": GREY, "ours": [GREY] * 2, "theirs": None}
    wrong = {**column, "reconstructed": [0, 2], "mark": "P"}
    other = {**column, "reconstructed": [0, 3], "mark": "*"}
    return {
        "names": list("abcd"),
        "images": 9,
        "recognised": 4,
        "overlap": 0.5,
        "columns": [column, wrong, other],
        **more,
    }


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_perturbations_have_a_picture_for_each_amount():
    figure = perturbations.draw({"runs": [perturbation_numbers()]})
    (axes,) = figure.axes
    assert len(axes.images) == 11
    assert "−0.25" in words(figure)  # noqa: RUF001
    assert "+0.05" in words(figure)
    assert "2" in words(figure)  # dimensions count from 1
    bars = {bar.get_label(): bar.patches[0].get_width() for bar in axes.containers}
    assert list(bars) == ["1"]
    assert any("the 1 of 2 that change most" in each for each in words(figure))
    scaled = {**perturbation_numbers(scale=32**0.5), "name": "other"}
    both = perturbations.draw({"runs": [perturbation_numbers(), scaled]}, dark=True)
    assert {"one: class 7, test image 12", "other: class 7, test image 12"} <= set(words(both))
    assert sum("0.25 times √32" in each for each in words(both)) == 1
    assert len(both.axes[0].images) == 22
    assert both.get_figheight() == pytest.approx(2 * figure.get_figheight())


def test_two_colours_add_up_where_both_digits_are():
    first, second = np.zeros((1, 3, 3), np.uint8), np.zeros((1, 3, 3), np.uint8)
    first[0, [0, 1]], second[0, [1, 2]] = 255, 255
    found = overlaid(first, second)
    both = np.minimum(255, np.add(FIRST, SECOND))
    assert found[0].tolist() == [list(FIRST), both.tolist(), list(SECOND)]
    assert both.min() > 240  # nearly white


def test_wrong_classes_are_marked():
    figure = segments.draw(segment_numbers())
    said = words(figure)
    assert [each for each in said if each.startswith("R:")] == ["R: (a, b)", "R: (a, c) P", "R: (a, d) *"]
    colours = [text.get_color() for axes in figure.axes for text in axes.texts if text.get_text().startswith("R:")]
    assert colours[0] != colours[1] == colours[2]
    assert len(figure.axes[0].images) == 6
    with pytest.raises(ValueError, match="no image of the sample can be shown"):
        segments.draw(segment_numbers(columns=[]))


def test_both_random_references_are_shown():
    said = words(alignment.draw(alignment_numbers()))
    assert said.count("0.50") == 12  # of a and of all; b has none
    assert said.count("0.84") == 6
    assert any("D = 32: 0.463 ± 0.269" in each for each in said)
    assert any("as printed, D = 32: 0.311 ± 0.262" in each for each in said)
    assert any("D = 16: 0.498 ± 0.277 (this network)" in each for each in said)


@pytest.mark.parametrize("dark", [False, True])
def test_ratios_can_be_read_on_every_shade(dark):
    """A contrast of at least 4.5, as the web's guidelines ask for."""
    from matplotlib.colors import to_rgb

    def light(colour):
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    numbers = alignment_numbers()
    numbers["ratios"] = {way: [1.0 - k / 20, 1.0] for k, way in enumerate(WAYS)}
    (axes,) = alignment.draw(numbers, dark=dark).axes
    (ink,) = {text.get_color() for text in axes.texts if text.get_text() == "1.00"}
    shades = [each.get_facecolor()[0][:3] for each in axes.collections]
    assert len(shades) == 18
    assert min(max(light(ink) / light(each), light(each) / light(ink)) for each in shades) > 4.5


def test_cosines_are_shares_of_images():
    counts = {"Rot": [1, 0, 0, 3], "x": [0, 4, 0, 0], "y": [2, 0, 0, 2]}
    shares = {way: {"below": 0.25, "above": 0.75} for way in counts}
    figure = alignment.draw_cosines({"edges": [-1, -0.5, 0, 0.5, 1], "counts": counts, "shares": shares})
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [[25, 0, 0, 75], [0, 100, 0, 0], [50, 0, 0, 50]]


def test_variance_has_curves_and_the_papers_table():
    one = {"first": 90.0, "deviation": 1.0, "cumulated": [90.0, 100.0]}
    chance = {"first": 25.6, "deviation": 3.0, "cumulated": [25.6, 100.0]}
    ways = {way: {"ours": one, "random": chance} for way in ("x", "y", "rotation")}
    printed = {"random": {"x": 25.57, "y": 25.54, "rotation": 13.49}}
    figure = variance.draw({"ways": ways, "printed": printed, "images": 9, "dim": 16})
    panels = [axes for axes in figure.axes if axes.get_lines()]
    assert [axes.get_title(loc="left") for axes in panels] == ["Shift in x", "Shift in y", "Rotation"]
    assert [list(line.get_ydata()) for line in panels[0].get_lines()] == [[90, 100], [25.6, 100]]
    assert words(figure).count("90.0 ± 1.0") == 3
    assert "13.49" in words(figure)


def test_the_path_is_drawn_as_it_is():
    angles = [-20, -10, 0, 10, 20]
    path = [[float(k), float(k * k)] for k in range(5)]
    pictures = [{"angle": k, "picture": GREY} for k in (-20, 0, 20)]
    numbers = {"class": "4", "image": 1, "angles": angles, "path": path, "shares": [0.9, None], "pictures": pictures,
               "length": [0.5] * 5, "rival": "9", "rival_length": [0.1] * 5}  # fmt: skip
    figure = trajectory.draw(numbers)
    *small, above, below = figure.axes
    assert [axes.get_xlabel() for axes in small] == ["−20°", "0°", "+20°"]  # noqa: RUF001
    assert above.collections[-1].get_offsets().tolist() == path
    assert (above.get_xlabel(), above.get_ylabel()) == ("component 1, 90.0 % of the variance", "component 2")
    assert above.get_title(loc="right") == "axes not to the same scale"
    assert {line.get_label(): list(line.get_ydata()) for line in below.get_lines()} == {
        "class 4": [0.5] * 5, "class 9": [0.1] * 5
    }  # fmt: skip


def test_each_run_has_a_line_in_each_panel():
    levels = {"rotation": [0, 10], "shift": [0, 0.1], "scale": [0.5, 1], "shear": [0, 1], "noise": [0, 1]}
    lines = [
        {"name": name, "images": 9, "accuracy": {way: [share, share / 2] for way in levels}}
        for name, share in (("one", 1.0), ("two", 0.5))
    ]
    figure = robustness.draw({"levels": levels, "lines": lines, "data": "made"})
    for axes in figure.axes[:5]:
        found = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        assert found == {"one": [100, 50], "two": [50, 25]}
    assert [line.get_xdata()[1] for line in figure.axes[1].get_lines()] == [10, 10]  # per cent
    assert [text.get_text() for text in figure.axes[5].get_legend().get_texts()] == ["one", "two"]


def test_a_seed_stays_with_its_number():
    names = ("efficient_capsnet, seed 0", "efficient_capsnet on fashion_mnist, seed 12")
    lines = [{"name": name, "images": 9, "accuracy": {"shear": [1.0]}} for name in names]
    figure = robustness.draw({"levels": {"shear": [0]}, "lines": lines, "data": "made"})
    shown = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert shown == ["efficient_capsnet,\nseed 0", "efficient_capsnet on\nfashion_mnist, seed 12"]


@pytest.mark.parametrize("dark", [False, True])
def test_the_same_numbers_give_the_same_bytes(dark):
    first, second = (perturbations.draw({"runs": [perturbation_numbers()]}, dark=dark) for _ in range(2))
    assert png(first) == png(second)
    assert svg(first) == svg(second)
    assert svg(first).startswith(b"<?xml")
    if dark:
        from matplotlib.colors import to_hex

        assert to_hex(first.get_facecolor()) == DARK.paper


def test_the_catalogue_is_whole():
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        assert callable(resolve(kind.numbers))
        assert callable(resolve(kind.draw))
        assert not kind.animate or callable(resolve(kind.animate))
        assert kind.what.endswith(".")
        assert find(kind.name) is kind


def test_an_unknown_figure_is_told_with_near_ones():
    with pytest.raises(ValueError, match="there is no figure 'perturbation'; did you mean perturbations"):
        find("perturbation")
    with pytest.raises(ValueError, match="there is no figure 'zzz'; there are mistakes, reconstructions"):
        find("zzz")
    with pytest.raises(ValueError, match="runs of x is one of none, one, two, several"):
        Kind("x", "X", "", "X.", "a:b", "a:b", runs="many")
