"""What is said of an image is exactly what the network says of its pixels, treated as the run's test images are."""

import io
import json
import statistics
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchcaps import recipes
from torchcaps.data import DataSet, Stored, protocols
from torchcaps.data.errors import DataError
from torchcaps.evaluate import Predictions
from torchcaps.models.heads import ActivationHead, LengthHead, LogitHead
from torchcaps.models.network import Network
from torchcaps.models.registry import create_model
from torchcaps.predictor import Named, Predictor, choose_threshold, raw_image, steps_of
from torchcaps.recipes import Recipe, find
from torchcaps.runs import Opened
from torchcaps.train import checkpoint

Image = pytest.importorskip("PIL.Image")

NAMES = ("red", "green", "blue")
RAW = {  # the images of each data set that a protocol crops
    "mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "svhn": (3, 32, 32),
    "smallnorb": (2, 96, 96),
}


class Channels(Network):
    """Scores are the mean of each channel, so that a class is a colour."""

    def __init__(self, image=(3, 8, 8), head=None, objects=1):
        super().__init__(image, image[0], head or LengthHead(), objects=objects)
        self.weight = nn.Parameter(torch.ones(()))

    def encode(self, images):
        return None, self.weight * images.mean(dim=(2, 3)), None


def opened(model=None, threshold=0.5, recipe=None, names=NAMES):
    model = model or Channels()
    recipe = recipe or Recipe(model="efficient_capsnet", data="folder")
    return Opened(Path("a-run"), recipe, 0, model.eval(), model.image, names, 1, threshold, torch.device("cpu"))


def colour(red, green, blue, height=8, width=8):
    return np.full((height, width, 3), (red, green, blue), dtype=np.uint8)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return str(path)


# the threshold


def by_loops(predictions, kept):
    """The highest of the right answers' probabilities that leaves at least the share `kept` of them, if not all."""
    sure = []
    for scores, probabilities, labels in zip(*(part.tolist() for part in predictions), strict=True):
        best = scores.index(max(scores))
        if best in (labels if isinstance(labels, list) else [labels]):
            sure.append(probabilities[best])
    if len(sure) < 2:
        return 0.0
    fine = max(t for t in sure if sum(value >= t for value in sure) >= kept * len(sure))
    if fine > min(sure):
        return fine
    deviation = statistics.stdev(sure) * (1 + 1 / len(sure)) ** 0.5
    return max(0.0, min(fine, statistics.mean(sure) - 3 * deviation))


@pytest.mark.parametrize("images", [1, 7, 99, 100, 101, 199, 200, 1000])
@pytest.mark.parametrize("kept", [0.99, 0.9, 0.5, 1.0])
@pytest.mark.parametrize("labels", [1, 2])
def test_the_threshold_keeps_so_many_of_what_was_right(images, kept, labels):
    drawn = torch.Generator().manual_seed(images)
    scores = torch.rand(images, 4, generator=drawn, dtype=torch.float64)
    wanted = torch.stack([torch.randperm(4, generator=drawn)[:labels] for _ in range(images)])
    predictions = Predictions(scores, scores.square(), wanted[:, 0] if labels == 1 else wanted)
    assert choose_threshold(predictions, kept) == pytest.approx(by_loops(predictions, kept), abs=1e-12)


def test_few_images_are_all_kept_with_room_below_and_wrong_ones_do_not_count():
    scores = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.2, 0.1], [0.1, 0.85]], dtype=torch.float64)
    right = torch.tensor([0, 0, 1, 1])
    room = 3 * 0.05 * (4 / 3) ** 0.5
    assert choose_threshold(Predictions(scores, scores, right)) == pytest.approx(0.85 - room, abs=1e-12)
    assert choose_threshold(Predictions(scores, scores, torch.tensor([0, 1, 1, 0]))) == 0.0
    assert choose_threshold(Predictions(scores, scores, torch.tensor([1, 1, 1, 0]))) == 0.0
    apart = torch.cat([torch.full((90, 1), 0.9), torch.tensor([[0.2]])]).double()
    both = torch.cat([apart, torch.zeros(91, 1)], dim=1)
    assert choose_threshold(Predictions(both, both, torch.zeros(91, dtype=torch.int64))) == pytest.approx(0.2)


def test_the_threshold_refuses_a_share_that_is_none():
    scores = torch.ones(1, 2)
    for kept in (0, 1.1, -1):
        with pytest.raises(ValueError, match="kept is the share"):
            choose_threshold(Predictions(scores, scores, torch.tensor([0])), kept)


# one image


def test_class_length_and_runner_up_are_the_networks_own():
    answer = Predictor(opened())(colour(51, 204, 102))
    assert answer.label == "green"
    assert answer.probability == pytest.approx(0.8, abs=1e-6)
    assert (answer.runner_up.label, answer.found[0].label) == ("blue", "green")
    assert answer.runner_up.probability == pytest.approx(0.4, abs=1e-6)
    assert [each.label for each in answer.ranked] == ["green", "blue", "red"]


def test_none_of_these_is_below_the_threshold_and_not_at_it():
    pixels = colour(51, 204, 102)
    at = Predictor(opened(), threshold=0.0)(pixels).probability
    assert Predictor(opened(threshold=at))(pixels).label == "green"
    answer = Predictor(opened(threshold=at + 1e-6))(pixels)
    assert (answer.label, answer.found) == (None, ())
    assert (answer.ranked[0].label, answer.runner_up.label) == ("green", "blue")
    assert Predictor(opened(threshold=None))(colour(1, 0, 0)).label == "red"
    assert Predictor(opened(threshold=0.9), threshold=0.1)(pixels).label == "green"


@pytest.mark.parametrize("threshold", [-0.1, 1.5])
def test_a_threshold_is_a_probability(threshold):
    with pytest.raises(ValueError, match="from 0 to 1"):
        Predictor(opened(), threshold=threshold)


def test_every_kind_of_image_is_the_same_image(tmp_path):
    predictor = Predictor(opened())
    pixels = colour(10, 200, 30)
    kinds = [
        pixels,
        torch.from_numpy(pixels),
        torch.from_numpy(pixels).permute(2, 0, 1),
        torch.from_numpy(pixels).permute(2, 0, 1) / 255,
        pixels.astype(np.float32) / 255,
        Image.fromarray(pixels),
        save(tmp_path / "a.png", pixels),
        tmp_path / "a.png",
        save(tmp_path / "large.png", colour(10, 200, 30, 300, 500)),
        save(tmp_path / "tiny.png", colour(10, 200, 30, 1, 1)),
        save(tmp_path / "wide.bmp", colour(10, 200, 30, 2, 90)),
        save(tmp_path / "alpha.png", np.dstack([pixels, np.full((8, 8), 255, np.uint8)])),
        save(tmp_path / "palette.gif", Image.fromarray(pixels).quantize(8)),
        np.dstack([pixels, np.full((8, 8), 255, np.uint8)]),
    ]
    answers = predictor(kinds)
    assert all(answer == answers[0] for answer in answers)
    assert predictor(np.stack([pixels] * 3)) == answers[:3]
    assert [predictor(kind) for kind in kinds] == answers


def test_transparency_is_laid_on_white_and_cmyk_and_exif_are_understood(tmp_path):
    predictor = Predictor(opened(threshold=0))
    clear = predictor(save(tmp_path / "clear.png", np.zeros((9, 9, 4), np.uint8)))
    assert clear.probability == 1
    cmyk = predictor(save(tmp_path / "c.jpg", Image.fromarray(colour(250, 10, 10)).convert("CMYK"), quality=95))
    assert cmyk.label == "red"
    assert cmyk.probability == pytest.approx(250 / 255, abs=0.03)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise: what lies below comes to the left
    halves = np.vstack([colour(250, 0, 0, 40, 40), colour(0, 0, 250, 40, 40)])
    turned = save(tmp_path / "t.jpg", Image.fromarray(halves), exif=exif.tobytes(), quality=95)
    left = predictor.pixels(turned)[:, :, :2].float().mean(dim=(1, 2))
    assert left[2] > 200 > 50 > left[0]


def test_colour_and_grey_meet_the_networks_channels(tmp_path):
    grey = Predictor(opened(Channels((1, 8, 8)), names=("ink",)))
    assert grey(colour(255, 255, 255)).probability == 1
    assert grey(colour(255, 0, 0)).probability == pytest.approx(76 / 255, abs=1e-6)  # the luma of red
    assert grey(np.full((20, 30), 51, np.uint8)).probability == pytest.approx(0.2, abs=1e-6)
    assert grey(np.full((20, 30, 1), 51, np.uint8)).runner_up is None
    deep = Image.fromarray((np.full((8, 8), 51 * 257)).astype(np.uint16))
    assert grey(save(tmp_path / "deep.png", deep)).probability == pytest.approx(0.2, abs=1e-6)
    wide = Predictor(opened())(np.full((20, 30), 51, np.uint8))
    assert [each.probability for each in wide.ranked] == pytest.approx([0.2] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((8, 8, 5), np.uint8), "with 1, 3 or 4 channels, got \\[8, 8, 5\\]"),
        (np.zeros(8, np.uint8), "an image is \\[h, w\\]"),
        (np.zeros((0, 8), np.uint8), "an image is"),
        (np.zeros((8, 8), np.int64), "bytes or floats from 0 to 1, got torch.int64"),
        (np.full((8, 8, 3), 1.5), "pixels from 0 to 1"),
        (np.full((8, 8, 3), np.nan), "pixels from 0 to 1"),
    ],
)
def test_arrays_that_are_no_images_are_refused(image, words):
    with pytest.raises(ValueError, match=words):
        Predictor(opened())(image)


def test_more_channels_than_a_file_has_are_taken_as_arrays_only(tmp_path):
    predictor = Predictor(opened(Channels((2, 8, 8)), names=("left", "right")))
    assert predictor(torch.full((2, 8, 8), 255, dtype=torch.uint8)).probability == 1
    with pytest.raises(ValueError, match="images of 2 channels, which files do not have; give arrays of 2 x 8 x 8"):
        predictor(save(tmp_path / "a.png", colour(1, 2, 3)))


def test_the_word_is_what_the_head_measures():
    words = [Predictor(opened(Channels(head=head))).word for head in (LengthHead(), ActivationHead(), LogitHead())]
    assert words == ["length", "activation", "probability"]


# several objects


def test_networks_for_several_objects_name_the_longest():
    recipe = Recipe(model="capsnet_multimnist", data="multimnist")
    answer = Predictor(opened(Channels(objects=2), 0.3, recipe))(colour(102, 204, 51))
    assert [each.label for each in answer.found] == ["green", "red"]
    assert answer.runner_up.label == "blue"
    assert Predictor(opened(Channels(objects=2), 0.9, recipe))(colour(102, 204, 51)).found == ()


@pytest.mark.parametrize("kind", ["folder", "several"])
def test_where_their_number_varies_only_those_from_a_half_on_are_named(kind):
    head = LogitHead(several=True) if kind == "several" else LengthHead()
    recipe = Recipe(model="capsnet", data="folder" if kind == "folder" else "diverse_multimnist")
    model = Channels(head=head, objects=2)
    if kind == "several":
        model.encode = lambda images: (None, (images.mean(dim=(2, 3)) - 0.5) * 10, None)
    predictor = Predictor(opened(model, 0.1, recipe))
    assert [each.label for each in predictor(colour(153, 204, 140)).found] == ["green", "red"]
    one = predictor(colour(120, 204, 140))
    assert ([each.label for each in one.found], one.runner_up.label) == (["green", "blue"], "red")
    alone = predictor(colour(120, 204, 100))
    assert ([each.label for each in alone.found], alone.runner_up.label) == (["green"], "red")


# files


def test_a_stream_names_what_it_can_and_says_why_it_cannot(tmp_path):
    files = [save(tmp_path / f"{k}.png", colour(0, 200, k)) for k in range(5)]
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    moving = tmp_path / "moving.gif"
    frames = [Image.fromarray(colour(k, 0, 0)) for k in (0, 100, 200)]
    frames[0].save(moving, save_all=True, append_images=frames[1:])
    predictor = Predictor(opened(), batch_size=2)
    order = [files[0], str(broken), *files[1:3], str(moving), str(tmp_path / "gone.png"), *files[3:]]
    found = dict(predictor.stream(order))
    assert list(found) == order
    assert [found[file] for file in files] == predictor(files)
    assert "cannot be read as an image" in str(found[str(broken)])
    assert "holds 3 frames" in str(found[str(moving)])
    assert str(found[str(tmp_path / "gone.png")]).endswith("gone.png is not there; it was passed over")
    assert list(predictor.stream([])) == []
    with pytest.raises(DataError):
        predictor(str(broken))


def test_a_stream_reads_a_batch_at_a_time(tmp_path):
    file = save(tmp_path / "a.png", colour(0, 200, 0))
    asked = []

    def endless():
        while True:
            asked.append(1)
            yield file

    stream = Predictor(opened(), batch_size=4).stream(endless())
    assert next(stream)[1].label == "green"
    assert len(asked) == 4
    stream.close()


def test_pictures_that_claim_to_be_huge_are_refused_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    file = save(tmp_path / "a.png", colour(0, 200, 0, 12, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((_, answer),) = Predictor(opened()).stream([file])
    assert answer.label == "green"


def test_folders_are_walked_and_files_stand_as_they_are_named(tmp_path):
    inside = [save(tmp_path / name, colour(1, 2, 3)) for name in ("b.png", "deep/er/a.JPG", "deep/z.webp")]
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    predictor = Predictor(opened())
    assert predictor.files(tmp_path, "any.thing") == [inside[0], inside[1], inside[2], "any.thing"]
    with pytest.raises(DataError, match="empty holds no image"):
        predictor.files(tmp_path / "empty")


# as the run treats its images


@pytest.mark.parametrize("name", [name for name in recipes.names() if find(name).protocol])
def test_every_row_knows_its_images_before_and_after_its_protocol(name):
    recipe = find(name)
    raw = RAW.get(recipe.data, (1, 40, 40))
    if recipe.data == "himagenet":
        enlarged = {128: {"": 128, "+": 136, "++": 156}, 224: {"": 224, "+": 238, "++": 256}}
        side = enlarged[recipe.data_args.get("size", 128)][recipe.data_args.get("augmentation", "++")]
        raw = (3, side, side)
    splits = [
        Stored(
            torch.arange(256, dtype=torch.uint8).repeat(1, 2, 48)[:, :, None].expand(1, 2, 96, -1)[..., :96],
            torch.zeros(1, dtype=torch.int64),
            ("a",),
        )
    ] * 2
    run = replace(opened(), recipe=recipe)
    run.data = lambda: DataSet("", *splits)
    steps = steps_of(run)
    image = protocols.image_after(steps, raw)
    assert raw_image(recipe, steps, image) == (raw if any(step.geometric for step in steps) else image)


def test_pixels_are_normalised_and_cropped_as_for_the_runs_test():
    recipe = Recipe(model="capsnet_cifar10", data="cifar10", protocol="sabour2017")
    predictor = Predictor(opened(Channels((3, 24, 24)), 0.0, recipe))
    assert predictor.raw == (3, 32, 32)
    pixels = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    seen = pixels[:, 4:28, 4:28].double() / 255
    seen = (seen - seen.mean()) / seen.std(correction=0)
    wanted = seen.mean(dim=(1, 2)).clamp(max=1)
    found = {each.label: each.probability for each in predictor(pixels).ranked}
    assert [found[name] for name in NAMES] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_several_crops_count_by_their_mean():
    recipe = Recipe(model="capsnet", data="smallnorb", protocol="mazzia2021", data_args={"crops": 5})
    predictor = Predictor(opened(Channels((2, 48, 48)), 0.0, recipe, ("left", "right")))
    pixels = torch.randint(0, 256, (2, 96, 96), dtype=torch.uint8)
    crops = protocols.apply(predictor.steps, pixels[None].float() / 255)[0]
    assert crops.shape == (5, 2, 48, 48)
    found = {each.label: each.probability for each in predictor(pixels).ranked}
    wanted = crops.double().mean(dim=(0, 2, 3))
    assert [found["left"], found["right"]] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_run_is_opened_from_its_folder(tmp_path):
    recipe = Recipe(
        model="efficient_capsnet",
        data="folder",
        data_args={"path": "/gone", "augmentation": "scan"},
        model_args={"decoder": False},
        protocol="own_images",
    )
    model = create_model("efficient_capsnet", image=(1, 32, 40), classes=2, decoder=False)
    about = {"recipe": recipe.to_dict(), "seed": 0, "epoch": 1, "image": [1, 32, 40], "class_names": ["page", "coin"]}
    checkpoint.save_weights(tmp_path / "weights.safetensors", model.state_dict(), about)
    (tmp_path / "recipe.json").write_text(json.dumps({"seed": 0, "recipe": recipe.to_dict()}))
    (tmp_path / "final.json").write_text("{}")
    (tmp_path / "validation.json").write_text('{"threshold": 0.25}')
    predictor = Predictor.open(tmp_path, device="cpu", batch_size=3)
    pixels = torch.randint(0, 256, (7, 1, 32, 40), dtype=torch.uint8)
    with torch.inference_mode():
        wanted = model.eval()(pixels.float() / 255).probabilities
    answers = predictor(pixels)
    assert predictor.threshold == 0.25
    for answer, row in zip(answers, wanted, strict=True):
        best = int(row.argmax())
        assert answer.ranked[0] == Named(("page", "coin")[best], pytest.approx(float(row[best]), abs=1e-5))


def test_json_has_only_plain_values():
    answer = Predictor(opened())(colour(51, 204, 102))
    file = io.StringIO()
    json.dump(answer, file)
    assert json.loads(file.getvalue())[0] == "green"
