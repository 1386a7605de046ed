"""GGUF → safetensors: the same weights, dequantized to bfloat16, for engines that do not read GGUF.

llama.cpp computes on the quantized blocks, so its logits differ from those of the converted folder by more
than KV formats do: the two are compared as two engines, never as one.
"""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from fidelab.errors import InputError
from fidelab.models.cache import build_once
from fidelab.models.hub import first_line

__all__ = ["to_safetensors"]

_log = logging.getLogger(__name__)

# Pre-tokenizers that cut every digit off and then split as GPT-2 does.  Transformers builds plain GPT-2 for
# these names: white space before a number would become other tokens than in llama.cpp and in the model's own
# tokenizer.
_DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def to_safetensors(gguf: Path, target: Path) -> Path:
    """The folder ``target`` with the file's weights in bfloat16, config, tokenizer and template; made once.

    Raises:
        InputError: the file is no GGUF, or of an architecture that Transformers cannot convert.
    """
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{gguf} is not a GGUF file: it does not begin with 'GGUF'; fetch it again")
    return build_once(target, lambda scratch: _convert(gguf.resolve(), scratch / "hf"))


def _convert(gguf: Path, out: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _log.info("converting %s to safetensors (once)", gguf)
    # Transformers also reads what lies beside the file, and would run code that a config there names.
    folder = out.parent / "alone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / gguf.name).symlink_to(gguf)
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with redirect_stderr(io.StringIO()):  # progress bars, some of which have no switch
            tokenizer = AutoTokenizer.from_pretrained(folder, **source)
            model = AutoModelForCausalLM.from_pretrained(
                folder, **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
            _split_digits(tokenizer, gguf)
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
    except Exception as error:  # readers of damaged files fail in many ways
        if isinstance(error, OSError) and error.errno is not None:  # the disk: build_once says so
            raise
        raise InputError(
            f"{gguf} cannot be converted for Transformers ({first_line(error)}); "
            "use the model's safetensors or another GGUF file"
        ) from error
    return out


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Have the tokenizer split digits where the file's pre-tokenizer does."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in _DIGITS_THEN_GPT2:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
