"""Drawings of routing and training from numbers as JSON gives them back."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from torchcaps.figures import compare, coupling, operations, training
from torchcaps.figures.kind import Kind, resolve
from torchcaps.figures.kinds_routing import KINDS
from torchcaps.figures.routing import draw_agreement, draw_changes
from torchcaps.figures.style import WIDTH, png
from torchcaps.pictures import packed

BLANK = packed(np.zeros((6, 6, 3), np.uint8))


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)


def spot(y, x):
    heat = np.zeros((6, 6))
    heat[y, x] = 1.0
    return heat.tolist()


def node(layer, share, children=(), site=(1, 2)):
    values = {"layer": layer, "type": 3, "site": site, "share": share, "coupling": share, "mass": share}
    return {**values, "box": [0, 0, 3, 3], "heat": BLANK, "children": list(children)}


COUPLING = {
    "model": "m",
    "data": "d",
    "number": 7,
    "picture": BLANK,
    "size": [6, 6],
    "labels": ["4"],
    "predicted": ["4"],
    "frames": ["iteration 1", "iteration 2", "iteration 3"],
    "layers": [],
    "classes": [
        {"name": name, "probability": 0.5, "label": name == "4", "heat": [spot(0, k), spot(1, k), spot(2, k)]}
        for k, name in enumerate("49")
    ],
    "trees": [
        {"name": "4", **node(2, 1.0, [node(1, 0.7, [node(0, 1.0)]), node(1, 0.3, [node(0, 0.5), node(0, 0.4)])], None)}
    ],
}
CHANGES = {
    "model": "m",
    "data": "mnist",
    "images": 8,
    "paper": {"2": 0.007},
    "layers": [
        {
            "name": "body.a",
            "place": [1, 2],
            "routing": "Dynamic",
            "epochs": [1, 2],
            "changes": [[0.4, 0.1], [0.2, None]],
            "further": [0.2, 0.1, 0.05],
        }
    ],
}
PANEL = {"epoch": 1, "cosine": [0.25, 0.75], "cosine_lengths": [None, 2.0], "lengths": [0.0, 1.0, 0.0]}
END = {"dissimilar": 0.25, "similar_length": 2.0, "paper_dissimilar": 0.2}
BLUNT = {"similar_length": None, "paper_dissimilar": None}
AGREEMENT = {
    "cosine_edges": [-1, 0, 1],
    "length_edges": [0.1, 1, 10, 100],
    "runs": [
        {"name": "r", "layer": "a", "place": [1, 2], "routing": "EM", "panels": [PANEL, PANEL], **END},
        {"name": "s", "layer": "b", "place": [2, 2], "routing": "EM", "panels": [PANEL], **END, **BLUNT},
    ],
}
LOSSES = {
    "data": "digits",
    "batch": None,
    "series": [{"name": "a", "iterations": n, "steps": [1, 2], "epochs": [1, 2], "loss": [0.5, None]} for n in (1, 3)],
}
FEEDBACK = {
    "series": [{"network": "n", "feedback": kind, "epochs": [1, 2], "loss": [1.0, 0.01]} for kind in (None, "ot")],
    "gains": [{"network": "n", "feedback": "ot", "without": 0.0582, "with": 0.0458, "gain": 0.213}],
    "paper": {"EncapNet": 0.21},
}
POINTS = [
    {"iterations": n, "accuracy": 0.5 + n / 10, "spread": s, "memory": n * 2**20, "milliseconds": n}
    for n, s in ((1, None), (2, 0.1))
]
ITERATIONS = {
    "batch": 8,
    "device": "cpu",
    "lines": [{"name": "a", "trained": t, "own": 2, "points": POINTS} for t in (True, False)],
}
SERIES = {
    "name": "a",
    "epochs": [1, 2],
    "accuracy": [None, 0.9],
    "test": None,
    "paper": "",
    "parameters": 1234,
    "memory": 2**21,
    "milliseconds": 0.5,
}
CONVERGENCE = {"batch": 8, "device": "cpu", "series": [SERIES, {**SERIES, "test": 0.95}]}
ROW = {
    "method": "m",
    "parameters": 10,
    "decoder": 5,
    "decoder_in_paper": True,
    "operations": 10**9,
    "paper_parameters": 16,
    "paper_operations": 9e8,
    "gain": 0.0,
    "paper_gain": 0.5,
}
RUN = {
    "name": "a",
    "model": "a",
    "parameters": 5,
    "operations": 10,
    "epochs": [1],
    "loss": [1.0],
    "validation_error": [None],
    "test_error": 0.1,
    "standard_error": None,
    "seconds": None,
}
CASE = {"number": 3, "picture": BLANK, "labels": ["4"], "first": ["4"], "second": ["9"]}
SIDES = {
    "runs": [RUN, {**RUN, "test_error": None}],
    "differences": [{"setting": f"model_args.s{k}", "first": "1", "second": ""} for k in range(15)],
    "test": {
        "images": 9,
        "both": 5,
        "neither": 1,
        "only_first": 2,
        "only_second": 1,
        "p_value": 1.0,
        "cases": {"only_first": [CASE, CASE], "only_second": []},
    },
}
DRAWN = {
    "coupling": COUPLING,
    "logit-changes": CHANGES,
    "agreement": AGREEMENT,
    "losses": LOSSES,
    "feedback": FEEDBACK,
    "iterations": ITERATIONS,
    "convergence": CONVERGENCE,
    "operations": {"rows": [ROW, ROW]},
    "side-by-side": SIDES,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dark", [False, True])
def test_every_kind_is_drawn_from_its_json(kind: Kind, dark):
    assert callable(resolve(kind.numbers))
    numbers = json.loads(json.dumps(DRAWN[kind.name], allow_nan=False))
    content = png(resolve(kind.draw)(numbers, dark=dark))
    assert Image.open(io.BytesIO(content)).size[0] == 156
    assert content == png(resolve(kind.draw)(numbers, dark=dark))


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_heat_is_where_it_should_be():
    lit = coupling._overlaid(np.zeros((6, 12, 3), np.uint8), spot(2, 5))
    assert lit.shape == (6, 12, 3)
    assert [tuple(place) for place in np.argwhere(lit.any(axis=2))] == [(2, 5), (2, 11)]  # both views of a pair


def test_the_tree_has_every_node():
    figure = coupling.draw(COUPLING)
    (axes,) = figure.axes
    assert len(axes.images) == 1 + 2 + 3 + 6  # the input, classes, iterations, nodes
    widths = [patch.get_linewidth() for patch in axes.patches if patch.get_zorder() == 0]
    assert sorted(round(width, 3) for width in widths) == sorted(
        round(0.4 + 5 * share, 3) for share in (1.0, 0.3 / 0.7, 1.0, 0.5, 0.4)
    )
    assert {"4  0.50", "9  0.50", "70 %", "30 %", "type 3\n1, 2"} <= set(texts(figure))


def test_the_animation_goes_from_the_first_to_the_last_iteration():
    moving = Image.open(io.BytesIO(coupling.animate(COUPLING)))
    assert moving.format == "GIF"
    assert moving.n_frames >= 10
    assert moving.info["loop"] == 0
    steps = list(coupling._steps_between(COUPLING["frames"]))
    assert steps[0][1].tolist() == [1, 0, 0]
    assert steps[-1][1].tolist() == [0, 0, 1]
    assert all(np.isclose(weights.sum(), 1) for _, weights in steps)


def test_changes_by_epoch_and_by_iteration():
    figure = draw_changes(CHANGES)
    left, right = figure.axes
    assert left.get_title(loc="left") == "Layer 1 of 2, Dynamic"
    lines = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert lines["the end, 3 iterations"] == [0.2, 0.1, 0.05]
    assert "|v · u|" in figure.get_supxlabel()
    assert "does not say" in figure.get_supxlabel()
    other = {**CHANGES, "layers": [{**CHANGES["layers"][0], "routing": "EM"}]}
    assert not draw_changes(other).get_supxlabel()
    first, second = left.lines
    assert first.get_ydata().tolist() == [0.4, 0.2]
    assert np.isnan(second.get_ydata()[1])
    assert right.get_yscale() == "log"
    assert list(right.lines[-1].get_ydata()) == [0.007]


def test_agreement_draws_shares_and_lengths():
    figure = draw_agreement(AGREEMENT)
    lines = [line for axes in figure.axes for line in axes.lines]
    assert len(lines) == 3
    assert lines[0].get_xdata().tolist() == [-0.5, 0.5]
    stairs = [patch.get_data().values.tolist() for axes in figure.axes for patch in axes.patches]
    assert stairs.count([25.0, 75.0]) == 3
    assert stairs.count([100.0]) == 3
    above, below = figure.subfigs
    assert (above.get_suptitle(), below.get_suptitle()) == ("r: layer 1 of 2, EM", "s: class capsules, EM")
    ours = "At the end 25 % of the votes have a cosine below 0"
    found = f"{ours} (the paper finds 20 % dissimilar);\nthose above 0 are 2 long on average."
    assert above.get_supxlabel() == found
    assert below.get_supxlabel() == f"{ours};\nnone is above 0."


def test_iterations_and_costs():
    figure = training.draw_iterations(ITERATIONS)
    accuracy, memory, time = figure.axes
    assert accuracy.lines[0].get_ydata().tolist() == [60.0, 70.0]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["a", "a (trained with 2)"]
    assert memory.lines[0].get_ydata().tolist() == time.lines[0].get_ydata().tolist() == [1, 2]


def test_feedback_says_the_gain():
    (axes,) = training.draw_feedback(FEEDBACK).axes
    assert "error 5.82 to 4.58 %, 21 % of it gone" in axes.get_xlabel()


def test_tables_have_the_numbers():
    assert {"1,234", "95.00", "2 MiB", "0.50 ms"} <= set(texts(training.draw_convergence(CONVERGENCE)))
    shown = texts(operations.draw({"rows": [ROW]}))
    assert {"15", "1.000 G", "0.900 G", "50.0 %"} <= set(shown)
    assert "AR-CapsNet and EM" in operations.draw({"rows": [ROW]}).texts[0].get_text()
    shown = texts(compare.draw(SIDES))
    assert {"10.00 %", "not tested", "and 3 more settings", "4, not 9"} <= set(shown)
    shown = [" ".join(text.split()) for text in shown]
    assert any("the first alone 2" in text and "by chance in 100 % of cases (McNemar" in text for text in shown)
    rare = {**SIDES, "test": {**SIDES["test"], "p_value": 1e-9}}
    assert any("in fewer than 0.001 % of cases" in text for text in texts(compare.draw(rare)))
    few = {**SIDES, "test": {**SIDES["test"], "p_value": 0.0042}}
    assert any("in 0.4 % of cases" in text for text in texts(compare.draw(few)))


def sticking_out(figure):
    """Texts that are cut off at an edge of the paper."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text, text.get_window_extent(renderer)) for axes in figure.axes for text in axes.texts]
    return [text.get_text() for text, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.width]


def test_sentences_end_on_the_paper():
    counts = {"images": 100_000, "both": 98_765, "neither": 12_345, "only_first": 12_345, "only_second": 12_345}
    for p_value in (1e-9, 0.0042):
        assert not sticking_out(compare.draw({**SIDES, "test": {**SIDES["test"], **counts, "p_value": p_value}}))


@pytest.mark.parametrize("labels", [["4"], ["7", "5"], ["ankle boot", "trouser"]])
def test_the_number_of_a_test_image_is_whole(labels):
    figure = coupling.draw({**COUPLING, "labels": labels, "number": 9_876_543})
    assert any("test image 9,876,543" in text for text in texts(figure))
    assert not sticking_out(figure)
    width = (WIDTH - 2 * coupling.EDGE - 4 * coupling.GAP) / 5 * figure.dpi
    caption = next(text for text in figure.axes[0].texts if text.get_position()[1] > 1.2)
    assert caption.get_window_extent().width <= width


def test_epochs_are_whole_numbers():
    for figure in (training.draw_convergence(CONVERGENCE), training.draw_feedback(FEEDBACK)):
        axes = figure.axes[0]
        axes.set_xlim(0.9, 2.1)
        assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_highest_markers_are_whole():
    """Also where all values are nearly the same, so that a margin by their range is none."""
    points = [{**point, "memory": 2**24 + k, "milliseconds": 3.0} for k, point in enumerate(POINTS)]
    lines = [{**line, "points": points} for line in ITERATIONS["lines"]]
    _, memory, time = training.draw_iterations({**ITERATIONS, "lines": lines}).axes
    for axes, top in ((memory, 16), (time, 3)):
        low, high = axes.get_ylim()
        assert low == 0
        assert high >= 1.05 * top


def test_losses_are_named_by_iterations():
    (axes,) = training.draw_losses(LOSSES).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a, iterations 1", "a, iterations 3"]
