"""Compare KV-cache formats from Python, look at the result as a data frame, and choose one.

    python examples/compare_kv_formats.py

measures three formats on the embedded model with small settings: enough to see how it goes, too little to publish.
The first run fetches the model (98 MB).  ``--help`` lists what can be changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

import fidelab
from fidelab.core.errors import FidelabError

SHOWN = ["role", "name", "band", "kld_mean", "kld_mean_ci_high", "kld_over_control", "cache_bytes_per_token"]


def main() -> int:
    """Compare, show, choose; returns the exit code."""
    args = parse()
    try:
        report = fidelab.compare(
            args.model,
            engine=args.engine,
            dtype=args.dtype,
            reference=args.reference,
            candidates=args.kv,
            text=args.text,
            prompts=args.prompts,
            output_dir=args.output_dir,
            axes={
                "kld": {"windows": args.windows, "n_ctx": args.n_ctx},
                "trajectory": {"limit": args.limit, "n_predict": args.n_predict},
            },
        )
    except FidelabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = Path(args.output_dir) / report.run_id

    print("# As a data frame: one row per configuration\n")
    frame = report.to_pandas()
    print(frame.reindex(columns=SHOWN).to_string(index=False))  # what was not measured has no column

    print("\n# The smallest cache with the verdict EXCELLENT\n")
    print(smallest(frame))

    print("\n# The positions that change most\n")
    print(worst_positions(folder / "positions.parquet").to_string(index=False))

    print("\n# For a model card\n")
    print(report.to_markdown())
    print(f"all files: {folder}")
    return 0


def smallest(frame: pd.DataFrame) -> str:
    """Which candidate with the verdict EXCELLENT holds the fewest bytes per token, and what it saves."""
    good = frame[(frame["role"] == "candidate") & (frame["band"] == "EXCELLENT")].dropna(subset="cache_bytes_per_token")
    if good.empty:
        return "none of the candidates"
    best = good.loc[good["cache_bytes_per_token"].idxmin()]
    full = frame.loc[frame["role"] == "reference", "cache_bytes_per_token"].item()
    share = best["cache_bytes_per_token"] / full
    return f"{best['name']}: {best['cache_bytes_per_token']:,.0f} bytes per token, {share:.0%} of the reference's"


def worst_positions(path: Path, n: int = 3) -> pd.DataFrame:
    """The ``n`` positions of each configuration with the largest KL (nats), the most costly first."""
    positions = pd.read_parquet(path)
    changed = positions[positions["kl"] > 0].astype({"arm": str})
    ordered = changed.sort_values("kl", ascending=False, kind="stable")
    arms = list(dict.fromkeys(ordered["arm"]))
    return pd.concat([ordered[ordered["arm"] == arm].head(n) for arm in arms]) if arms else ordered


def parse() -> argparse.Namespace:
    """What can be changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="embedded name, hub id, folder or .gguf file")
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--dtype", default="float32", help="compute type")
    parser.add_argument("--reference", default="f32", help="KV format that the others are compared with")
    parser.add_argument("--kv", nargs="+", default=["k16v8", "q8_0", "int4"], help="KV formats in question")
    parser.add_argument("--text", default="default", help="evaluation text: a name or a UTF-8 file")
    parser.add_argument("--prompts", default="default", help="prompt set: 'default', a .jsonl or a .txt file")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--n-ctx", type=int, default=256, help="tokens per window")
    parser.add_argument("--limit", type=int, default=4, help="prompts")
    parser.add_argument("--n-predict", type=int, default=16, help="tokens generated per prompt")
    parser.add_argument("--output-dir", default="runs", help="where the run's folder is made")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
