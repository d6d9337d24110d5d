"""What the memory checker's program makes of what it is told; the checker itself needs a GPU."""

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


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        memcheck.main([])
    assert stop.value.code == 2
    assert "there is no GPU" in capsys.readouterr().err
