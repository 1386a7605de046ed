"""Bytes per position of the captures in a store, over d × bytes of the compute type (goal ≤ 1.01 for prefill).

python benchmarks/capture_size.py runs/captures
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fidelab.captures.container import BFloat16
from fidelab.captures.reader import Capture, find_captures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    rows = []
    for folder in find_captures(parser.parse_args().store):
        capture = Capture(folder)
        positions = content = 0
        for item in range(len(capture.items)):
            if "hidden" in capture.names(item):
                array = capture.array(item, "hidden")
                raw = array.bits if isinstance(array, BFloat16) else array
                positions, content = positions + raw.shape[0], content + raw.nbytes
        if positions:
            ratio = capture.bytes / content
            rows.append({"capture": folder.name, "positions": positions, "bytes": capture.bytes, "ratio": ratio})
            each = capture.bytes / positions
            print(f"{folder.name:<40} {positions:>8,} positions {each:>10.1f} bytes each, ratio {ratio:.4f}")
    print(json.dumps({"benchmark": "capture_size", "captures": rows}))


if __name__ == "__main__":
    main()
