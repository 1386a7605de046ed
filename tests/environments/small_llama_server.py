"""A small real server with the flags, the addresses and the log of llama.cpp's own.

Variables: SMALL_KV, the type that its cache really has; SMALL_DIES, a line to print before it ends; SMALL_DEAF, to
listen nowhere; SMALL_ANSWERS_AS, the model in its answers; SMALL_CHILD, a file for the pid of a child that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("--model", "--host", "--alias", "--cache-type-k", "--cache-type-v", "--flash-attn"):
    parser.add_argument(flag, default="")
for flag in ("--port", "--threads", "--ctx-size", "--batch-size"):
    parser.add_argument(flag, type=int, default=512)
flags = parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        model = {"id": flags.alias or flags.model, "object": "model", "owned_by": "llamacpp"}
        answers = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [model]}, "/props": {}}
        self.answer(answers.get(self.path))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        named = {"model": name} if (name := os.environ.get("SMALL_ANSWERS_AS")) else {}
        self.answer({**named, "choices": [{"text": " Paris.", "index": 0, "finish_reason": "length"}]})

    def answer(self, found: object) -> None:
        body = json.dumps(found or {"error": "File Not Found"}).encode()
        self.send_response(200 if found is not None else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if place := os.environ.get("SMALL_CHILD"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(place).write_text(str(child.pid))
if line := os.environ.get("SMALL_DIES"):
    sys.exit(line)
if os.environ.get("SMALL_DEAF"):
    time.sleep(600)
k, v = (os.environ.get("SMALL_KV") or side for side in (flags.cache_type_k, flags.cache_type_v))
on = {"on": "enabled", "off": "disabled"}.get(flags.flash_attn, "auto")
print(f"llama_context: n_ctx                 = {flags.ctx_size}")
print(f"llama_context: n_batch               = {flags.batch_size}")
print(f"llama_context: flash_attn            = {on}")
print(
    f"llama_kv_cache: size =   23.91 MiB ({flags.ctx_size:6} cells,  30 layers,  1/1 seqs), "
    f"K ({k}):   11.95 MiB, V ({v}):   11.95 MiB",
    flush=True,
)
ThreadingHTTPServer((flags.host, flags.port), Handler).serve_forever()
