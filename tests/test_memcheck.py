"""What the memory checker's program makes of what it is told; the checker itself needs a GPU."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import memcheck

END = "12 passed, 2 skipped in 3.10s\n========= ERROR SUMMARY: {} errors\n"


def test_all_tests_that_run_kernels_are_checked():
    opt_in = [str(path) for path in Path("tests").rglob("test_*.py") if "\npytestmark = OPT_IN" in path.read_text()]
    assert memcheck.files() == sorted(opt_in)


def test_a_clean_file():
    row = {"file": "a", "ended": True, **memcheck.reading(END.format(0))}
    assert memcheck.right(row)
    assert memcheck.in_words(row) == "a: 12 tests passed, 0 failed, 0 errors"


@pytest.mark.parametrize(
    "said",
    [
        END.format(3),
        "1 failed, " + END.format(0),
        END.format(0).replace("2 skipped", "1 error"),
        "12 passed in 3.10s",
        "ERROR SUMMARY: 0 errors",
    ],
)
def test_what_is_not_clean(said):
    assert not memcheck.right({"file": "a", "ended": True, **memcheck.reading(said)})


def test_a_file_is_as_good_as_its_parts():
    good = {"file": "a", "ended": True, "errors": 0, "passed": 2, "failed": 0}
    skipped = good | memcheck.reading("2 skipped in 0.1s\nERROR SUMMARY: 0 errors")
    assert memcheck.together([good, skipped, good]) == good | {"passed": 4}
    for bad in ({"ended": False, "errors": None, "passed": None}, {"errors": 1}, {"failed": 1}):
        assert not memcheck.right(memcheck.together([good, good | bad]))


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        memcheck.main([])
    assert stop.value.code == 2
    assert "there is no GPU" in capsys.readouterr().err


def test_files_in_parts_and_only_what_is_left(tmp_path, monkeypatch, capsys):
    """By a checker that looks at nothing and, in the first call, does not speak of one part."""
    checker = tmp_path / "checker.py"
    checker.write_text(
        "import subprocess, sys\n"
        "subprocess.run(sys.argv[1:])\n"
        "if not any('quiet' in word for word in sys.argv):\n"
        "    print('ERROR SUMMARY: 0 errors')\n"
    )
    for name, tests in {"test_one.py": ["a", "b", "c"], "test_two.py": ["d", "quiet"]}.items():
        (tmp_path / name).write_text("".join(f"def test_{test}(): pass\n" for test in tests))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(memcheck, "machine", lambda device: "a GPU")
    commits = [("abc", False)]
    monkeypatch.setattr(memcheck, "source", lambda: commits[-1])
    monkeypatch.setattr(memcheck, "CHECKER", (sys.executable, str(checker)))
    monkeypatch.setattr(memcheck, "TESTS", ("-p", "no:cacheprovider", "-q"))
    monkeypatch.setattr(memcheck, "PART", 2)
    assert memcheck.main(["test_one.py", "test_two.py", "--out", "found.json"]) == 1
    one, two = json.loads(Path("found.json").read_text())["files"]
    assert one == {"file": "test_one.py", "ended": True, "errors": 0, "passed": 3, "failed": 0}
    assert two == {"file": "test_two.py", "ended": True, "errors": None, "passed": 2, "failed": 0}
    checker.write_text(checker.read_text().replace("quiet", "nothing"))
    capsys.readouterr()
    assert memcheck.main(["test_one.py", "test_two.py", "--out", "found.json"]) == 0
    assert capsys.readouterr().out == "test_two.py: 2 tests passed, 0 failed, 0 errors\n"
    assert len(json.loads(Path("found.json").read_text())["files"]) == 2
    assert memcheck.main(["./test_one.py", "test_two.py", "--out", "found.json"]) == 0
    assert capsys.readouterr().out == ""
    for commit in ("abc", True), ("def", False), ("unknown", False):
        commits.append(commit)
        assert memcheck.main(["test_one.py", "--out", "found.json"]) == 0
        assert capsys.readouterr().out == "test_one.py: 3 tests passed, 0 failed, 0 errors\n"
