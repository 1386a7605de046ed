"""Former names of commands and options, for the message that names the new one."""

from __future__ import annotations

from collections.abc import Mapping

MOVED_COMMANDS: Mapping[str, str] = {
    "run": "fidelab compare -f FILE",
    "repeat": "fidelab compare MODEL --runs N",
    "capture": "fidelab compare MODEL --only capture",
    "score": "fidelab compare --only score --reference DIR --candidate DIR",
    "diff": "fidelab check RUN --baseline RUN",
    "rescore": "fidelab report RUN --rescore",
    "charts": "fidelab report RUN, whose report.html has them",
    "export": "fidelab report RUN --format FORMAT, or --markdown",
    "plan": "fidelab compare MODEL, which runs until its candidates are decided",
    "baseline": "fidelab check RUN --baseline RUN or report.json",
    "captures": "fidelab setup clean",
    "runs gc": "fidelab setup clean",
    "physics": "fidelab estimate MODEL",
    "advise": "fidelab compare MODEL with --candidate weights=…,kv=…",
    "explain": "fidelab estimate explain",
    "bisect": "fidelab diagnose layers MODEL",
    "sensitivity": "fidelab diagnose sensitivity MODEL",
    "kernels": "k16v8, or fidelab diagnose attention MODEL for the q, k and v of a model",
    "bench kernels": "k16v8 bench",
    "audit": "fidelab checkpoint audit",
    "convert": "fidelab checkpoint convert",
    "quantize": "fidelab checkpoint quantize",
    "calibrate": "fidelab checkpoint calibrate",
    "launch": "fidelab serve start PRESET",
    "stop": "fidelab serve stop",
    "presets": "fidelab serve presets, or fidelab serve show or check PRESET",
    "publish": "fidelab share publish",
    "verify": "fidelab share verify",
    "leaderboard": "fidelab share leaderboard",
    "profiles": "fidelab reproduce NAME, or fidelab reproduce list",
    "engines": "fidelab setup engines, or fidelab setup install ENGINE",
    "models": "fidelab setup models, or fidelab setup fetch MODEL",
    "formats": "fidelab setup formats",
}

MOVED_OPTIONS: Mapping[str, str] = {
    "--fail-under": "fidelab check RUN --max-kld N",
    "--ref": "fidelab compare --only score --reference DIR",
    "--test": "fidelab compare --only score --candidate DIR",
    "--names": "fidelab compare --only score --candidate NAME=DIR",
    "--follow": "fidelab compare MODEL --only capture --reference DIR",
}
