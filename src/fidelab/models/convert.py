"""GGUF → safetensors: the same weights, dequantized to bfloat16, for engines that do not read GGUF.

llama.cpp computes on the quantized blocks, so its logits differ from those of the converted folder by more than KV
formats do. The two are compared as two engines, never as one.

One tensor at a time is read, dequantized, brought into Transformers' layout by Transformers' own rules, and written to
its place in the file; the model itself exists only as shapes.  The most memory is taken by the largest tensor, as
float32.
"""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fidelab.core import format_bytes
from fidelab.core.errors import InputError, OutputError
from fidelab.models.cache import build_once
from fidelab.models.gguf import Header, StoredTensor, cannot_convert, hf_config, read_header

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_CHUNK_VALUES = 1 << 20  # numbers that are converted and written at a time
_TYPES = {"float32": "F32", "bfloat16": "BF16"}  # torch → safetensors
_EXTRA_DISK_BYTES = 64 << 20  # bytes: config and tokenizer

Loader = Callable[[], "Tensor"]  # reads a parameter of the model


def to_safetensors(file: Path, text: Path, target: Path) -> Path:
    """Write the file's weights in bfloat16, config, tokenizer and template to the folder ``target``, once.

    ``text``: the folder with the file's tokenizer and template.

    Raises:
        InputError: If the file is damaged, or Transformers cannot load its weights.
        OutputError: If the disk has no room for them.
    """

    def convert(scratch: Path) -> Path:
        try:
            return _convert(file.resolve(), text, scratch)
        except (InputError, OutputError):
            raise
        except Exception as error:  # readers of damaged files fail in many ways
            if isinstance(error, OSError) and error.errno is not None:  # the disk: build_once says so
                raise
            raise cannot_convert(file, error) from error

    return build_once(target, convert)


def check_room(target: Path, size: int) -> None:
    """Check that ``size`` bytes of weights fit where ``target`` would be.

    Raises:
        OutputError: If they do not. The message says what is needed and what is free.
    """
    free = shutil.disk_usage(next(path for path in target.parents if path.exists())).free
    if size + _EXTRA_DISK_BYTES > free:
        needed, left = format_bytes(size + _EXTRA_DISK_BYTES, free)
        raise OutputError(
            f"the weights of a GGUF file need {needed} as safetensors in {target.parent}, "
            f"{left} are free: make room (fidelab setup clean models), set FIDELAB_CACHE to a folder "
            "that has some, or use engine llamacpp, which needs no conversion"
        )


def _convert(file: Path, text: Path, scratch: Path) -> Path:
    config = hf_config(file, scratch)
    import torch
    import transformers
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    header = read_header(file)
    with torch.device("meta"):  # the model without content
        auto: Any = transformers.AutoModelForCausalLM
        model: Any = auto.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    wanted = {name: value for name, value in model.state_dict().items() if name not in tied}
    load = _by_conversions if is_gguf_arch_supported(header.architecture) else _by_processor
    loaders = load(file, header, model)
    size = sum(value.nbytes for value in wanted.values())
    _log.info("converting %s to %s of safetensors (once)", file, *format_bytes(size))
    out = scratch / "safetensors"
    with redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(out, state_dict={})  # config and generation config
    for path in text.iterdir():
        if not (out / path.name).exists():
            shutil.copy(path, out)
    _write(out / "model.safetensors", model, wanted, loaders)
    return out


def _write(target: Path, model: Any, parameters: Mapping[str, Tensor], loaders: Mapping[str, Loader]) -> None:
    """Write a safetensors file, parameter by parameter.

    ``parameters``: the model's, without content, from which names, types and shapes in the file follow.

    Raises:
        ValueError: If a parameter is missing, or has another shape.
        OutputError: If the disk has no room.
    """
    from transformers.core_model_loading import revert_weight_conversion

    missing = sorted(set(parameters) - set(loaders))
    if missing:
        raise ValueError(f"{len(missing)} of {len(parameters)} parameters are not in the file, first {missing[0]}")
    stored = {name: revert_weight_conversion(model, {name: value}) for name, value in parameters.items()}
    shapes = {name: value for values in stored.values() for name, value in values.items()}
    places, end = dict[str, int](), 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in sorted(shapes, key=lambda name: (-shapes[name].element_size(), name)):  # the order of safetensors
        value = shapes[name]
        places[name], end = end, end + value.nbytes
        kind = _TYPES[str(value.dtype).removeprefix("torch.")]
        entries[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [places[name], end]}
    check_room(target, end)
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with target.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        begin = out.tell()
        out.truncate(begin + end)
        for parameter in parameters:
            place = partial(_write_values, out, begin, places, shapes)
            place(revert_weight_conversion(model, {parameter: loaders[parameter]()}))  # no name keeps the tensors alive


def _write_values(
    out: BinaryIO, begin: int, places: Mapping[str, int], shapes: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> None:
    import torch

    for name, value in values.items():
        if name not in shapes or value.shape != shapes[name].shape:
            expected = tuple(shapes[name].shape) if name in shapes else None
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {expected}")
        out.seek(begin + places[name])
        flat = value.reshape(-1)
        for start in range(0, len(flat), _CHUNK_VALUES):
            numbers = flat[start : start + _CHUNK_VALUES].to(shapes[name].dtype).contiguous()
            out.write(numbers.view(torch.uint8).numpy().data)


# ------------------------------------------------------------------------------ from the file to the model's parameters


def _by_processor(file: Path, header: Header, model: Any) -> dict[str, Loader]:
    """By the rules of Transformers' older loader: names of the gguf package, a processor per architecture."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    sources: dict[str, list[StoredTensor]] = {}
    for tensor in header.tensors:
        parameter = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if parameter is not None:  # else nothing of the model's, as rotary factors
            sources.setdefault(parameter, []).append(tensor)

    def load(tensors: Sequence[StoredTensor]) -> Tensor:
        import torch

        gathered: dict[str, dict[str, Tensor]] = {"tensors": {}}  # by processors that join several tensors to one
        for tensor in tensors:
            content, name, _ = processor.process(
                weights=dequantized(file, tensor),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters=gathered,
            )
            if name is not None:
                return torch.from_numpy(content)
        [joined] = gathered["tensors"].values()
        return joined

    return {parameter: partial(load, tensors) for parameter, tensors in sources.items()}


def dequantized(file: Path, tensor: StoredTensor) -> NDArray[np.float32]:
    """Read and dequantize a tensor some rows at a time, since the package holds its input twice."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type)
    *rest, width = tensor.shape
    row_bytes = gguf.quant_shape_to_byte_shape((width,), kind)[0]
    rows = np.empty((math.prod(rest), width), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // max(1, width))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        raw = np.fromfile(file, np.uint8, len(part) * row_bytes, offset=tensor.offset + start * row_bytes)
        part[:] = gguf.dequantize(raw.reshape(len(part), row_bytes), kind)
    return rows.reshape(tensor.shape)


def _by_conversions(file: Path, _header: Header, model: Any) -> dict[str, Loader]:
    """By the rules of its newer loader, which are those of checkpoints in other layouts."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
    from transformers.integrations.gguf.utils import add_gguf_load_ops, get_gguf_conversion_mapping, get_gguf_plan

    header = GgufHeader.from_file(str(file))
    mapping = get_gguf_conversion_mapping(header.architecture, model.config)
    quantized = get_gguf_plan(header, mapping)[0]
    mapping = add_gguf_load_ops(mapping, quantized, header, model.dtype)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state = load_gguf_state_dict(header)
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(state):
        parameter, pattern = rename_source_key(name, renamings, converters)
        sources.setdefault(parameter, []).append((name, str(pattern)))

    def load(parameter: str, parts: Sequence[tuple[str, str]]) -> Tensor:
        rule = deepcopy(by_pattern[parts[0][1]])
        for name, pattern in parts:
            rule.add_tensor(parameter, name, pattern, partial(state[name].__getitem__, ...))
        [content] = rule.convert(parameter, model=model, config=model.config).values()
        value: Tensor = content[0] if isinstance(content, list) else content
        return value

    return {parameter: partial(load, parameter, parts) for parameter, parts in sources.items()}
