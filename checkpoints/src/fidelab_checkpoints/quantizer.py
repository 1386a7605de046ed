"""Quantize a checkpoint with llm-compressor, in a separate process in that package's environment.

``python -m fidelab_checkpoints.quantizer JOB.json``: standard output has one JSON object per line: ``{"stage": …}``
during the work, and ``{"failed": …}`` or ``{"done": …}`` at the end. Output of the libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Say = Callable[..., None]


class _Refused(Exception):
    """One line for the user."""


def main() -> None:
    """Run the job that the first argument names."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def send(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        send(done=_quantize(json.loads(Path(sys.argv[1]).read_text("utf-8")), send))
    except _Refused as error:
        send(failed=str(error))
        sys.exit(2)
    except Exception as error:
        send(failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:500])
        raise


def _quantize(job: Mapping[str, Any], send: Say) -> dict[str, Any]:
    send(stage="loading the model")
    import llmcompressor
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", local_files_only=True)
    ignored = _ignored(model, job["kept"], job["keep_kinds"])
    about: dict[str, Any] = {"llm-compressor": llmcompressor.__version__, "torch": torch.__version__}
    settings: dict[str, Any] = {}
    calibration = job.get("calibration")
    if calibration:
        send(stage="preparing calibration data")
        samples = _prepared(Path(job["samples"]), calibration, tokenizer)
        if _routers(model):
            samples, about["experts"] = _balanced(model, samples, calibration, send)
        samples = samples[: calibration["samples"]]
        about["samples"] = len(samples)
        settings = _data(samples, calibration)
    send(stage=f"quantizing with {job['method']}")
    llmcompressor.oneshot(model=model, recipe=_modifiers(job, ignored), tie_word_embeddings=True, **settings)
    send(stage="writing")
    part = Path(job["output"] + ".part")
    model.save_pretrained(part, save_compressed=True)
    tokenizer.save_pretrained(part)
    part.rename(job["output"])
    return about


def _ignored(model: Any, kept: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Return the names of the loaded model's linear layers that stay in 16 bits.

    Checkpoints and loaded models may use different prefixes for the language model, so names are compared without them.
    A head that shares its weight with the embedding is in no checkpoint, so kinds are checked here again.
    """
    import torch

    from fidelab_checkpoints.modules import kind_of

    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    tails = {tail(name) for name in kept}
    found = [name for name in linear if tail(name) in tails or kind_of(name) in kinds]
    if len(found) == len(linear):
        raise _Refused("the loaded model has no linear layer that is not kept")
    return found


def tail(name: str) -> str:
    """Return a module's name without the prefix of the language model."""
    return re.sub(r"^(model\.|language_model\.)+", "", name)


def _modifiers(job: Mapping[str, Any], ignored: Sequence[str]) -> list[Any]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    scheme = job["scheme"]
    common: dict[str, Any] = {"ignore": list(ignored)}
    if scheme["format"] == "FP8":
        common |= {"targets": ["Linear"], "scheme": "FP8_DYNAMIC"}
    else:
        weights = QuantizationArgs(
            num_bits=scheme["bits"], type="int", strategy="group", group_size=scheme["group"],
            symmetric=scheme["symmetric"],
        )  # fmt: skip
        common["config_groups"] = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    if job["method"] == "gptq":
        return [GPTQModifier(**common)]
    if job["method"] == "rtn":
        return [QuantizationModifier(**common)]
    if job["method"] == "awq":
        import torch
        from llmcompressor.modifiers.transform.awq import AWQModifier
        from llmcompressor.pipelines.cache import IntermediatesCache

        if not torch.accelerator.is_available():  # pages are pinned for copies to a GPU, which fails without one
            IntermediatesCache.pin_memory = lambda *_a, **_k: None
        return [AWQModifier(), QuantizationModifier(**common)]
    from llmcompressor.modifiers.autoround import AutoRoundModifier

    return [AutoRoundModifier(**common)]


def _data(samples: Sequence[Sequence[int]], calibration: Mapping[str, Any]) -> dict[str, Any]:
    from datasets import Dataset

    rows = {"input_ids": [list(s) for s in samples], "attention_mask": [[1] * len(s) for s in samples]}
    return {
        "dataset": Dataset.from_dict(rows),
        "num_calibration_samples": len(samples),
        "max_seq_length": calibration["length"],
        "shuffle_calibration_samples": False,
        "moe_calibrate_all_experts": calibration["all_experts"],
        "pipeline": "sequential",
    }


# ------------------------------------------------------------------------------------------- calibration data


def _prepared(file: Path, calibration: Mapping[str, Any], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of the samples, kept in ``file`` for a resumed run."""
    if file.is_file():
        kept: list[list[int]] = json.loads(file.read_text("utf-8"))
        return kept
    wanted = calibration["samples"] * calibration["balance"]
    weights = [source["weight"] for source in calibration["sources"]]
    samples: list[list[int]] = []
    for number, source in enumerate(calibration["sources"]):
        share = round(wanted * sum(weights[: number + 1]) / sum(weights)) - len(samples)
        samples += _drawn(Path(source["text"]), share, calibration, tokenizer, calibration["seed"] + number)
    for share in calibration["shares"]:
        marked = sum(share["mark"] in tokenizer.decode(sample) for sample in samples)
        if marked < share["at_least"] * len(samples):
            raise _Refused(
                f"calibration: {marked} of {len(samples)} samples contain {share['mark']!r}, fewer than "
                f"the share of {share['at_least']:g} that is asked for: add a source that has it, or raise its weight"
            )
    random.Random(calibration["seed"]).shuffle(samples)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(samples), "utf-8")
    part.replace(file)
    return samples


def _drawn(file: Path, n: int, calibration: Mapping[str, Any], tokenizer: Any, seed: int) -> list[list[int]]:
    """Draw ``n`` samples of ``length`` tokens: documents in random order, joined, since few are long enough."""
    documents = list(_documents(file, tokenizer))
    random.Random(seed).shuffle(documents)
    samples: list[list[int]] = []
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document)["input_ids"]
        while len(ids) >= calibration["length"] and len(samples) < n:
            samples.append(ids[: calibration["length"]])
            ids = ids[calibration["length"] :]
        if len(samples) >= n:
            return samples
    raise _Refused(
        f"calibration: {file.name} gives {len(samples)} of {n} samples of {calibration['length']} tokens: name more "
        "text, or ask for fewer or shorter samples"
    )


def _documents(file: Path, tokenizer: Any) -> Iterator[str]:
    text = file.read_text("utf-8")
    if file.suffix not in (".jsonl", ".ndjson"):
        yield from (part for part in re.split(r"\n\s*\n", text) if part.strip())
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            messages = record.get("messages")
            yield tokenizer.apply_chat_template(messages, tokenize=False) if messages else str(record["text"])
        except (ValueError, KeyError, AttributeError, RecursionError):
            raise _Refused(f"{file}:{number}: expected a JSON object with 'text' or 'messages'") from None


# ---------------------------------------------------------------------------------------------------- experts


def _routers(model: Any) -> dict[str, Any]:
    from fidelab_checkpoints.modules import kind_of

    return {name: module for name, module in model.named_modules() if kind_of(name) == "router"}


def _balanced(
    model: Any, samples: list[list[int]], calibration: Mapping[str, Any], send: Say
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the samples that use experts most evenly, with their tokens per expert according to the router."""
    import numpy as np
    import torch

    from fidelab_checkpoints.recipe import balanced

    config = model.config.get_text_config()
    top = int(getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1)
    seen: dict[str, list[Any]] = {name: [] for name in _routers(model)}

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        def count(_module: Any, _inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            logits = parts[0]
            chosen = next((p for p in parts if not p.is_floating_point()), None)
            chosen = logits.topk(top, dim=-1).indices if chosen is None else chosen
            seen[name].append(np.bincount(chosen.flatten().cpu().numpy(), minlength=logits.shape[-1]))

        return count

    handles = [module.register_forward_hook(hook(name)) for name, module in _routers(model).items()]
    try:
        with torch.no_grad():
            for number, sample in enumerate(samples, 1):
                send(stage="counting tokens of experts", done=number, of=len(samples))
                model(input_ids=torch.tensor([sample], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = {name: np.stack(counts) for name, counts in seen.items() if len(counts) == len(samples)}
    if not layers:
        return samples, {}
    chosen = balanced(np.concatenate(list(layers.values()), axis=1), calibration["samples"])
    tokens = {name: counts[chosen].sum(axis=0) for name, counts in layers.items()}
    idle = {name: np.flatnonzero(counts == 0).tolist() for name, counts in tokens.items() if (counts == 0).any()}
    about = {"tokens": {name: counts.tolist() for name, counts in tokens.items()}, "without_tokens": idle}
    return [samples[index] for index in chosen], about


if __name__ == "__main__":
    main()
