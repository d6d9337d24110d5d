"""python -m torchcaps"""

import sys

from torchcaps.cli import main

sys.exit(main())
