"""``python -m k16v8``: the command line."""

import sys

from k16v8.cli import main

sys.exit(main())
