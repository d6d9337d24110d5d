"""The benchmark runs, and what it is compared with is the same network."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import apart, bench, measuring
from benchmarks.cases import ON_CPU, ON_CUDA, QUICK, QUICK_COLD
from benchmarks.measuring import Case, slope
from benchmarks.plain import plain
from tests.helpers import assert_equal_with_gradients
from torchcaps.models import create_model
from torchcaps.ops import Votes, agreement_cpu, em_cpu, votes_cpu

ROOT = Path(__file__).parents[1]


def test_quick(tmp_path, capsys):
    bench.main(["--device", "cpu", "--quick", "--only", "steps,growth,inference", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert set(found) == {"machine", "date", "commit", "asked", "took_s", "ceilings", "steps", "growth", "inference"}
    assert set(found["took_s"]) == {"steps", "growth", "inference"}
    rows = [(row["name"], row["path"]) for row in found["steps"]]
    assert rows == [(case.name, path) for case in QUICK for path in ("ours", "reference", "plain")]
    for row in found["steps"]:
        assert row["ms"] > 0
        assert row["peak_mib"] > 0
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["name"] in printed
    assert set(found["growth"]["ours"]) == {"batch", "children", "parents", "iterations"}
    assert (tmp_path / "bench.png").stat().st_size > 0
    bench.main(["--show", str(tmp_path / "bench.json")])
    again = capsys.readouterr().out
    assert again.splitlines()[1:] == printed.splitlines()[1 : len(again.splitlines())]


def test_stopped_half_way(tmp_path, capsys, monkeypatch):
    """What was measured by then is written and shown."""
    own, rows = bench.measure_by_turns, []

    def first_alone(cases, *rest):
        if rows:
            raise KeyboardInterrupt
        rows.extend(own(cases, *rest))
        return rows

    monkeypatch.setattr(bench, "measure_by_turns", first_alone)
    with pytest.raises(SystemExit, match="stopped before everything was measured"):
        bench.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "bench.json").read_text())["steps"] == rows
    printed = capsys.readouterr()
    assert f"{rows[0]['ms']:.2f}" in printed.out
    assert f"{QUICK[0].name}, {QUICK[0].batch}, ours" in printed.err


def test_taken_up_again(tmp_path, capsys):
    """Finished sections stay as they are, unfinished ones are measured anew."""
    call, file = ["--device", "cpu", "--quick", "--out", str(tmp_path)], tmp_path / "bench.json"
    bench.main([*call, "--only", "steps"])
    first = json.loads(file.read_text())
    file.write_text(json.dumps({**first, "growth": "half done"}))
    bench.main([*call, "--only", "steps,growth", "--resume"])
    second = json.loads(file.read_text())
    assert second["calls"] == 2
    assert [second[name] for name in ("steps", "ceilings")] == [first[name] for name in ("steps", "ceilings")]
    assert set(second["growth"]) == {"base", "ours", "plain"}
    capsys.readouterr()
    bench.main(["--show", str(file)])
    assert ", in 2 calls\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ({"machine": "another"}, "is of something else: machine another and now "),
        ({"commit": "another"}, "is of something else: commit another and now "),
        ({"asked": {"quick": False}}, "is of something else: asked {'quick': False} and now "),
        ({"took_s": 3}, "is no bench.json that can be gone on with"),
        ([], "is no bench.json that can be gone on with"),
    ],
)
def test_what_cannot_be_taken_up_again(tmp_path, capsys, before, sentence):
    call, file = ["--device", "cpu", "--quick", "--only", "ceilings", "--out", str(tmp_path)], tmp_path / "bench.json"
    bench.main(call)
    file.write_text(json.dumps({**json.loads(file.read_text()), **before} if before else before))
    kept = file.read_text()
    with pytest.raises(SystemExit) as refused:
        bench.main([*call, "--resume"])
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err
    assert file.read_text() == kept


def test_a_finished_section_is_on_disk_before_the_next_begins(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(_):
        raise Killed

    monkeypatch.setitem(bench.SECTIONS, "growth", killed)
    with pytest.raises(Killed):
        bench.main(["--device", "cpu", "--quick", "--only", "ceilings,growth", "--out", str(tmp_path)])
    assert set(json.loads((tmp_path / "bench.json").read_text())["took_s"]) == {"ceilings"}


def test_steps_take_turns(monkeypatch):
    cases = [replace(QUICK[0], path=path) for path in ("ours", "plain")]
    taken, take = [], measuring.Run.take
    monkeypatch.setattr(measuring.Run, "take", lambda run: (taken.append(run.case.path), take(run)))
    rows = measuring.measure_by_turns(cases, torch.device("cpu"), 0.0)
    assert taken == ["ours", "plain"] * 3
    assert [row["path"] for row in rows] == ["ours", "plain"]


def test_cold_starts(tmp_path, capsys):
    bench.main(["--device", "cpu", "--quick", "--only", "cold", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "bench.json").read_text())["cold"]
    assert row["preset"] == QUICK_COLD[0]
    assert row["total_s"] == pytest.approx(row["imports_s"] + row["build_s"] + row["step_s"])
    assert "the slowest of 1" in capsys.readouterr().out


def test_cold_starts_side_by_side(tmp_path, capsys, monkeypatch):
    """All of them, in their order, whichever lane was first."""
    began = []

    def cold(self, presets, batch):
        began.append(presets)
        for preset in presets:
            yield {"preset": preset, "imports_s": 1.0, "build_s": 1.0, "step_s": 1.0, "total_s": 3.0}

    monkeypatch.setattr(bench.Bench, "cold", cold)
    names = ["em_smallnorb", "capsnet_mnist", "ar_capsnet_mnist"]
    call = ["--device", "cpu", "--only", "cold", "--presets", ",".join(names), "--at-once", "2"]
    bench.main([*call, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["preset"] for row in found["cold"]] == names
    assert sorted(began, key=len) == [names[1:2], names[::2]]
    assert "the slowest of 3: 3.0 s, 2 at once" in capsys.readouterr().out


def test_cold_starts_are_at_least_one(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--at-once", "0"])
    assert "--at-once must be at least 1, got 0" in capsys.readouterr().err


def test_no_time_left_for_compiling(tmp_path):
    only = ["--only", "steps", "--paths", "compiled", "--compiling", "0"]
    bench.main(["--device", "cpu", "--quick", *only, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "bench.json").read_text())["steps"]
    assert [row["failed"] for row in found] == ["no time left for compiling"] * len(QUICK)


GOOD = "print('ready', flush=True); input(); print(json.dumps({'ms': 3.0}))"
WORSE = {
    "time.sleep(600)": r"over \d+ s",
    "raise SystemExit('the compiler has given up')": "the compiler has given up",
    "print('a warning', file=sys.stderr); os.kill(os.getpid(), 9)": "it was killed",
    "print('ready', flush=True); input(); raise SystemExit('too late')": "too late",
    "print('ready', flush=True); input(); time.sleep(600)": r"over \d+ s",
    "print('ready', flush=True); input()": "it was killed",
    "print('hello', flush=True); raise SystemExit('who is there')": "who is there",
}


def a_program(text):
    return [sys.executable, "-c", f"import json, os, sys, time; {text}"]


@pytest.mark.parametrize("text", WORSE)
def test_what_fails_apart_says_so_and_harms_nobody(text):
    """One that is late is ended; those that were ready long before are not."""
    begun = time.monotonic()
    apart_ones = [apart.Apart(a_program(program), {}) for program in (text, GOOD, GOOD)]
    for one in apart_ones[text.startswith("time.sleep") :]:
        one.wait(begun + 60)
    for one in apart_ones:
        one.wait(begun)  # long over
    first, *others = [one.answer(2.0 if "sleep" in text and one is apart_ones[0] else 60.0) for one in apart_ones]
    assert others == [{"ms": 3.0}, {"ms": 3.0}]
    assert re.fullmatch(WORSE[text], first["failed"])
    for one in apart_ones:
        one.forget()
        assert one.process.returncode is not None
        assert not Path(one.errors).exists()


def test_apart_ends_where_nobody_waits():
    """A benchmark that was stopped leaves nothing behind that goes on measuring."""
    program = "from benchmarks.apart import ready; ready(); print('measured')"
    one = apart.Apart(a_program(program), {"PYTHONPATH": str(ROOT)})
    one.wait(time.monotonic() + 60)
    said, _ = one.process.communicate()
    assert (said, one.process.returncode) == ("", 1)
    one.forget()


def test_groups_have_room():
    assert apart.groups([1, 2, 3, 4], room=6, most=9) == [[0, 1, 2], [3]]
    assert apart.groups([1, 1, 1, 1, 1], room=6, most=2) == [[0, 1], [2, 3], [4]]
    assert apart.groups([9, 1, 9], room=6, most=9) == [[0], [1], [2]]
    assert apart.groups([], room=6, most=9) == []


def test_compiled_side_by_side(tmp_path, monkeypatch):
    """On a GPU as many as fit, each answer in its own row."""
    monkeypatch.setattr(bench.Bench, "room", lambda self, cases: ([1.0] * len(cases), 2.0, 9))
    jobs = {batch: a_program(GOOD.replace("3.0", str(batch))) for batch in (1, 2, 4)}
    monkeypatch.setattr(bench.Bench, "job", lambda self, about: jobs[about["case"]["batch"]])
    monkeypatch.setattr(bench, "machine", lambda device: "a GPU")
    usual = {"quick": False, "presets": None, "paths": None, "batch": None, "least": 0.0}
    given = SimpleNamespace(**usual, device="cuda", out=tmp_path, limit=60.0, compiling=60.0)
    made = bench.Bench(given, str(tmp_path))
    cases = [Case("capsnet_mnist", batch, path="compiled") for batch in jobs]
    assert list(made.compiled(cases)) == [{**case.plain(), "name": "capsnet_mnist", "ms": case.batch} for case in cases]
    assert made.results["compiled_at_once"] == 2


def test_unknown_sections_are_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--only", "speed"])
    assert "there is no section 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["docs/bench-cpu.json", "docs/bench-h200.json", "docs/cold-h200.json"])
def test_kept_runs_are_shown(path, capsys):
    bench.main(["--show", str(ROOT / path)])
    assert "inverted_cifar10" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_what_is_no_run_is_not_shown(text, tmp_path, capsys):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(SystemExit):
        bench.main(["--show", str(tmp_path / "bench.json")])
    assert "bench.json is no bench.json" in capsys.readouterr().err


def test_slope():
    assert slope([2, 4, 8], [3, 6, 12]) == pytest.approx(1)
    assert slope([2, 4, 8], [5, 5, 5]) == pytest.approx(0)
    assert slope([1, 10], [7, 700]) == pytest.approx(2)


NETWORKS = pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("efficient_capsnet_mnist", {"decoder": False}),
        ("capsnet_mnist", {"channels": 8, "types": 2, "decoder": False, "leak": True}),
        ("inverted_cifar10", {"backbone": "simple", "width": 16, "types": 2}),
        ("em_cifar10", {"backbone": "simple", "channels": 16, "types": (2, 2, 2)}),
    ],
)


@NETWORKS
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


@NETWORKS
def test_plain_is_nothing_of_ours(preset, options, monkeypatch):
    """Neither the pieces in the cache, were they ever so small, nor the reference makes its votes."""
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    for place, name in ((Votes, "sweep"), (agreement_cpu, "parts"), (em_cpu, "parts")):
        monkeypatch.setattr(place, name, lambda *args, **options: pytest.fail("these votes are ours"))
    network = create_model(preset, **options)
    with plain():
        network(torch.rand(2, *network.image)).scores.sum().backward()


def test_names_tell_cases_apart():
    cases = (*ON_CPU, *ON_CUDA)
    assert len({(case.name, case.batch) for case in ON_CUDA}) == len(ON_CUDA)
    assert len({(case.name, case.batch) for case in ON_CPU}) == len(ON_CPU)
    assert {case.path for case in cases} == {"ours"}
    assert Case("capsnet_mnist", 8, {"classes": 5}, precision="bf16").name == "capsnet_mnist classes=5 bf16"
