"""What the page is told, against the network asked directly."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchcaps.analysis.trajectory import principal
from torchcaps.demo.paint import GREEN, RED
from torchcaps.demo.reader import Reader
from torchcaps.demo.request import check, model_of
from torchcaps.demo.shelf import Shelf, as_reader, open_shipped
from torchcaps.models import create_model
from torchcaps.models.pretrained import find_shipped, shipped
from torchcaps.runs import open_run

Image = pytest.importorskip("PIL.Image")
NETWORK = "efficient_capsnet_mnist"
OF_PAIRS = "efficient_capsnet_multimnist"


@pytest.fixture(scope="module")
def reader():
    return open_shipped(NETWORK)


def reader_of(model, image, data="mnist", name="network"):
    def nowhere():
        raise ValueError("not fetched")

    classes = tuple(map(str, range(10)))
    return Reader(name, create_model(model, image=image).eval(), classes, image, (), data, nowhere)


def pixels(url):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))).astype(int)


def sample(index):
    return {"kind": "sample", "index": index}


def test_the_samples_are_six_of_each_class_and_are_read(reader, digits):
    images, labels = reader.samples
    assert images.shape == (60, 1, 28, 28)
    assert torch.equal(images[:, 0], digits[0])
    assert labels == [digit for digit in range(10) for _ in range(6)]
    best = reader.ask(images / 255).probabilities.argmax(1).tolist()
    assert sum(a == b for a, b in zip(best, labels, strict=True)) >= 59


def test_an_answer_is_what_the_network_says(reader, digits):
    answer = reader.answer({"source": sample(20)})
    with torch.no_grad():
        output = reader.model(digits[0][20][None, None] / 255)
    lengths = output.capsules.poses[0].double().norm(dim=-1)
    assert answer["lengths"] == pytest.approx(lengths.tolist(), abs=1e-4)
    assert answer["found"] == [3]
    assert answer["capsule"] == 3
    assert answer["pose"] == pytest.approx(output.capsules.poses[0, 3].tolist(), abs=1e-5)
    assert (pixels(answer["input"]) == digits[0][20].numpy()).all()
    drawn = (255 * output.reconstruction[0, 0, 0]).round().numpy()
    assert abs(pixels(answer["reconstruction"]) - drawn).max() <= 1
    assert (pixels(answer["bent"]) == pixels(answer["reconstruction"])).all()
    assert pixels(answer["coupling"]).shape == (28, 28, 3)


@pytest.mark.parametrize("capsule", [None, 8])
def test_bending_adds_a_quarter_to_one_dimension(reader, digits, capsule):
    bend = [0.0] * 16
    bend[4], bend[9] = 1.0, -0.5
    answer = reader.answer({"source": sample(20), "bend": bend, "capsule": capsule})
    chosen = 3 if capsule is None else capsule
    with torch.no_grad():
        masked = torch.zeros(1, 10, 16)
        masked[0, chosen] = reader.model(digits[0][20][None, None] / 255).capsules.poses[0, chosen]
        masked[0, chosen, 4] += 0.25
        masked[0, chosen, 9] -= 0.125
        drawn = (255 * reader.model.decoder(masked)[0, 0]).round().numpy()
    assert abs(pixels(answer["bent"]) - drawn).max() <= 1
    assert abs(pixels(answer["bent"]) - pixels(answer["reconstruction"])).max() > 10


def test_sliders_beyond_their_ends_are_held_and_too_many_left_out(reader):
    pose = torch.zeros(16)
    bend = check({"bend": [9.0, -9.0, *[0.5] * 40]}, 10).bend
    assert reader.offsets(bend, pose).tolist() == [0.25, -0.25, *[0.125] * 14]
    assert reader.offsets((), pose).tolist() == [0.0] * 16
    wide = reader_of(NETWORK, (1, 28, 28))
    wide.model.head.longest = 4.0
    assert wide.offsets((1.0,), pose)[0] == 1.0


def test_turning_and_shifting_by_whole_pixels_is_exact(reader, digits):
    shifted = reader.answer({"source": sample(7), "right": 3, "down": -2})
    expected = np.zeros((28, 28), int)
    expected[:-2, 3:] = digits[0][7].numpy()[2:, :-3]
    assert abs(pixels(shifted["input"]) - expected).max() <= 1
    turned = reader.answer({"source": sample(7), "turn": 90})
    assert abs(pixels(turned["input"]) - np.rot90(digits[0][7].numpy())).max() <= 1


def test_a_path_starts_where_the_pose_is(reader):
    answer = reader.answer({"source": sample(30)})
    path = reader.path({"source": sample(30), "capsule": 5})
    mean, axes = torch.tensor(path["mean"]), torch.tensor(path["axes"])
    here = (torch.tensor(answer["pose"]) - mean) @ axes
    assert [way["name"] for way in path["ways"]] == ["turn", "right", "down"]
    for way in path["ways"]:
        assert way["points"][way["steps"].index(0)] == pytest.approx(here.tolist(), abs=1e-4)
    way = path["ways"][0]
    turned = reader.answer({"source": sample(30), "turn": way["steps"][2], "capsule": 5})
    there = (torch.tensor(turned["pose"]) - mean) @ axes
    assert way["points"][2] == pytest.approx(there.tolist(), abs=1e-4)
    assert 0 < path["shares"][1] <= path["shares"][0] <= 1


def test_a_pose_that_does_not_move_has_a_path_of_one_place():
    still = reader_of(NETWORK, (1, 28, 28))
    for weight in still.model.requires_grad_(False).parameters():
        weight.zero_()
    path = still.path({"source": sample(30), "capsule": 5})
    assert path["shares"] == [0, 0]
    assert {tuple(point) for way in path["ways"] for point in way["points"]} == {(0, 0)}


def test_principal_components_of_known_points():
    direction = torch.tensor([3.0, 4.0, 0.0]) / 5
    line = torch.arange(7.0)[:, None] * direction + torch.tensor([1.0, 2.0, 3.0])
    mean, axes, shares = principal(line)
    assert mean.tolist() == pytest.approx((3 * direction + torch.tensor([1.0, 2.0, 3.0])).tolist())
    assert shares.tolist() == pytest.approx([1, 0], abs=1e-6)
    assert abs(float(axes[:, 0] @ direction.double())) == pytest.approx(1)
    angle = torch.arange(12) * (2 * torch.pi / 12)
    ellipse = torch.stack([2 * angle.cos(), torch.zeros(12), angle.sin()], 1)
    assert principal(ellipse)[2].tolist() == pytest.approx([0.8, 0.2], abs=1e-6)


def test_a_second_object_must_be_long_enough(reader):
    lengths = torch.tensor([0.1, 0.6, 0.9, 0.49])
    assert reader.found(lengths, 1) == [2]
    assert reader.found(lengths, 2) == [2, 1]
    assert reader.found(lengths, 4) == [2, 1]
    assert reader.found(torch.tensor([0.1, 0.2]), 2) == [1]


def test_an_overlay_lays_both_apart(reader, digits):
    picture, several = reader.picture({"kind": "overlay", "first": 6, "second": 50, "apart": 8})
    first, second = (digits[0][n].float() / 255 for n in (6, 50))
    expected = torch.zeros(28, 28)
    expected[:, :-4] = first[:, 4:]
    expected[:, 4:] = torch.maximum(expected[:, 4:], second[:, :-4])
    assert several
    assert torch.allclose(picture[0], expected, atol=1e-5)


@pytest.mark.parametrize("pair", [(12, 24), (24, 12), (20, 47), (35, 0)])
def test_both_of_an_overlay_are_found_in_the_order_they_were_chosen(pair):
    reader = open_shipped(OF_PAIRS)
    source = {"kind": "overlay", "first": pair[0], "second": pair[1], "apart": 6}
    answer = reader.answer({"source": source})
    assert answer["found"] == [n // 6 for n in pair]
    assert answer["capsule"] == max(range(10), key=lambda k: answer["lengths"][k])
    output = reader.ask(reader.picture(source)[0][None])
    with torch.no_grad():
        first, second = (reader.model.reconstruct(output.capsules, None, torch.tensor([[n // 6]])) for n in pair)
    coloured = first[0, 0, 0, ..., None] * torch.tensor(RED) + second[0, 0, 0, ..., None] * torch.tensor(GREEN)
    assert abs(pixels(answer["reconstruction"]) - coloured.clamp(0, 255).numpy()).max() < 0.51


def test_fields_of_other_sizes_hold_the_same_digits(digits):
    wide = reader_of("efficient_capsnet_multimnist", (1, 36, 36), "multimnist")
    images = wide.samples[0]
    assert torch.equal(images[:, 0, 4:32, 4:32], digits[0])
    assert images.sum() == digits[0].sum()
    answer = wide.answer({"source": {"kind": "overlay", "first": 0, "second": 59, "apart": 8}})
    assert pixels(answer["input"]).shape == (36, 36)
    assert wide.about()["objects"] == 2


def test_what_a_network_lacks_is_said(plain):
    about = as_reader(open_run(plain, device="cpu"), "mine").about()
    assert about["note"] == "mine has no decoder to draw with; a preset built with decoder=True has one."
    assert about["dim"] == 16
    cnn = reader_of("li_cnn6_cifar10", (3, 32, 32), "cifar10", "cnn")
    assert cnn.about()["note"] == (
        "cnn has no capsules, so there is no pose to bend and no coupling to show. "
        "The test set of cifar10 is not on this computer; torchcaps data get cifar10 fetches it."
    )
    file = io.BytesIO()
    Image.new("RGB", (50, 40), (200, 30, 30)).save(file, "PNG")
    upload = {"kind": "upload", "picture": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}
    answer = cnn.answer({"source": upload, "bend": [1.0]})
    assert answer["pose"] is answer["bent"] is answer["coupling"] is None
    assert pixels(answer["input"])[5, 5].tolist() == [200, 30, 30]
    assert len(answer["lengths"]) == 10
    foreign = reader_of("efficient_capsnet_mnist", (1, 28, 28), "fashion_mnist")
    assert foreign.about()["note"] == (
        "The test set of fashion_mnist is not on this computer; torchcaps data get fashion_mnist fetches it."
    )
    with pytest.raises(ValueError, match="there is no test image 0 to choose; there is none"):
        foreign.answer({"source": sample(0)})


def test_a_decoder_that_was_not_trained_draws_nothing(reader):
    run = open_run(NETWORK, device="cpu")
    untrained = as_reader(replace(run, recipe=replace(run.recipe, reconstruction=0.0)), "mine")
    about = untrained.about()
    assert about["note"] == (
        "The decoder of mine was not trained, as its recipe has reconstruction 0; --reconstruction sets it."
    )
    assert about["decoder"] is False
    answer = untrained.answer({"source": sample(20)})
    assert answer["reconstruction"] is answer["bent"] is None
    assert answer["pose"] == reader.answer({"source": sample(20)})["pose"]
    assert as_reader(run, "mine").about()["note"] == ""


def test_what_is_shorter_than_the_threshold_is_none_of_these(reader):
    assert reader.threshold == find_shipped(NETWORK).about["threshold"] > 0.5
    longest = max(reader.answer({"source": sample(20)})["lengths"])
    for threshold, none in ((None, False), (0.0, False), (longest - 1e-3, False), (longest + 1e-3, True)):
        answer = replace(reader, threshold=threshold).answer({"source": sample(20)})
        assert answer["none"] is none
        assert answer["found"] == [3]


def test_wrong_requests_get_sentences(reader):
    for source in ({}, None, {"kind": "telepathy"}):
        with pytest.raises(ValueError, match="there is no picture yet"):
            reader.answer({"source": source})
    for index in (-1, 60, None, "3", True, 1.0):
        with pytest.raises(ValueError, match=r"there is no test image .* to choose; there are 60, counted from 0"):
            reader.answer({"source": sample(index)})
    still = {"source": sample(0)}
    for request, sentence in (
        ([], r"a request has names with values, got \[\]"),
        ({"source": [1]}, r"the source of a picture has names with values, got \[1\]"),
        ({**still, "capsule": 99}, "there is no capsule 99 to choose; there are 10, counted from 0"),
        ({**still, "capsule": True}, "there is no capsule True to choose"),
        ({**still, "capsule": "3"}, "there is no capsule '3' to choose"),
        ({**still, "bend": ["x"]}, "a slider is a number, got 'x'"),
        ({**still, "bend": [float("nan")]}, "a slider is a number, got nan"),
        ({**still, "bend": {"x": 1}}, "bend is a list of numbers from -1 to 1, got {'x': 1}"),
        ({**still, "bend": "1" * 99}, r"bend is a list of numbers from -1 to 1, got '1{36}\.\.\.$"),
        ({**still, "turn": "far"}, "turn is a number from -360 to 360, got 'far'"),
        ({**still, "turn": 361}, "turn is a number from -360 to 360, got 361"),
        ({**still, "right": float("inf")}, "right is a number from -100 to 100, got inf"),
        ({**still, "down": [1]}, r"down is a number from -100 to 100, got \[1\]"),
        ({"source": {"kind": "overlay", "first": 0, "second": 1, "apart": "x"}}, "apart is a number from -100 to 100"),
        ({"source": {"kind": "overlay", "first": 0}}, "there is no test image None to choose"),
        ({"source": {"kind": "drawing", "picture": [0]}}, "this is no picture"),
    ):
        for asked in (reader.answer, reader.path):
            with pytest.raises(ValueError, match=sentence):
                asked(request if request == [] else {"capsule": 1, **request})
    with pytest.raises(ValueError, match="a path is that of one capsule; choose which"):
        reader.path(still)
    with pytest.raises(ValueError, match="network has no capsules, so no pose goes anywhere"):
        reader_of("li_cnn6_cifar10", (1, 32, 32)).path({**still, "capsule": 1})


def test_a_network_goes_by_its_name():
    assert model_of({"model": "mine"}) == "mine"
    assert model_of({}) is None
    for wrong in ({"model": ["mine"]}, {"model": 3}):
        with pytest.raises(ValueError, match="a network goes by its name, got"):
            model_of(wrong)
    with pytest.raises(ValueError, match="a request has names with values, got 'mine'"):
        model_of("mine")


def test_a_shelf_has_runs_first_and_shipped_weights_after(plain):
    shelf = Shelf([plain, plain])
    assert shelf.names[:2] == ["no-decoder", "no-decoder (2)"]
    assert NETWORK in shelf.names
    assert shelf[NETWORK].name == NETWORK
    assert shelf[NETWORK] is shelf[NETWORK]
    with pytest.raises(ValueError, match="there is no network 'other' here; there are no-decoder, "):
        shelf["other"]


def test_networks_that_read_digits_come_first():
    names = Shelf().names
    assert names[0] == NETWORK
    assert sorted(names) == shipped()
    other = next(name for name in shipped() if name != NETWORK)
    assert sorted(Shelf([other]).names) == shipped()  # one that is named comes first, and once
    assert Shelf([other]).names[0] == other
