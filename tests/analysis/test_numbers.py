"""The numbers of figures, taken from a network that tells what was done to it."""

import json
import math

import numpy as np
import pytest
import torch

from torchcaps.analysis.alignment import alignment, cosines
from torchcaps.analysis.perturb import perturbations
from torchcaps.analysis.robustness import robustness
from torchcaps.analysis.sample import chosen_image, take
from torchcaps.analysis.segments import segments
from torchcaps.analysis.settings import names_of
from torchcaps.analysis.trajectory import trajectory
from torchcaps.analysis.variance import variance
from torchcaps.pictures import packed, unpacked

ONE = {"image": None, "digit": None}
MANY = {"images": 20, "recognised": 3, "mistaken": 2, "neither": 1}


def rows(*lengths):
    """An image whose class k has a pose of this length, in 255ths, in its first dimension."""
    image = torch.zeros(4, 4)
    image[:, 0] = torch.tensor(lengths)
    return image.tolist()


def plain(numbers):
    return json.loads(json.dumps(numbers, allow_nan=False))


def test_a_perturbation_moves_the_pixel_of_its_dimension(made):
    run = made([rows(51, 102, 0, 0), rows(102, 0, 0, 51)], [1, 3])
    (found,) = plain(perturbations([run], {**ONE, "dims": 4}))["runs"]
    assert (found["class"], found["image"], found["scale"], found["shown"]) == ("b", 0, 1.0, [0, 1, 2, 3])
    assert found["amounts"] == [-0.25, -0.2, -0.15, -0.1, -0.05, 0, 0.05, 0.1, 0.15, 0.2, 0.25]
    for dimension in range(4):
        for amount, text in zip(found["amounts"], found["pictures"][dimension], strict=True):
            expected = np.full((4, 4), 0.5)  # the other capsules are masked
            expected[1, 0] += 102 / 255
            expected[1, dimension] += amount
            seen = unpacked(text)[..., 0] / 255.0
            assert np.abs(seen - expected.clip(0, 1)).max() <= 0.5 / 255 + 1e-6
    assert found["effect"] == pytest.approx([0.25 / 16] * 4, abs=1e-6)


def test_chois_capsules_move_by_the_root_of_their_dimensions(made):
    run = made([rows(51, 102, 0, 0)], [1], made.network(longest=2.0))  # the root of 4
    (found,) = perturbations([run], {**ONE, "image": 0, "dims": 2})["runs"]
    assert found["scale"] == 2
    assert "√4" in found["scale_is"]
    assert found["amounts"] == pytest.approx([2 * 0.05 * k for k in range(-5, 6)], abs=1e-12)
    assert len(found["shown"]) == 2


def test_runs_on_the_same_data_are_bent_on_the_same_image(made):
    images = [rows(51, 102, 0, 0), rows(102, 0, 0, 51)]
    first, second = made(images, [0, 0]), made(images, [0, 1], made.network(longest=2.0), folder="runs/other")
    one, other = plain(perturbations([first, second], {**ONE, "dims": 1}))["runs"]
    assert [each["name"] for each in (one, other)] == ["made", "other"]
    assert [each["image"] for each in (one, other)] == [1, 1]  # the first that the first run recognises
    assert [each["class"] for each in (one, other)] == ["a", "b"]
    assert (one["scale"], other["scale"]) == (1, 2)


def test_without_a_decoder_there_is_a_sentence(made):
    run = made([rows(51, 102, 0, 0)], [1], made.network(decoder=False))
    with pytest.raises(ValueError, match="runs/made has no decoder to draw with"):
        perturbations([run], {**ONE, "dims": 4})
    run = made([rows(51, 102, 0, 0)], [1], reconstruction=0.0)
    with pytest.raises(ValueError, match="was not trained, as its recipe has reconstruction 0"):
        perturbations([run], {**ONE, "dims": 4})


def test_pairs_are_taken_apart_and_the_wrong_ones_marked(made):
    right, wrong = rows(200, 0, 180, 10), rows(30, 200, 0, 180)
    run = made([right, wrong, right], [[0, 2], [1, 0], [2, 0]])
    found = plain(segments([run], MANY))
    assert (found["images"], found["recognised"], found["overlap"]) == (3, 2, None)
    shown = [(each["image"], each["labels"], each["reconstructed"], each["mark"]) for each in found["columns"]]
    assert shown == [
        (0, [0, 2], [0, 2], ""),
        (2, [2, 0], [2, 0], ""),
        (1, [1, 0], [1, 0], ""),
        (1, [1, 0], [1, 3], "P"),
        (2, [2, 0], [2, 3], "*"),
    ]
    first, second = (unpacked(text)[..., 0] / 255.0 for text in found["columns"][0]["ours"])
    assert first[0, 0] == 1
    assert first[2, 0] == pytest.approx(0.5, abs=0.01)  # each picture has one capsule alone
    assert second[2, 0] == 1
    with pytest.raises(ValueError, match="whose images do not show two digits each"):
        segments([made([right], [0])], MANY)


def test_a_row_that_leaves_the_image_moves_its_pose_on_one_line(made):
    """Poses are pixels, so that of a row that has gone up or down is 0 from then on."""
    run = made([rows(0, 0, 200, 0), rows(0, 200, 0, 0)] * 3, [2, 1] * 3)
    found = plain(alignment([run], {"images": 20}))
    assert found["ways"] == ["Rot+", "Rot-", "x+", "x-", "y+", "y-"]
    assert found["dim"] == 4
    assert set(found["random"]) == {"4", "32"}
    assert found["printed"]["random"] == {"mean": 0.311, "deviation": 0.262}
    assert found["random"]["32"]["mean"] == pytest.approx(0.463, abs=0.0015)
    assert found["ratios"]["y+"][1] == pytest.approx(1)  # the row of b goes dark at once, and stays so
    assert found["ratios"]["y+"][0] is None  # no image shows a
    assert found["all"]["y+"] == pytest.approx(1)
    opposite = plain(cosines([run], {"images": 20}))
    assert opposite["counts"]["y"] == [0] * 39 + [6]  # up or down, the pose goes to nothing
    assert opposite["shares"]["y"] == {"below": 0, "above": 1}


def test_variance_has_both_references(made):
    run = made([rows(0, 200, 0, 0)], [1])
    found = plain(variance([run], {"images": 5}))
    assert [found["ways"][way]["transformations"] for way in ("x", "y", "rotation")] == [11, 11, 51]
    assert found["ways"]["y"]["ours"]["first"] == pytest.approx(100)
    assert found["ways"]["x"]["ours"]["cumulated"][-1] == pytest.approx(100)
    assert found["printed"]["random"] == {"x": 25.57, "y": 25.54, "rotation": 13.49}
    with pytest.raises(ValueError, match="do not move at all"):
        variance([made([rows(0, 0, 0, 0)], [1])], {"images": 5})


def test_a_turn_by_nothing_is_the_image(made):
    run = made([rows(0, 200, 0, 0)], [1])
    found = plain(trajectory([run], {**ONE, "degrees": 90, "step": 30}))
    assert found["angles"] == [-90, -60, -30, 0, 30, 60, 90]
    assert found["length"][3] == pytest.approx(200 / 255, abs=1e-6)
    assert found["class"] == "b"
    assert sum(found["shares"]) <= 1 + 1e-9
    assert [each["angle"] for each in found["pictures"]][::8] == [-90, 90]
    middle = next(each["picture"] for each in found["pictures"] if each["angle"] == 0)
    assert unpacked(middle)[..., 0].tolist() == [[int(x) for x in row] for row in rows(0, 200, 0, 0)]
    with pytest.raises(ValueError, match="degrees=90 is no multiple of step=40"):
        trajectory([run], {**ONE, "degrees": 90, "step": 40})


def test_robustness_starts_at_the_accuracy(made):
    images = [rows(0, 200, 0, 0), rows(200, 0, 0, 0), rows(0, 0, 0, 200), rows(0, 0, 200, 0)]
    run, other = made(images, [1, 0, 3, 1]), made(images, [1, 0, 3, 1], folder="runs/other")
    found = plain(robustness([run, other], {"images": 10}))
    assert [line["name"] for line in found["lines"]] == ["made", "other"]
    for line in found["lines"]:
        assert line["images"] == 4
        assert line["accuracy"]["rotation"][0] == 0.75
        assert line["accuracy"]["scale"][found["levels"]["scale"].index(1)] == 0.75
        assert {way: len(values) for way, values in line["accuracy"].items()} == {
            way: len(levels) for way, levels in found["levels"].items()
        }
    other.recipe = other.recipe.__class__(model="capsnet", data="elsewhere")
    with pytest.raises(ValueError, match="needs runs on the same data"):
        robustness([run, other], {"images": 10})


def test_robustness_does_not_tell_how_many_labels_there_are(made):
    """Where images have one label or two, a class is named from 0.5 on, as in a test; 102 / 255 is too short."""
    images = [rows(200, 200, 0, 0), rows(200, 102, 0, 0), rows(200, 102, 0, 0)]
    found = robustness([made(images, [[0, 1], [0, 1], [0, -1]])], {"images": 10})
    assert found["lines"][0]["accuracy"]["noise"][0] == pytest.approx(2 / 3)
    found = robustness([made(images, [[0, 1]] * 3)], {"images": 10})
    assert found["lines"][0]["accuracy"]["noise"][0] == 1


def test_runs_have_names_that_tell_them_apart(made):
    both = [made([rows(9, 0, 0, 0)], [0], folder=folder) for folder in ("a/seed-0", "b/seed-0")]
    assert names_of(both) == ["a/seed-0", "b/seed-0"]
    assert names_of(both[:1]) == ["capsnet"]
    assert names_of(both[:1] * 2) == ["seed-0, 1", "seed-0, 2"]


def test_images_are_chosen_by_place_or_class(made):
    images = [rows(10, 200, 0, 0), rows(200, 10, 0, 0), rows(10, 200, 0, 0)]
    run = made(images, [0, 0, 1])
    assert chosen_image(run, ONE).indices.tolist() == [1]  # the first that is recognised
    assert chosen_image(run, {**ONE, "digit": "b"}).indices.tolist() == [2]
    assert chosen_image(run, {**ONE, "image": 0}).indices.tolist() == [0]
    assert take(run, 2).indices.tolist() == sorted(take(run, 2).indices.tolist())
    for options, sentence in (
        ({"digit": "z"}, "knows no class 'z'; it has a, b, c, d"),
        ({"digit": "d"}, "none of 3 test images shows d"),
        ({"image": 3}, "the test set has images 0 to 2, and no 3"),
        ({"image": "two"}, "image is a whole number from 0, got 'two'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            chosen_image(run, {**ONE, **options})


def test_packed_pictures_come_back():
    generator = np.random.default_rng(0)
    grey, colour = generator.integers(0, 256, (5, 7), np.uint8), generator.integers(0, 256, (4, 6, 3), np.uint8)
    assert (unpacked(packed(colour)) == colour).all()
    assert (unpacked(packed(grey)) == grey[..., None]).all()
    import base64
    import io

    from PIL import Image

    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(packed(colour))))) == colour).all()
    with pytest.raises(ValueError, match=r"bytes \[h, w\]"):
        packed(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="not as torchcaps writes them"):
        unpacked("abcd")
    assert math.isclose(float(torch.tensor(grey).double().mean()), float(unpacked(packed(grey)).mean()))
