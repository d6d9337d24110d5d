"""Our own rows: the papers' networks, trained with what has been learnt since, under one protocol for all.

Networks are selected on held-out training images, and the test set is read once.
"""

from torchcaps.recipes import Recipe

TITLE = "Ours: the papers' networks with recipes of our own"
COLUMNS = ("Data", "Network", "Test error (%)")

ROWS: dict[str, Recipe] = {}
CITED: dict[str, str] = {}
