"""Print the loss of 8-bit keys against the size of keys that weights alone show.

    python benchmarks/fragile_keys.py [--factors 4,16,64,256,1024,4096] [--windows 4] [--n-ctx 256]

Copies of SmolLM2-135M (``checkpoint make-fragile``) compute what it does, with keys that are larger in some channels.
One line each: the factor, the largest channel and its ratio to the median (fidelab.models.key_sizes), and the mean KL
of q8_0 and of FP8 without scales against a 32-bit cache (axis kld, engine hf). The numbers of
docs/metrics/causes.md#size-of-keys come from here.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import fidelab
from fidelab.models import pull
from fidelab.models.key_sizes import fragile_keys, key_sizes

FORMATS = ("q8_0", "fp8_e4m3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", default="4,16,64,256,1024,4096")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--n-ctx", type=int, default=256)
    asked = parser.parse_args()
    source = pull("smollm2-135m").path
    print(f"{'factor':>6} {'largest':>8} {'ratio':>8} " + " ".join(f"{name:>10}" for name in FORMATS) + "  warned of")
    with tempfile.TemporaryDirectory() as folder:
        for factor in (1, *map(int, asked.factors.split(","))):
            model = source
            if factor > 1:
                model = Path(folder) / str(factor)
                words = ["checkpoint", "make-fragile", str(source), "-o", str(model), "--factor", str(factor)]
                subprocess.run([sys.executable, "-m", "fidelab", *words], check=True, stdout=subprocess.DEVNULL)
            worst = max(sizes := key_sizes(model), key=lambda layer: layer.ratio)
            report = fidelab.compare(
                str(model),
                reference="f32",
                candidates=[*FORMATS],
                dtype="float32",
                control="none",
                floor=0,
                twins=0,
                axes={"kld": {"windows": asked.windows, "n_ctx": asked.n_ctx}},
                output_dir=folder,
            )
            losses = " ".join(f"{arm.axes['kld'].value('mean') or 0.0:10.5f}" for arm in report.candidates)
            said = fragile_keys(sizes)
            warned = [name for name, word in zip(FORMATS, ("q8_0", "FP8 without"), strict=True) if word in said]
            print(
                f"{factor:6} {worst.largest:8.1f} {worst.ratio:8.1f} {losses}  {', '.join(warned) or '–'}", flush=True
            )


if __name__ == "__main__":
    main()
