"""What the figures show, read back from what was drawn."""

import builtins
import math
from pathlib import Path

import numpy as np
import pytest

from torchcaps import figures
from torchcaps.figures.confusion import most_confused
from torchcaps.figures.style import DARK, LIGHT
from torchcaps.pictures import columns_for

GREY = np.full((6, 6, 3), 90, np.uint8)


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)


def rows(epochs, **more):
    terms = {"lr": 0.125, "loss": 3.0, "margin": 1.0, "reconstruction": 2.0}
    return [
        {"epoch": n, "step": 5 * n}
        | {name: value / n for name, value in terms.items()}
        | {name: value(n) for name, value in more.items()}
        for n in range(1, epochs + 1)
    ]


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_curves_are_the_columns():
    figure = figures.curves(rows(3, validation_error=lambda n: 0.5**n))
    loss, error, lr = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss", "Validation error (%)", "Learning rate"]
    assert lines(loss) == {
        "total": ([1, 2, 3], [3.0, 1.5, 1.0]),
        "margin": ([1, 2, 3], [1.0, 0.5, 1 / 3]),
        "reconstruction": ([1, 2, 3], [2.0, 1.0, 2 / 3]),
    }
    assert next(iter(lines(error).values())) == ([1, 2, 3], [50.0, 25.0, 12.5])
    assert next(iter(lines(lr).values()))[1] == [0.125, 0.0625, 0.125 / 3]


def test_curves_of_one_epoch_without_validation():
    row = {"epoch": 1, "step": 4, "lr": 0.1, "loss": 0.5, "margin": 0.5}
    figure = figures.curves([row], selected=1)
    loss, lr = figure.axes
    assert loss.get_title(loc="left") == "Loss: margin"
    assert next(iter(lines(loss).values())) == ([1], [0.5])
    assert loss.get_lines()[0].get_marker() == "o"
    assert lr.get_xlim() == (0.5, 1.5)
    figures.png(figure)


def test_a_missing_value_is_a_gap_and_the_selected_epoch_is_marked():
    found = figures.curves(rows(4, validation_error=lambda n: None if n == 2 else 0.1), selected=3)
    error = found.axes[1]
    curve, mark = error.get_lines()
    assert [math.isnan(value) for value in curve.get_ydata()] == [False, True, False, False]
    assert list(mark.get_xdata()) == [3, 3]
    with pytest.raises(ValueError, match="before the first epoch is over"):
        figures.curves([])


def test_confusion_has_the_counts():
    counts = np.array([[7, 0, 1], [0, 1200, 2.5], [0, 0, 0]])
    figure = figures.confusion(counts, ["a", "b", "c"])
    (axes,) = figure.axes
    cells = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in axes.texts if "%" not in t.get_text()}
    assert cells == {(0, 0): "7", (0, 2): "1", (1, 1): "1,200", (1, 2): "2.5"}
    shown = [t.get_text() for t in axes.texts if "%" in t.get_text()]
    assert shown == ["12.5 %", "0.2 %"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b", "c"]
    assert most_confused(counts) == [(1, 2, 2.5), (0, 2, 1.0)]
    with pytest.raises(ValueError, match="2 classes have 2 x 2 cells"):
        figures.confusion(counts, ["a", "b"])


def test_confusion_of_a_hundred_classes_is_larger_and_has_no_numbers_inside():
    names = [f"class {k}" for k in range(100)]
    figure = figures.confusion(np.eye(100) * 5, names)
    assert figure.get_size_inches()[0] > 10
    assert all("%" in text.get_text() for text in figure.axes[0].texts)
    assert figure.axes[0].images[0].get_array().shape == (100, 100, 3)


def drawn_lengths(figure):
    """Of each case, the lengths that its bars have of their tracks, and their colours."""
    containers = figure.axes[0].containers
    tracks = [each for each in containers if each.get_label() == "track"]
    bars = [each for each in containers if each.get_label() != "track"]
    return [
        [(bar.get_width() / full.get_width(), bar.get_facecolor()) for bar, full in zip(each, track, strict=True)]
        for each, track in zip(bars, tracks, strict=True)
    ]


@pytest.mark.parametrize("dark", [False, True])
def test_bars_have_the_lengths_of_the_capsules(dark):
    from matplotlib.colors import to_rgba

    case = figures.Case(GREY, (2,), (0,), [0.9, 0.0, 0.25], 41)
    figure = figures.mistakes([case], ["one", "two", "three"], dark=dark)
    (bars,) = drawn_lengths(figure)
    assert [length for length, _ in bars] == pytest.approx([0.9, 0.0, 0.25])
    colours = DARK if dark else LIGHT
    assert [colour for _, colour in bars] == [to_rgba(c) for c in (colours.wrong, colours.muted, colours.right)]
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words[:4] == ["label ", "three", ", predicted ", "one"]
    assert {"test image 41", "0.90", "0.25"} <= set(words)
    assert figure.get_facecolor() == to_rgba(colours.paper)


def test_of_many_classes_the_longest_have_bars_and_always_the_label():
    values = [k / 100 for k in range(100)]
    names = [str(k) for k in range(100)]
    figure = figures.mistakes([figures.Case(GREY, (3,), (99,), values, 0)], names)
    (bars,) = drawn_lengths(figure)
    expected = [0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.03]
    assert [length for length, _ in bars] == pytest.approx(expected)


def test_no_mistakes_is_a_sentence():
    figure = figures.mistakes([], ["a"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["There are no mistakes to show."]


def test_reconstructions_lie_below_their_inputs():
    strips = [
        figures.Strip("input", [GREY, GREY], ["4", "9"]),
        figures.Strip("reconstruction", [GREY // 2, None], ["4", ""], "right"),
    ]
    figure = figures.reconstructions([figures.Block("Recognised", strips)])
    first, second, below = [image.get_extent() for image in figure.axes[0].images]
    assert below[:2] == first[:2]
    assert below[3] > first[2]  # counted from the top
    assert second[0] > first[1]
    assert [t.get_text() for t in figure.axes[0].texts] == ["Recognised", "input", "4", "9", "reconstruction", "4"]
    with pytest.raises(ValueError, match="no reconstructions"):
        figures.reconstructions([])
    assert (columns_for(28, 28), columns_for(32, 64)) == (8, 4)


def test_calibration_shows_the_bins():
    table = [
        {"low": 0.0, "high": 0.5, "cases": 4, "confidence": 0.3, "accuracy": 0.25},
        {"low": 0.5, "high": 0.75, "cases": 0, "confidence": 0.0, "accuracy": 0.0},
        {"low": 0.75, "high": 1.0, "cases": 900, "confidence": 0.9, "accuracy": 1.0},
    ]
    left, right = figures.calibration(table).axes
    assert [bar.get_height() for bar in left.containers[0]] == [0.25, 1.0]
    assert [bar.get_height() for bar in right.containers[0]] == [4, 900]
    assert right.get_yscale() == "log"


def test_routing_shows_first_and_last_epoch():
    def layer(scale):
        return {"routing": "DynamicRouting", "logits": [2 * scale, scale], "cosine": [1, 3], "iterations": 2}

    log = [{"epoch": n, "cosine_edges": [-1, 0, 1], "layers": {"body.0": layer(n), "body.1": {"logits": []}}}
           for n in range(1, 11)]  # fmt: skip
    figure = figures.routing(log)
    changes, cosines, once, _ = figure.axes
    assert lines(changes) == {f"epoch {n}": ([1, 2], [2 * n, n]) for n in (1, 4, 7, 10)}
    assert [list(patch.get_data().values) for patch in cosines.patches] == [[0.25, 0.75]] * 4
    assert [text.get_text() for text in once.texts] == ["no iterations"]
    figures.png(figure)
    with pytest.raises(ValueError, match="no layer"):
        figures.routing([])


def test_pictures_of_any_channels():
    grey = figures.picture(np.array([[[0, 255], [51, 102]]], np.uint8))
    assert grey.tolist() == [[[0] * 3, [255] * 3], [[51] * 3, [102] * 3]]
    colour = np.zeros((3, 1, 2), np.uint8)
    colour[1, 0, 1] = 200
    assert figures.picture(colour).tolist() == [[[0, 0, 0], [0, 200, 0]]]
    pair = np.stack([np.zeros((2, 2)), np.ones((2, 2))])
    assert figures.picture(pair)[..., 0].tolist() == [[0, 0, 255, 255]] * 2
    five = np.zeros((5, 1, 1))
    five[2] = 1.0
    assert figures.picture(five).tolist() == [[[51] * 3]]
    standardised = np.array([[[-2.0, 2.0]]])
    assert figures.picture(standardised)[..., 0].tolist() == [[0, 255]]
    assert figures.picture(standardised, -4.0, 4.0)[..., 0].tolist() == [[64, 191]]
    assert figures.picture(np.full((1, 1, 1), math.nan)).tolist() == [[[0] * 3]]
    with pytest.raises(ValueError, match=r"\[c, h, w\]"):
        figures.picture(np.zeros((2, 2)))


def test_the_same_figure_gives_the_same_bytes_without_a_date():
    first, second = (figures.png(figures.curves(rows(3))) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")
    assert not {b"tEXt", b"iTXt", b"tIME"} & {first[k : k + 4] for k in range(len(first))}


def test_own_settings_neither_change_a_figure_nor_are_changed():
    import matplotlib

    plain = figures.png(figures.confusion(np.eye(2), ["$a$", "b"]))
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "text.parse_math": True}):
        assert figures.png(figures.confusion(np.eye(2), ["$a$", "b"])) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_pyplot_with_its_windows_is_never_used():
    for path in Path(figures.__file__).parent.glob("*.py"):
        assert "pyplot" not in path.read_text()


def test_names_in_any_script_are_no_warning():
    figures.png(figures.confusion(np.eye(2), ["猫", "$x^"]))


def test_without_matplotlib_there_is_a_sentence(monkeypatch):
    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"pip install 'torchcaps\[figures\]'"):
        figures.curves(rows(1))
