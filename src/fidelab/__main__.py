"""``python -m fidelab``."""

from fidelab.cli import main

main()
