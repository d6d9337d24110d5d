"""The README's table: one line for each row that has been run."""

import pytest

from tests.results.test_page import result
from torchcaps.results.readme import BEGIN, END, render_readme_section, update_readme

EFFICIENT = "mazzia2021_table2:efficient"


def lines(results):
    return [line for line in render_readme_section(results).splitlines() if line.startswith("| ")][2:]


def test_one_line_for_a_row():
    """That of the row's own settings, else the longest."""
    short = [result(EFFICIENT, error=0.005, epochs=10, changes={"epochs": 10, "precision": "bf16"})]
    longer = [result(EFFICIENT, error=0.004, epochs=30, changes={"epochs": 30, "precision": "bf16"})]
    whole = [result(EFFICIENT, error=error, seed=seed) for seed, error in enumerate((0.002, 0.003))]
    title = "| **Efficient-CapsNet on MNIST (Mazzia, tables 2 and 3)** | | | | | | |"
    assert lines(short) == [
        title,
        "| Efficient-CapsNet | error % | 0.26 ± 0.0002 | 0.500 | 1 | 10 of 100, shortened | 90 s on NVIDIA H200 |",
    ]
    assert (
        lines(short + longer)[1]
        == "| Efficient-CapsNet | error % | 0.26 ± 0.0002 | 0.400 | 1 | 30 of 100, shortened | 90 s on NVIDIA H200 |"
    )
    assert lines(short + longer + whole) == [
        title,
        "| Efficient-CapsNet | error % | 0.26 ± 0.0002 | 0.250 ± 0.071 | 2 | 100 | 90 s on NVIDIA H200 |",
    ]


def test_what_a_reader_must_know_stands_in_the_label():
    def first(line):
        return line.split(" | ")[0]

    changed = result(EFFICIENT, epochs=30, changes={"epochs": 30, "precision": "bf16", "lr": 0.5})
    assert first(lines([changed])[1]) == "| Efficient-CapsNet, with lr = 0.5"
    assert first(lines([result("ours:cifar10")])[1]) == "| cifar10, 2 views of each test image"


def test_long_groups_are_left_to_the_page_and_strangers_are_told():
    assert lines([result("tsai2020_figure4:em-2")]) == []
    assert "Nothing has been run yet" in render_readme_section([])
    (title, line) = lines([result("quick:mnist")])
    assert title.startswith("| **Other rows that were run** |")
    assert line.startswith("| quick:mnist |")


def test_the_section_alone_is_changed():
    readme, results = f"# A\n\n{BEGIN}\nold\n{END}\n\nmore\n", [result(EFFICIENT)]
    updated = update_readme(readme, results)
    assert updated == f"# A\n\n{render_readme_section(results)}\n\nmore\n"
    assert update_readme(updated, results) == updated


@pytest.mark.parametrize("bad", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_without_its_markers_there_is_no_place_for_it(bad):
    with pytest.raises(ValueError, match="once each"):
        update_readme(bad, [])
