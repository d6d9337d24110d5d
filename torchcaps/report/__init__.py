"""The report of a run: its pictures, what its folder tells in words, and one HTML file with both."""

from torchcaps.report.report import write_report

__all__ = ["write_report"]
