"""``python -m fidelab.doctor``: the examination without the command line, with only the standard library."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser

from fidelab.core import interrupted, waiting_variables
from fidelab.doctor import examine, examine_machine
from fidelab.doctor.text import show

if __name__ == "__main__":
    parser = ArgumentParser("python -m fidelab.doctor", description="Check this machine: what works, what does not.")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--system", action="store_true", help="driver, GPUs, kernel, versions known to be bad")
    asked = parser.parse_args()
    os.environ |= waiting_variables(os.environ)  # as the command line does
    try:
        diagnosis = examine_machine() if asked.system else examine()
    except KeyboardInterrupt:
        sys.exit(interrupted())
    show(diagnosis, as_json=asked.json)
    sys.exit(not diagnosis.ready)
