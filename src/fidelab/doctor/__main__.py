"""``python -m fidelab.doctor``: the examination without the command line, on the standard library alone."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser

from fidelab.doctor import examine
from fidelab.doctor.text import show

if __name__ == "__main__":
    parser = ArgumentParser("python -m fidelab.doctor", description="Check this machine: what works, what does not.")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    as_json = parser.parse_args().json
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does
    try:
        diagnosis = examine()
    except KeyboardInterrupt:
        sys.exit(130)
    show(diagnosis, as_json=as_json)
    sys.exit(not diagnosis.ready)
