"""A page in the browser: draw a digit, see which capsules read it, bend them.

>>> from torchcaps.demo import serve
>>> serve(["runs/quick-mnist/seed-0"])  # until Ctrl-C
"""

from torchcaps.demo.app import build, serve
from torchcaps.demo.reader import sixty_digits

__all__ = ["build", "serve", "sixty_digits"]
