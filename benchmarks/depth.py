"""Does scoring take longer for longer documents?  Seconds of scoring at several depths, in one run, and their ratio.

python benchmarks/depth.py [--longest 4096,8192,16384,32768] [--documents 10] [--vocabulary 49152] [--width 576]

Documents are random tokens, states are random numbers in bfloat16 with noise on the candidate's side, as a model of
this width and vocabulary would leave them.  Each length has all its depths from 1,024 tokens on, so longer documents
have more rows: the ratio is that of seconds per row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fidelab.axes.kld import KLD, KLDSettings
from fidelab.captures.container import BFloat16
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import CaptureWriter, store_head, store_vocabulary
from fidelab.core import Arm, KVSpec, Vocabulary, digest
from fidelab.core.serial import to_json
from fidelab.inputs.corpus import depth_positions, depths_to

ROWS = 64  # per document and depth, the default


def main() -> None:
    """Score each length once, print a line of a table for it, and the ratios at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", default="4096,8192,16384,32768")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--width", type=int, default=576)
    asked = parser.parse_args()
    found = []
    print("tokens of a document, depths, rows, seconds of scoring, ms per row")
    for longest in map(int, asked.longest.split(",")):
        with TemporaryDirectory() as folder:
            rows, seconds = measured(Path(folder), longest, asked.documents, asked.vocabulary, asked.width)
        depths = len(depths_to(longest))
        found.append({"tokens": longest, "depths": depths, "rows": rows, "seconds": seconds})
        print(f"{longest:,}, {depths}, {rows:,}, {seconds:.2f}, {1000 * seconds / rows:.2f}")
    first, last = found[0], found[-1]
    ratio = last["seconds"] / last["rows"] / (first["seconds"] / first["rows"])
    print(f"a row of {last['tokens']:,} tokens takes {ratio:.2f} times as long as one of {first['tokens']:,}")
    print(json.dumps({"found": found, "ratio": ratio}))


def measured(folder: Path, longest: int, documents: int, vocabulary: int, width: int) -> tuple[int, float]:
    """Return the rows and the seconds that :meth:`KLD.score_parts` takes over them."""
    rng = np.random.default_rng(longest)
    contexts = depths_to(longest)
    positions = depth_positions(contexts, ROWS)
    windows = tuple(tuple(rng.integers(10, vocabulary, longest).tolist()) for _ in range(documents))
    units = tuple((number,) * len(positions) for number in range(1, documents + 1))
    settings = (("contexts", contexts), ("n_ctx", longest), ("protocol", "depth"), ("unit", "document"))
    request = Prefill("kld", windows, positions[0], positions[-1], units, settings, (), (positions,) * documents)
    weight = {"weight": rng.normal(scale=width**-0.5, size=(vocabulary, width)).astype(np.float32)}
    head = store_head(folder, weight, None, 1.0)
    states = rng.normal(size=(documents, len(positions), width)).astype(np.float32)
    sides, pieces = [], [f"<{n}>" for n in range(vocabulary)]
    words = Vocabulary(vocabulary, digest(*pieces))
    store_vocabulary(folder, words, pieces)
    for name, noise in (("f32", 0.0), ("int8", 0.02)):
        arm = Arm(name, "fake", "model", "model", "0" * 64, KVSpec.parse(name), "float32", "cpu", 1)
        key = capture_key(arm, request, {"fake": "1"}, 0)
        target = capture_folder(folder, arm, request, key)
        writer = CaptureWriter(target, request, key, to_json(arm), words)
        writer.head(head)
        for item, rows in enumerate(states + noise * rng.normal(size=states.shape).astype(np.float32)):
            writer.add(item, {"hidden": BFloat16((rows.view(np.uint32) >> 16).astype(np.uint16))})
        sides.append(Capture(writer.finish("hidden", {}, {})))
    axis = KLD(KLDSettings(protocol="depth", n_ctx=longest, windows=documents))
    begun = time.perf_counter()
    score = axis.score_parts({"": Pair.match(*sides)}, 42)
    assert score.found.value("mean") is not None
    return documents * len(positions), time.perf_counter() - begun


if __name__ == "__main__":
    main()
