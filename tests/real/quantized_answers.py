"""Runs in vLLM's environment: what the packages there say about quantized checkpoints.

python -m tests.real.quantized_answers vllm|transformers|packing FOLDER WORDS…
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def _vllm(folder: Path, model: str, dtype: str) -> dict[str, Any]:
    """Log-probabilities of the tokens of a prompt, and greedy tokens after it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=1, disable_log_stats=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    prompt = json.loads((folder / "prompt.json").read_text())
    [out] = llm.generate([{"prompt_token_ids": prompt}], params)
    rows = zip(prompt[1:], out.prompt_logprobs[1:], strict=True)
    return {
        "logprobs": [row[token].logprob for token, row in rows],
        "tokens": list(out.outputs[0].token_ids),
        "method": str(llm.model_config.quantization),
    }


def _transformers(folder: Path, model: str, dtype: str) -> dict[str, Any]:
    """The same by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), trust_remote_code=False)
    ids = torch.tensor([json.loads((folder / "prompt.json").read_text())])
    with torch.no_grad():
        logits = loaded(ids).logits[0].float().log_softmax(-1)
        tokens = loaded.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    return {
        "logprobs": logits[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist(),
        "tokens": tokens.tolist(),
        "method": str(getattr(loaded.config, "quantization_config", None)),
    }


def _packing(folder: Path, _model: str, _dtype: str) -> dict[str, Any]:
    """Codes of ``codes.npz`` packed by the packages."""
    import torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack

    pack_to_int32 = import_module("compressed_tensors.compressors.pack_quantized.helpers").pack_to_int32
    packed = {}
    with np.load(folder / "codes.npz") as arrays:
        for name in arrays.files:  # codes [K, N] of so many bits
            bits, codes = int(name), torch.from_numpy(arrays[name].astype(np.int32))
            k, n = codes.shape
            signed = (codes - (1 << (bits - 1))).to(torch.int8)
            packed[f"gptq{bits}"] = gptq_pack(codes, bits, k, n).numpy()
            packed[f"rows{bits}"] = pack_to_int32(signed, bits).numpy()
            packed[f"columns{bits}"] = pack_to_int32(signed, bits, packed_dim=0).numpy()
            if bits == 4:
                packed["awq4"] = awq_pack(codes, bits, k, n).numpy()
    np.savez(folder / "packed.npz", **packed)
    return {}


def main() -> None:
    who, folder, model, dtype = sys.argv[1:]
    said = {"vllm": _vllm, "transformers": _transformers, "packing": _packing}[who](Path(folder), model, dtype)
    (Path(folder) / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
