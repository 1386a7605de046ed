"""Published figures that follow from other published figures, computed by fidelab's own functions.

A profile's stage ``compute`` names these functions with their arguments.  An argument written as text (``"0.021"``) is
a figure as its source prints it: the exact one lies within half a unit of its last digit.  The result then has a
range, taken at the ends of all such arguments; every function is monotone in each of them.  An argument written as a
number is exact.

``python -m fidelab.studies.arithmetic FILE`` computes the entries of a JSON file and prints them.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fidelab.core import KVSpec, read_file, strict_json
from fidelab.core.errors import ConfigError, FidelabError, UnknownNameError
from fidelab.core.sequence import KVLayer
from fidelab.environments.checkpoints import checkpoints
from fidelab.metrics.composite import composite as composite_score
from fidelab.metrics.divergence import kld_score as score_of_mean
from fidelab.physics.devices import find_device
from fidelab.physics.fits import HILL, compare_fits
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model

_PRINTED = re.compile(r"-?\d+(?:\.(\d+))?")
_MAX_PRINTED = 8  # arguments with a rounding range; each doubles the number of evaluations
_MAX_FILE_BYTES = 1 << 20
_BF16 = KVSpec.parse("bf16")


# ------------------------------------------------------------------------------------------------------- functions


def composite(trajectory: float, kld: float, rniah: float, plad: float) -> float:
    """Return REFRACT's composite of four scores (0…100). See docs/metrics/verdicts.md#composite-and-bands."""
    value = composite_score({"trajectory": trajectory, "kld": kld, "rniah": rniah, "plad": plad}).value
    assert value is not None  # all four are given
    return value


def kld_score(mean_kl: float) -> float:
    """Return the score of a mean KL in nats. See docs/metrics/distributions.md#mean-kl-divergence."""
    return score_of_mean(mean_kl)


def ratio(figure: float, base: float) -> float:
    """Return ``figure / base``."""
    return figure / base


def percent_more(figure: float, base: float) -> float:
    """Return by how many percent a figure exceeds another one."""
    return 100 * (figure / base - 1)


def difference(figure: float, base: float) -> float:
    """Return ``figure - base``."""
    return figure - base


def product(first: float, second: float) -> float:
    """Return ``first * second``."""
    return first * second


def rate_of_tpot(tpot_ms: float) -> float:
    """Return tokens per second of one sequence from the milliseconds per output token."""
    return 1000 / tpot_ms


def rate_of_time(tokens: float, seconds: float) -> float:
    """Return tokens per second from a number of tokens and their time."""
    return tokens / seconds


def layers_kept(layers: int, first: int, last: int, every: int) -> float:
    """Return how many layers a recipe's ``keep_layers`` leaves in 16 bits."""
    kept = checkpoints.edge_and_global(layers, checkpoints.Layers(first=first, last=last, every=every))
    return float(len(kept))


def largest_group(inputs: int, devices: int = 1) -> float:
    """Return the largest usual group of quantization that divides a layer's inputs on each device; 0: none."""
    return float(max(checkpoints.fitting_groups(inputs // devices), default=0))


def logits_mib(positions: int, vocabulary: int, item_bytes: int = 4) -> float:
    """Return the MiB of one distribution over the vocabulary for each position."""
    return positions * vocabulary * item_bytes / 2**20


def logits_gib(windows: int, positions: int, vocabulary: int, item_bytes: int = 4) -> float:
    """Return the GiB of the distributions of several windows."""
    return windows * logits_mib(positions, vocabulary, item_bytes) / 2**10


def weight_gb(parameters: float, bits: float) -> float:
    """Return the GB (10^9 bytes) of weights of so many bits each, scales included."""
    return Model(Geometry("weights", 1, (), round(parameters)), weight_bits=bits).weight_bytes / 1e9


def token_bytes(layers: int, kv_heads: int, head_dim: int, kv: str = "bf16") -> float:
    """Return the bytes of one token in the cache of all layers."""
    return float(_model(layers, kv_heads, head_dim).token_bytes(KVSpec.parse(kv)))


def cache_gib(layers: int, kv_heads: int, head_dim: int, tokens: int, kv: str = "bf16", tp: int = 1) -> float:
    """Return the GiB of one sequence's cache on each device."""
    return _model(layers, kv_heads, head_dim, tp=tp).cache_bytes(KVSpec.parse(kv), tokens) / 2**30


def capacity(layers: int, kv_heads: int, head_dim: int, kv: str) -> float:
    """Return how many times the tokens of a 16-bit cache fit into the same memory."""
    return _model(layers, kv_heads, head_dim).limit(KVSpec.parse(kv), _BF16)


def kv_share(layers: int, kv_heads: int, head_dim: int, parameters: float, tokens: int, batch: int = 1) -> float:
    """Return the percentage of the cache in the bytes of a decode step, weights and cache in 16 bits."""
    return 100 * _model(layers, kv_heads, head_dim, parameters).kv_share(_BF16, tokens, batch)


def weight_share(layers: int, kv_heads: int, head_dim: int, parameters: float, tokens: int, batch: int = 1) -> float:
    """Return the percentage of the weights in the bytes of a decode step: 100 minus :func:`kv_share`."""
    return 100 - kv_share(layers, kv_heads, head_dim, parameters, tokens, batch)


def ceiling(layers: int, kv_heads: int, head_dim: int, parameters: float, tokens: int, batch: int, kv: str) -> float:
    """Return the largest speed-up of decoding over a 16-bit cache that fewer bytes allow."""
    return _model(layers, kv_heads, head_dim, parameters).ceiling(KVSpec.parse(kv), _BF16, tokens, batch)


def read_tb_per_s(
    layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int, step_ms: float, kv: str = "bf16"
) -> float:
    """Return the TB/s (10^12) at which the caches of a batch are read once in each step."""
    cache = _model(layers, kv_heads, head_dim).cache_bytes(KVSpec.parse(kv), tokens, batch)
    return cache / (step_ms / 1000) / 1e12


def shortfall(tb_per_s: float, link: str, device: str = "H100") -> float:
    """Return how many times a bandwidth exceeds that of a link in the device table."""
    return tb_per_s * 1e12 / find_device(device).links[link]


def hill(batch: Sequence[float], rate: Sequence[float], parameter: str) -> float:
    """Return a parameter of the Hill curve fitted to points (``smax``, ``b_half``, ``gamma``), or its ``r2``."""
    fit = compare_fits({"batch": batch, "rate": rate}, y="rate")["fits"]["Hill"]
    return float(fit["r2"] if parameter == "r2" else dict(fit["parameters"])[parameter][0])


def _model(layers: int, kv_heads: int, head_dim: int, parameters: float = 1.0, *, tp: int = 1) -> Model:
    kv = (KVLayer(kv_heads, head_dim, head_dim),) * layers
    return Model(Geometry("published shape", layers, kv, round(parameters)), tp=tp)


FUNCTIONS: Final[dict[str, Callable[..., float]]] = {
    function.__name__: function
    for function in (
        *(composite, kld_score, ratio, percent_more, difference, product, rate_of_tpot, rate_of_time),
        *(layers_kept, largest_group, logits_mib, logits_gib, weight_gb, token_bytes, cache_gib, capacity),
        *(kv_share, weight_share, ceiling, read_tb_per_s, shortfall, hill),
    )
}
_CHOICES = {"link": None, "device": None, "kv": None, "parameter": (*HILL, "r2")}  # arguments that are words


# ------------------------------------------------------------------------------------------------------ computing


def check_computation(function: str, arguments: Mapping[str, Any], where: str) -> None:
    """Refuse an entry that cannot be computed, before anything runs.

    Raises:
        UnknownNameError: If the function does not exist.
        ConfigError: If arguments are missing or unknown, or their values have the wrong type.
    """
    if function not in FUNCTIONS:
        raise UnknownNameError(f"function of {where}", function, FUNCTIONS)
    try:
        inspect.signature(FUNCTIONS[function]).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {function}: {error}") from None
    for name, value in arguments.items():
        good: bool
        if name in _CHOICES:
            known = _CHOICES[name]
            good = isinstance(value, str) and (known is None or value in known)
        elif name in ("batch", "rate") and function == "hill":
            good = isinstance(value, list) and all(_is_number(item) for item in value)
        else:
            good = _is_number(value) or (isinstance(value, str) and _PRINTED.fullmatch(value) is not None)
        if not good:
            raise ConfigError(f"{where}: {function}: {name} cannot be {value!r:.60}")
    if sum(isinstance(value, str) and name not in _CHOICES for name, value in arguments.items()) > _MAX_PRINTED:
        raise ConfigError(f"{where}: {function}: at most {_MAX_PRINTED} arguments may be printed figures")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compute(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``value``, and its range as ``ci`` if arguments are printed figures.

    Raises:
        FidelabError: If a device, link or format does not exist, or fidelab-checkpoints is not installed.
    """
    call = FUNCTIONS[function]
    printed = {name: text for name, text in arguments.items() if isinstance(text, str) and name not in _CHOICES}
    ranges = {name: _printed_range(text) for name, text in printed.items()}
    found: dict[str, Any] = {"value": call(**{**arguments, **{name: float(text) for name, text in printed.items()}})}
    if ranges:
        corners = [
            call(**{**arguments, **dict(zip(ranges, corner, strict=True))})
            for corner in itertools.product(*ranges.values())
        ]
        found["ci"] = [min(corners), max(corners)]
    return found


def _printed_range(text: str) -> tuple[float, float]:
    """Numbers that are printed as this text: half a unit of the last digit on each side."""
    match = _PRINTED.fullmatch(text)
    assert match is not None  # check_computation
    half = 0.5 * 10.0 ** -len(match[1] or "")
    return float(text) - half, float(text) + half


def main(argv: Sequence[str]) -> int:
    """Print the results of a file's entries as JSON: name → value and range.

    An entry that cannot be computed has ``reason`` instead; the exit code is then 1.
    """
    entries = strict_json(read_file(Path(argv[0]), _MAX_FILE_BYTES))
    results, failed = dict[str, Any](), list[str]()
    for name, entry in entries.items():
        try:
            check_computation(entry["function"], entry["of"], name)
            results[name] = compute(entry["function"], entry["of"])
        except (FidelabError, ArithmeticError, LookupError, ValueError) as error:
            results[name] = {"reason": str(error) or type(error).__name__}
            failed.append(f"{name}: {results[name]['reason']}")
    print(json.dumps(results, indent=2, allow_nan=False))
    for line in failed:
        print(f"fidelab: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
