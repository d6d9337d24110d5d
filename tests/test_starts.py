"""What new networks answer, as a table."""

import pytest

from benchmarks import starts


def test_a_line_for_each_row(capsys):
    assert starts.main(["quick:digits", "--images", "8"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["row", "length", "score", "spread"]
    name, length, score, spread = line.split()
    assert name == "quick:digits"
    assert 0 < float(spread) < float(length) < 1
    assert float(length) == float(score)
    assert starts.named("tsai2020_figure4")[:2] == ["tsai2020_figure4:inverted-1", "tsai2020_figure4:inverted-2"]


@pytest.mark.parametrize(("row", "said"), [("nobody", "there is no recipe"), ("quick:nobody", "quick has no row")])
def test_what_there_is_not_is_one_sentence(row, said, capsys):
    assert starts.main(["quick:digits", row]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"starts: {said} 'nobody'")
    assert printed.err.count("\n") == 1
    assert not printed.out
