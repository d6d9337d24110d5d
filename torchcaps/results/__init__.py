"""What finished runs came to: a line of JSON for each, the papers' tables with these beside them, and RESULTS.md."""

from torchcaps.results.ledger import (
    Result,
    append,
    check_ledger,
    checksums,
    environment,
    from_line,
    moment,
    read,
    source,
    thinned,
)

__all__ = [
    "Result",
    "append",
    "check_ledger",
    "checksums",
    "environment",
    "from_line",
    "moment",
    "read",
    "source",
    "thinned",
]
