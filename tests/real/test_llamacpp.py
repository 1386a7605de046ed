"""llama.cpp in its own environment, through the command line, against its own perplexity tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.environments.environment import engines_dir
from fidelab.models.tiny import GGUF_NAME, make_tiny
from tests.models.tiny_gguf import write_gguf
from tests.real.harness import installed
from tests.run.harness import Done, axis_of, cli

WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki.test.raw"

# llama-perplexity on the same file and model, n_ctx 512, 16 chunks, f16 base: KLD and top-1 of a q8_0 cache.
TOOL_KLD, TOOL_TOP1 = 0.004023, 0.9556

pytestmark = pytest.mark.model


def compare(cwd: Path, *flags: object) -> Done:
    installed("llamacpp")
    sizes = ("--reference", "f16", "--axes", "kld", "--n-ctx", 512, "--no-floor", "--threads", 2)
    return cli("compare", "smollm2-135m", "--engine", "llamacpp", *sizes, *flags, cwd=cwd)


@pytest.mark.skipif(not WIKI.is_file(), reason="needs WikiText-2's raw test text beside the project")
def test_q8_0_costs_what_the_engines_own_tool_says(tmp_path: Path) -> None:
    same = ("--text", WIKI, "--windows", 16, "--set", "axes.kld.place=start")
    done = compare(tmp_path, "--kv", "q8_0", *same, "--control", "none")
    assert done.code == 0, done.err
    kld = done.axis("q8_0", "kld")
    assert kld.n_items == 16 * 255
    assert kld.value("mean") == pytest.approx(TOOL_KLD, rel=0.1)
    assert kld.value("top1") == pytest.approx(TOOL_TOP1, abs=0.01)


@pytest.mark.long
def test_format_loss_is_told_from_kernel_loss(tmp_path: Path) -> None:
    done = compare(tmp_path, "--kv", "q8_0", "--kv", "q4_0", "--windows", 2, "--control", "full")
    assert done.code == 0, done.err
    q8, q4 = done.report["attribution"]
    # The quantized kernel path alone costs more than eight bits under exact attention do, and less than four.
    assert q8["kernel"]["mean"] > 3 * q8["format"]["mean"] > 0
    assert q4["format"]["mean"] > q4["kernel"]["mean"]
    assert q8["here_minus_format"]["ci"][0] > 0
    assert axis_of(done.report["truth"], "kld").value("mean") == 0  # f16 and f32 take one path and give one answer
    assert "the kernel" in done.arm("q8_0")["verdict"]["sentence"]  # most of the loss, or all of it


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, with the engines of the user's."""
    installed("llamacpp")
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "engines").symlink_to(engines_dir())
    monkeypatch.setenv("FIDELAB_CACHE", str(folder))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "smollm3"])  # the second one has no mapping in Transformers
def test_a_gguf_file_runs_without_its_weights_in_transformers(
    architecture: str, own_cache: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    sizes = ("--axes", "kld", "--n-ctx", 32, "--windows", 2, "--no-floor", "--control", "none", "--threads", 1)
    both = ("--kv", "bf16", "--candidate", "engine=hf,kv=f32,name=transformers")
    done = cli("compare", file, "--engine", "llamacpp", "--reference", "f16", *both, *sizes, cwd=tmp_path)
    assert done.code == 0, done.err
    assert 0 <= (done.axis("bf16", "kld").value("mean") or 0) < 0.01
    other, converted = done.arm("transformers"), list((own_cache / "models").rglob("*.safetensors"))
    if architecture == "llama":
        assert (other["status"], len(converted)) == ("ok", 1)
    else:
        assert (other["status"], converted) == ("not_supported", [])
        assert "reads no GGUF files of architecture 'smollm3'" in other["reason"]


def test_where_no_reference_is_named_it_is_f16_and_its_control_runs(tmp_path: Path) -> None:
    installed("llamacpp")
    sizes = ("--axes", "kld", "--n-ctx", 128, "--windows", 1, "--no-floor", "--threads", 2)
    done = cli("compare", "smollm2-135m", "--engine", "llamacpp", "--kv", "q8_0", *sizes, cwd=tmp_path)
    assert done.code == 0, done.err
    assert [done.arm(role)["kv"]["k"] for role in ("reference", "control")] == ["f16", "bf16"]
    assert done.arm("control")["status"] == "ok"
    # which of the two is closer in 63 positions depends on the processor's kernels
    assert all(0 < (done.axis(arm, "kld").value("mean") or 0) < 0.02 for arm in ("control", "q8_0"))


SHIM = """
import ctypes
import numpy as np
from fidelab.engines.llamacpp import library
from fidelab.engines.llamacpp.library import GGML_TYPES, LlamaContext, LlamaModel, States
from fidelab.engines.llamacpp.proof import read_state

KINDS = {number: name for name, (number, _, _) in GGML_TYPES.items()}
make, keep_first, feed = LlamaModel.context, LlamaContext.keep_first, LlamaContext.feed

def context(self, cells, sequences=1, **params):
    made = make(self, cells, sequences, **params)
    made.kind = KINDS[params["type_k"]]
    if made.kind == "q8_0" and "cb_eval" not in params:  # decode reads another format
        number, states = GGML_TYPES["q4_0"][0], params["states"]
        states = States(states._tensor.decode()) if states is not None and states.stop else None
        own = {"type_k": number, "type_v": number, "states": states}
        made.other = make(self, cells, sequences, **{**params, **own})
    return made

def fed(self, tokens, rows, sequence=0, piece=None):
    other = getattr(self, "other", None)
    if other is None:
        return feed(self, tokens, rows, sequence, piece)
    if self._ends[sequence] == 0:  # cleared, or cut back to nothing
        other.clear()
    own, read = list(feed(self, tokens, rows, sequence, piece)), list(feed(other, tokens, rows, sequence, piece))
    return iter(read if piece == 1 else own)

def doubled(self):
    state = bytearray(self.state())
    keys, _ = read_state(bytes(state), self._ends[0], self.seen.layers)
    blocks = keys.rows.reshape(-1, GGML_TYPES[self.kind][2]).copy()
    blocks[:, :2] = (2 * blocks[:, :2].copy().view(np.float16)).view(np.uint8)
    at = bytes(state).index(keys.rows.tobytes())
    state[at : at + blocks.size] = blocks.tobytes()
    raw = (ctypes.c_uint8 * len(state)).from_buffer(state)
    assert self._native.llama_state_seq_set_data(self._context, raw, len(state), 0)

def kept(self, tokens, sequence=0):
    left = keep_first(self, tokens, sequence)
    if hasattr(self, "other"):
        keep_first(self.other, tokens, sequence)
    memory = self._native.llama_get_memory(self._context)
    if tokens and self.kind == "q5_1":  # the last block is that of another request
        keep_first(self, tokens - 16, sequence)
        list(feed(self, range(3, 19), range(0), sequence))
    if tokens and self.kind == "q5_0":
        doubled(self)
    if tokens % 16 and self.kind == "f32":  # the cells of the block that was begun are one position off
        self._native.llama_memory_seq_rm(memory, sequence, tokens - 1, tokens)
        self._native.llama_memory_seq_add(memory, sequence, tokens // 16 * 16, tokens - 1, 1)
    return left

LlamaModel.context, LlamaContext.keep_first, LlamaContext.feed = context, kept, fed
"""
HITS = {"prefix": 128, "prefix-partial": 137, "prefix-other": 128, "prefix-generated": 128}
FAULTS = {"q5_1": HITS, "q5_0": HITS, "f32": {"prefix-partial": 137}, "q8_0": {"decode": 16}}


@pytest.mark.long
def test_faults_in_ways_of_serving_are_named_and_sound_arms_raise_no_alarm(tmp_path: Path) -> None:
    installed("llamacpp")
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(SHIM)
    formats = (word for kv in (*FAULTS, "q4_0", "q4_1") for word in ("--kv", kv))
    sizes = ("--set", "axes.paths.windows=2", "--no-floor", "--control", "none", "--threads", 1)
    file = make_tiny(tmp_path / "tiny") / GGUF_NAME
    engine = ("--engine", "llamacpp", "--reference", "f16", "--pythonpath", tmp_path / "shim")
    done = cli("compare", file, *engine, *formats, "--axes", "paths", *sizes, cwd=tmp_path)
    assert done.code == 0, done.err
    found = {kv: done.axis(kv, "paths") for kv in (*FAULTS, "q4_0", "q4_1")}
    ends = {
        kv: {m.cell["way"]: m.value for m in axis.metrics if m.name == "parts at" and m.value is not None}
        for kv, axis in found.items()
    }
    assert ends == {**FAULTS, "q4_0": {}, "q4_1": {}}
    assert all(cell.measured for axis in found.values() for cell in axis.cells)
    engaged = {cell.at["way"]: cell.facts["engaged"] for cell in found["q4_0"].cells}
    assert "sequences 32" in engaged["batch-31"]
    assert "hit tokens 137" in engaged["prefix-partial"]
    assert engaged["decode"] == "forwards 241, largest forward 16, sequences 1"
