"""The benchmark runs, and what it is compared with is the same network."""

import json

import pytest
import torch

from benchmarks import bench
from benchmarks.measuring import Case, slope
from benchmarks.plain import plain
from tests.helpers import assert_equal_with_gradients
from torchcaps.models import create_model


def test_quick(tmp_path, capsys):
    bench.main(["--device", "cpu", "--quick", "--only", "steps,growth,inference", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert set(found) == {"machine", "ceilings", "steps", "growth", "inference"}
    rows = [(row["name"], row["path"]) for row in found["steps"]]
    assert rows == [(case.name, path) for case in bench.QUICK for path in ("ours", "reference", "plain")]
    for row in found["steps"]:
        assert row["ms"] > 0
        assert row["peak_mib"] > 0
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["name"] in printed
    assert set(found["growth"]["ours"]) == {"batch", "children", "parents", "iterations"}
    assert (tmp_path / "bench.png").stat().st_size > 0


def test_unknown_sections_are_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--only", "speed"])
    assert "there is no section 'speed'" in capsys.readouterr().err


def test_slope():
    assert slope([2, 4, 8], [3, 6, 12]) == pytest.approx(1)
    assert slope([2, 4, 8], [5, 5, 5]) == pytest.approx(0)
    assert slope([1, 10], [7, 700]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("efficient_capsnet_mnist", {"decoder": False}),
        ("capsnet_mnist", {"channels": 8, "types": 2, "decoder": False, "leak": True}),
        ("inverted_cifar10", {"backbone": "simple", "width": 16, "types": 2}),
        ("em_cifar10", {"backbone": "simple", "channels": 16, "types": (2, 2, 2)}),
    ],
)
def test_plain_is_the_same_network(preset, options):
    torch.manual_seed(0)
    network = create_model(preset, **options).double().eval()
    names, weights = zip(*network.named_parameters(), strict=True)

    def ours(images, *weights):
        return torch.func.functional_call(network, dict(zip(names, weights, strict=True)), images).scores

    def textbook(images, *weights):
        with plain():
            return ours(images, *weights)

    assert_equal_with_gradients(ours, textbook, [torch.rand(2, *network.image), *(w.detach() for w in weights)])


def test_names_tell_cases_apart():
    cases = (*bench.ON_CPU, *bench.ON_CUDA)
    assert len({(case.name, case.batch) for case in bench.ON_CUDA}) == len(bench.ON_CUDA)
    assert len({(case.name, case.batch) for case in bench.ON_CPU}) == len(bench.ON_CPU)
    assert {case.path for case in cases} == {"ours"}
    assert Case("capsnet_mnist", 8, {"classes": 5}, precision="bf16").name == "capsnet_mnist classes=5 bf16"
