"""The page as a person meets it, in a real browser."""

import base64
import io
import re
import struct
import zlib

import numpy as np
import pytest
import torch

Image = pytest.importorskip("PIL.Image")

NETWORK = "efficient_capsnet_mnist"
LOCAL = ("http://127.0.0.1", "data:", "blob:")


class Watched:
    """A page that remembers what it complained of and whom it asked."""

    def __init__(self, browser, server, **options):
        self.page = browser.new_context(**options).new_page()
        self.complaints, self.foreign = [], []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda asked: self.complaints.append(f"failed: {asked.url[:100]}"))
        self.page.on("request", lambda asked: asked.url.startswith(LOCAL) or self.foreign.append(asked.url))
        self.page.goto(server)
        self.page.wait_for_selector("#tc[data-milliseconds]")
        self.settle()

    def settle(self):
        """Until the page has its answer and the picture is on the screen."""
        self.page.wait_for_function(
            "() => document.querySelector('#tc').dataset.busy !== 'yes'"
            " && [...document.querySelectorAll('.tc-frame img')].every((image) => image.hidden || image.complete)"
        )

    def choose(self, network):
        self.page.select_option("#tc-model", network)
        self.page.wait_for_selector(f"#tc[data-model='{network}']")
        self.settle()

    def tab(self, name):
        self.page.click(f"[data-tab={name}]")

    def text(self, name):
        return self.page.inner_text(f"#tc-{name}")

    def says(self, pattern):
        """Waits for the sentence on the page."""
        self.page.wait_for_function(
            "(pattern) => new RegExp(pattern).test(document.querySelector('#tc-toast').textContent)", arg=pattern
        )
        return self.text("toast")

    def picture(self, name):
        """Shapes: -> [h, w] or [h, w, 3]"""
        source = self.page.get_attribute(f"#tc-{name}", "src")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1])))).astype(int)

    def words_apart(self):
        """The ends of the pose's three paths are named, and no name lies on another or beyond the plot."""
        boxes = self.page.evaluate(
            "() => [...document.querySelectorAll('.tc-word')].map((word) => {"
            " const { x, y, width, height } = word.getBBox(); return [x, y, x + width, y + height]; })"
        )
        assert len(boxes) == 6
        for n, (left, top, right, bottom) in enumerate(boxes):
            assert left >= 0
            assert top >= 0
            assert right <= 360
            assert bottom <= 206
            for other in boxes[:n]:
                assert right <= other[0] or other[2] <= left or bottom <= other[1] + 2 or other[3] <= top + 2, boxes

    def slide(self, selector, value):
        """As a hand does: the thumb is pulled along."""
        box = self.page.locator(selector).bounding_box()
        low, high = (float(self.page.get_attribute(selector, side)) for side in ("min", "max"))
        middle = box["y"] + box["height"] / 2
        now = float(self.page.input_value(selector))
        at = [box["x"] + 8 + (box["width"] - 16) * (each - low) / (high - low) for each in (now, value)]
        self.page.mouse.move(at[0], middle)
        self.page.mouse.down()
        self.page.mouse.move(at[1], middle, steps=4)
        self.page.mouse.up()
        self.settle()

    def draw(self, ink):
        """With the mouse, to and fro over the ink of every other row, without lifting the pen where it goes on below.

        Shapes: ink [28, 28]
        """
        self.tab("draw")
        self.page.click("#tc-clear")
        self.settle()
        box = self.page.locator("#tc-canvas").bounding_box()
        step = box["width"] / len(ink)
        for line in strokes(ink > 110):
            for n, (row, column) in enumerate(line):
                self.page.mouse.move(box["x"] + (column + 0.5) * step, box["y"] + (row + 0.5) * step)
                if not n:
                    self.page.mouse.down()
            self.page.mouse.up()
        self.settle()


def strokes(ink):
    """Lines of (row, column) that cover the ink, with a pen of two pixels. Shapes: bool [h, w]"""
    lines = []
    first = int(np.flatnonzero(ink.any(1))[0])
    for row in range(first, len(ink), 2):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], ink[row], [0]])))
        for start, end in zip(edges[::2], edges[1::2] - 1, strict=True):
            above = [line for line in lines if line[-1][0] == row - 2 and start <= line[-1][1] <= end]
            line = above[0] if above else []
            if not above:
                lines.append(line)
            near = line and line[-1][1] - start > end - line[-1][1]
            line += [(row, end), (row, start)] if near else [(row, start), (row, end)]
    return lines


@pytest.fixture(scope="module")
def watched(browser, server):
    page = Watched(browser, server, viewport={"width": 1280, "height": 1100})
    page.first = {name: page.text(name) for name in ("found", "found-text")}
    page.first["milliseconds"] = int(page.page.get_attribute("#tc", "data-milliseconds"))
    yield page
    page.page.close()


@pytest.fixture(autouse=True)
def quiet(watched):
    """No test may leave a complaint in the console, or have asked anybody but this computer."""
    yield
    assert not watched.complaints
    assert not watched.foreign


def test_the_first_answer_comes_within_a_second(watched):
    """That of the example which a fresh page shows, measured once."""
    assert watched.first["found"] == "7"
    assert re.fullmatch(r"length [01]\.\d\d", watched.first["found-text"])
    assert 0 < watched.first["milliseconds"] < 1000
    paper = watched.page.evaluate("getComputedStyle(document.querySelector('.tc-card')).backgroundColor")
    assert paper == "rgb(255, 255, 255)"


def test_ten_digits_drawn_onto_the_canvas_are_read(watched, digits):
    images, labels = digits
    read = []
    for digit in range(10):
        watched.draw(images[labels.index(digit)].numpy())
        read.append(watched.text("found"))
        lengths = [float(each) for each in watched.page.locator(".tc-bar output").all_inner_texts()]
        assert len(lengths) == 10
        assert np.argmax(lengths) == digit
        assert watched.picture("seen").shape == (28, 28)
    assert read == [str(digit) for digit in range(10)]


def test_a_digit_drawn_small_in_a_corner_is_read_too(watched):
    watched.tab("draw")
    watched.page.click("#tc-clear")
    box = watched.page.locator("#tc-canvas").bounding_box()
    mouse = watched.page.mouse
    points = [(0.66, 0.66), (0.9, 0.66), (0.76, 0.95)]
    mouse.move(box["x"] + points[0][0] * box["width"], box["y"] + points[0][1] * box["height"])
    mouse.down()
    for x, y in points[1:]:
        mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=8)
    mouse.up()
    watched.settle()
    assert watched.text("found") == "7"


def test_a_slider_bends_the_picture_and_straightening_puts_it_back(watched):
    watched.tab("sample")
    watched.page.click("#tc-thumbs button[data-index='12']")
    watched.settle()
    before, drawn = watched.picture("bent"), watched.picture("drawn")
    assert watched.page.locator("#tc-sliders input").count() == 16
    assert (before == drawn).all()
    changes = []
    for n in (1, 8, 16):
        watched.slide(f"#tc-sliders label:nth-child({n}) input", 1)
        changes.append(abs(watched.picture("bent") - before).max())
        assert (watched.picture("drawn") == drawn).all()
        watched.page.click("#tc-straight")
        watched.settle()
        assert (watched.picture("bent") == before).all()
    assert min(changes) > 10, changes


def test_turning_and_shifting_move_the_input_and_the_pose(watched):
    watched.tab("sample")
    watched.page.click("#tc-thumbs button[data-index='42']")
    watched.settle()
    watched.page.wait_for_selector("#tc-path:not(.tc-stale) #tc-now")
    assert watched.page.locator("#tc-path polyline").count() == 3
    watched.words_apart()

    def now():
        return [float(watched.page.get_attribute("#tc-now", side)) for side in ("cx", "cy")]

    still, start = watched.picture("seen"), now()
    assert watched.page.locator(f"#tc-path circle[cx='{start[0]}'][cy='{start[1]}']").count() >= 1
    for selector, value in (("#tc-turn", 40), ("#tc-right", 4), ("#tc-down", -4)):
        watched.slide(selector, value)
        assert abs(watched.picture("seen") - still).max() > 100
        assert np.hypot(*(np.array(now()) - start)) > 3, selector
        watched.page.click("#tc-still")
        watched.settle()
        assert (watched.picture("seen") == still).all()
        assert now() == start


def test_another_capsule_can_be_looked_into(watched):
    watched.tab("sample")
    watched.page.click("#tc-thumbs button[data-index='54']")
    watched.settle()
    own, votes = watched.picture("bent"), watched.picture("coupling")
    watched.page.click(".tc-bar >> nth=2")
    watched.settle()
    assert watched.text("bend-name") == "2"
    assert watched.text("found") == "9"
    assert abs(watched.picture("bent") - own).max() > 20
    assert abs(watched.picture("coupling") - votes).max() > 10
    watched.page.click(".tc-bar >> nth=2")
    watched.settle()
    assert watched.text("bend-name") == "9"


def test_two_laid_over_each_other_are_both_seen(watched):
    try:
        watched.choose("efficient_capsnet_multimnist")
        watched.tab("overlay")
        watched.slide("#tc-apart", 8)
        assert watched.text("apart-out") == "8 px"
        for pair in ((12, 24), (20, 47), (35, 0)):
            for index in pair:
                watched.page.click(f"#tc-thumbs button[data-index='{index}']")
                watched.settle()
            both = {str(index // 6) for index in pair}
            assert set(watched.text("found").split(" + ")) == both
            assert set(watched.page.locator(".tc-is-found > span").all_inner_texts()) == both
            red, green = watched.picture("drawn")[..., 0], watched.picture("drawn")[..., 1]
            assert (red > green + 30).sum() > 10
            assert (green > red + 30).sum() > 10
        seen = watched.picture("seen")
        watched.slide("#tc-apart", 14)
        assert abs(watched.picture("seen") - seen).max() > 100
    finally:
        watched.choose(NETWORK)


def test_a_network_of_pairs_shows_a_pair_and_says_what_it_knows(browser, server):
    page = Watched(browser, server, viewport={"width": 1280, "height": 1100})
    page.choose("efficient_capsnet_multimnist")
    assert page.page.get_attribute("[data-tab=overlay]", "aria-selected") == "true"
    assert set(page.text("found").split(" + ")) == {"2", "4"}
    assert page.page.is_hidden("#tc-note")
    page.tab("sample")
    page.settle()
    assert page.text("note") == f"This network has only ever seen two at a time; {NETWORK} reads one."
    page.choose(NETWORK)
    assert page.page.is_hidden("#tc-note")
    page.tab("overlay")
    page.settle()
    assert page.text("choose-text").endswith("learnt one at a time; efficient_capsnet_multimnist tells two apart.")
    assert not page.complaints
    page.page.close()


def test_what_is_shown_belongs_to_the_tab(watched):
    watched.tab("sample")
    watched.page.click("#tc-thumbs button[data-index='42']")
    watched.tab("draw")
    watched.page.click("#tc-clear")
    watched.says("empty")
    assert watched.text("drawn-text") == "reconstruction"
    assert watched.text("coupling-text") == "coupling"
    watched.tab("sample")
    watched.settle()
    assert watched.page.is_hidden("#tc-toast")
    assert watched.text("found") == "7"
    watched.tab("draw")
    watched.settle()
    assert watched.text("found-text") == "nothing yet"


def test_other_pictures_take_the_place_of_the_example(browser, server, plain):
    """A page whose canvas shows an example of one data set does not read it as one of another."""
    page = Watched(browser, server, viewport={"width": 1280, "height": 1100})
    look = "document.querySelector('#tc-canvas').toDataURL()"
    page.page.wait_for_function(f"{look}.length > 3000")
    before = page.page.evaluate(look)
    page.choose(plain.name)
    page.page.wait_for_function(f"(before) => {look} !== before", arg=before)
    assert page.picture("seen").shape == (8, 8)
    page.page.close()


def test_a_server_that_is_gone_is_missed(browser, server):
    page = Watched(browser, server, viewport={"width": 1280, "height": 1100})
    page.page.context.set_offline(True)
    page.tab("sample")
    page.page.click("#tc-thumbs button[data-index='12']")
    assert page.says("no answer") == "The page gets no answer; is torchcaps demo still running?"
    assert page.text("found-text") == "nothing yet"
    page.page.close()


def upload(watched, content, name="picture.png"):
    watched.tab("upload")
    watched.page.set_input_files("#tc-file", {"name": name, "mimeType": "image/png", "buffer": content})


def as_png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_photograph_of_a_digit_is_read(watched, digits):
    images, labels = digits
    paper = np.full((300, 420), 230, np.uint8)
    digit = torch.nn.functional.interpolate(images[labels.index(5)][None, None] / 255, scale_factor=6)[0, 0].numpy()
    paper[60:228, 200:368] -= (200 * digit).astype(np.uint8)
    upload(watched, as_png(paper))
    watched.page.wait_for_function("document.querySelector('#tc-found').textContent === '5'")
    assert watched.page.is_hidden("#tc-toast")


def test_what_is_no_digit_is_called_none_of_these(watched):
    watched.tab("sample")
    watched.page.click("#tc-thumbs button[data-index='42']")
    watched.settle()
    assert watched.page.locator(".tc-is-found").count() == 1
    assert watched.text("coupling-text") == "where the votes for 7 come from"
    upload(watched, as_png(np.pad(np.full((60, 60), 255, np.uint8), 30)))
    watched.page.wait_for_selector("#tc-found.tc-none")
    assert watched.text("found") == "none of these"
    assert re.fullmatch(r"nearest is \d, length 0\.[0-7]\d", watched.text("found-text"))
    assert watched.page.locator(".tc-is-found").count() == 0
    watched.tab("sample")
    watched.page.click("#tc-thumbs button[data-index='42']")
    watched.page.wait_for_selector("#tc-found:not(.tc-none)")
    assert watched.text("found") == "7"


def test_what_cannot_be_read_gets_a_sentence(watched):
    watched.tab("draw")
    watched.page.click("#tc-clear")
    assert watched.says("empty") == "The canvas is empty; draw a digit on it."
    assert watched.text("found-text") == "nothing yet"
    upload(watched, b"this is no picture at all")
    assert watched.says("cannot be read") == "This file cannot be read (it is no image); upload a PNG or JPEG picture."
    upload(watched, as_png(np.full((9, 9), 200, np.uint8)))
    watched.says("empty")
    watched.page.evaluate(
        """() => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(10000001)], "huge.png", { type: "image/png" }));
            document.querySelector("#tc-file").files = files.files;
            document.querySelector("#tc-file").dispatchEvent(new Event("change"));
        }"""
    )
    assert watched.says("larger") == "This file is larger than 10 MB; make the picture smaller."
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    upload(watched, bomb)
    assert re.search(r"cannot be read \(.*pixels", watched.says("pixels"))
    upload(watched, as_png(np.pad(np.full((60, 9), 255, np.uint8), 30)))
    watched.page.wait_for_function("document.querySelector('#tc-found').textContent === '1'")
    assert watched.page.is_hidden("#tc-toast")


def test_a_run_without_decoder_says_so_and_still_answers(watched, plain):
    try:
        watched.choose(plain.name)
        watched.page.wait_for_selector("#tc-note:not([hidden])")
        assert watched.text("note") == (
            f"{plain.name} has no decoder to draw with; a preset built with decoder=True has one."
        )
        assert watched.page.locator("#tc-sliders input").count() == 0
        watched.tab("sample")
        watched.page.click("#tc-thumbs button >> nth=3")
        watched.settle()
        assert sum(map(float, watched.page.locator(".tc-bar output").all_inner_texts())) > 0
        assert watched.picture("seen").shape == (8, 8)
        assert watched.page.is_hidden("#tc-drawn")
        assert watched.page.is_visible("#tc-coupling")
        watched.page.wait_for_selector("#tc-path:not(.tc-stale) #tc-now")
        watched.words_apart()
    finally:
        watched.choose(NETWORK)
    watched.page.wait_for_selector("#tc-sliders input", state="attached")
    assert watched.page.is_hidden("#tc-note")


def test_it_fits_a_phone_that_is_dark(browser, server, watched):
    phone = Watched(
        browser, server, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, color_scheme="dark"
    )
    for tab in ("draw", "sample", "overlay", "upload"):
        phone.tab(tab)
        assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
    phone.tab("sample")
    phone.page.tap("#tc-thumbs button[data-index='36']")
    phone.settle()
    assert phone.text("found") == "6"
    paper = phone.page.evaluate("getComputedStyle(document.querySelector('.tc-card')).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", paper)[:3])) < 200
    assert not phone.complaints
    assert not phone.foreign
    phone.page.close()
