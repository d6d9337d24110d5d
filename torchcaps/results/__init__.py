"""What finished runs came to: a line of JSON for each, the papers' tables with these beside them, and RESULTS.md."""

from torchcaps.results.ledger import Result, append, checksums, environment, from_line, read, source, thinned

__all__ = ["Result", "append", "checksums", "environment", "from_line", "read", "source", "thinned"]
