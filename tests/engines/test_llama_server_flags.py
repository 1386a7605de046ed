"""llama-server's flags and variables: each has one row, and each row's true reason is what a user reads."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.schema import Experiment
from fidelab.config.serve import read_change, read_served
from fidelab.core.errors import UsageError
from fidelab.engines import ENGINES
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from fidelab.engines.llamacpp.flags import BY_NAME, FLAGS, Flag
from fidelab.engines.llamacpp.placement import overrides
from fidelab.models import resolve
from fidelab.plan.arms import resolve_arm
from tests.run.harness import cli

ROOT = Path(__file__).parents[2]
RECORDED: list[tuple[list[str], int, str]] = json.loads((Path(__file__).parent / "llama_server_flags.json").read_text())
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "llama_server_flags.py"))
TABLE = {name: flag for flag in FLAGS for name in (*flag.names, *flag.off)}
M = "llama-server -m m.gguf"
SAMPLES = {  # a value of each kind that a taken flag has
    "FILE": "m.gguf", "N": "2", "X": "2", "TYPE": "q8_0", "on|off|auto": "auto", "N|auto|all": "all",
    "N0,N1,...": "3,1", "DEVICE,...": "none", "PATTERN=BUFFER,...": r"blk\.1=CPU", "KEY=TYPE:VALUE,...": "a.b=int:3",
}  # fmt: skip


def controlled(engine: str) -> Mapping[str, str]:
    found: Mapping[str, str] = ENGINES.load(engine).controlled
    return found


def settings(text: str) -> dict[str, Any]:
    return read_served(text, controlled).settings()


def change(text: str, of: str = M) -> dict[str, Any]:
    fields = read_change(text, read_served(of, controlled), controlled)
    del fields["name"]
    return fields


def sample(flag: Flag) -> list[str]:
    return [SAMPLES.get(kind, kind.split("|")[0]) for kind in flag.values]


def test_each_flag_of_llama_servers_help_has_one_row_with_its_names_its_variable_and_its_values() -> None:
    assert len(RECORDED) > 250
    assert SCRIPT["differences"](RECORDED) == []


def test_the_llama_server_on_path_has_no_flag_that_the_table_lacks() -> None:
    if (program := shutil.which("llama-server")) is None:
        pytest.skip("no llama-server on PATH")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in SCRIPT["differences"](SCRIPT["read_flags"](done.stdout)) if "absent" in line] == []


def test_the_script_reads_help_texts_and_the_readme_alike() -> None:
    readme = "| `-fa, --flash-attn [on\\|off\\|auto]` | (env: LLAMA_ARG_FLASH_ATTN) |\n| `--range START END` | text |"
    text = "-fa,   --flash-attn [on|off|auto]    text\n         (env: LLAMA_ARG_FLASH_ATTN)\n--range START END   text"
    facts = [(["-fa", "--flash-attn"], 1, "LLAMA_ARG_FLASH_ATTN"), (["--range"], 2, "")]
    assert SCRIPT["read_flags"](readme) == SCRIPT["read_flags"](text) == facts


def test_a_flag_is_taken_or_ignored_or_refused_and_no_name_or_variable_is_of_two() -> None:
    assert all(sum(map(bool, (flag.option, flag.ignored, flag.refused))) == 1 for flag in FLAGS)
    names = [name for flag in FLAGS for name in (*flag.names, *flag.off)]
    variables = [flag.variable for flag in FLAGS if flag.variable]
    assert (len(names), len(variables)) == (len({*names}), len({*variables}))


@pytest.mark.parametrize("name", [name for names, _, _ in RECORDED for name in names])
def test_no_flag_of_llama_servers_help_is_refused_with_a_reason_that_is_not_its_own(name: str) -> None:
    flag = TABLE[name]
    command = " ".join(["llama-server", name, *map(json.dumps, sample(flag))])
    command += "" if flag.name == "model" else " -m m.gguf"
    if flag.refused:
        with pytest.raises(UsageError, match=re.escape(f"{name} {flag.refused}")):
            settings(command)
        return
    found = settings(command)
    if flag.ignored:
        assert [*found["serve"]["ignored"].values()] == [flag.ignored]
    elif not flag.option.startswith("@") and flag.name != "gpu-layers":
        assert found["engine_args"].keys() == {flag.option}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.option in LlamaCppEngine.options], ids=str)
def test_a_taken_value_of_each_flag_is_one_that_the_engine_takes(flag: Flag) -> None:
    found = settings(f"{M} {flag.names[0]} {' '.join(map(json.dumps, sample(flag)))}")["engine_args"]
    ((option, value),) = found.items()
    assert LlamaCppEngine.options[option][0](value)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        *((f"-fa {value}", {"flash-attn": "on"}) for value in ("on", "1", "true", "enabled")),
        *((f"-fa {value}", {"flash-attn": "off"}) for value in ("off", "0", "false", "disabled")),
        ("-fa auto", {"flash-attn": "auto"}),
        ("-fa", {"flash-attn": "on"}),
        ("-ngl auto", {}),
        ("-ngl all", {"n-gpu-layers": "-1"}),
        ("--rope-scale 4", {"rope-freq-scale": "0.25"}),
        ("-nkvo --no-op-offload -nr", {"offload-kqv": "no", "op-offload": "no", "use-extra-bufts": "no"}),
        ("-no-kvu --swa-full --no-host", {"kv-unified": "no", "swa-full": "yes", "no-host": "yes"}),
        ("-ngl 99 -ncmoe 20 --numa distribute -ts 3,1",
         {"n-gpu-layers": "99", "n-cpu-moe": "20", "numa": "distribute", "tensor-split": "3,1"}),
        ("--cache_type_k q8_0", {}),
    ],
)  # fmt: skip
def test_values_mean_what_they_mean_to_llama_server(flags: str, options: dict[str, str]) -> None:
    assert settings(f"{M} {flags}")["engine_args"] == options


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ctx-sise 5", "llama-server has no flag --ctx-sise; did you mean --ctx-size"),
        ("--zzz 5", "llama-server has no flag --zzz; see llama-server --help"),
        ("-fa perhaps", "-fa perhaps: write on, off or auto"),
        ("--rope-scale 0", "--rope-scale 0: a factor is above 0"),
        ("-c", "-c needs a value"),
        ("--swa-full false", "--swa-full takes no value: leave out 'false', or the flag with it"),
        ("--kv-offload 0", "--kv-offload takes no value: leave out '0' or write --no-kv-offload"),
        ("--no-mmap true", "--no-mmap takes no value: leave out 'true'$"),
    ],
)
def test_a_flag_or_value_that_llama_server_lacks_is_named_with_what_to_write(flags: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(f"{M} {flags}")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve m --enable-chunked-prefill false",
         "--enable-chunked-prefill takes no value: leave out 'false' or write --no-enable-chunked-prefill"),
        ("vllm serve m --enable-chunked-prefill=True", "--enable-chunked-prefill takes no value: leave out 'True'$"),
        ("vllm serve --no-enable-chunked-prefill false m", "needs|takes no value"),
        ("sglang serve --model-path m --enable-mixed-chunk false",
         "--enable-mixed-chunk takes no value: leave out 'false', or the flag with it"),
    ],
)  # fmt: skip
def test_a_value_after_a_switch_of_any_server_is_named(command: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(command)


# ------------------------------------------------------------------------------------------------- variables

Q8 = "LLAMA_ARG_CACHE_TYPE_K=q8_0 LLAMA_ARG_CACHE_TYPE_V=q8_0"


def test_variables_of_llama_server_are_flags_in_a_command_and_in_a_change() -> None:
    command = f"{Q8} LLAMA_ARG_FLASH_ATTN=1 LLAMA_ARG_CTX_SIZE=8192 LLAMA_ARG_NO_KV_OFFLOAD=1 OTHER=1 {M}"
    found = settings(command)
    assert (found["reference"], found["env"]) == ({"kv": "q8_0"}, {"OTHER": "1"})
    assert found["engine_args"] == {"flash-attn": "on", "offload-kqv": "no"}
    assert found["serve"]["ignored"] == {"LLAMA_ARG_CTX_SIZE=8192": "the context is as long as each request"}
    assert found["serve"]["words"] == ["--ctx-size", "8192"]
    assert change("LLAMA_ARG_CACHE_TYPE_K=q4_0 LLAMA_ARG_CACHE_TYPE_V=q4_0", command) == {"kv": "q4_0"}
    assert change("-ctk q4_0", command) == {"kv": "q4_0/q8_0"}


def test_variables_of_a_container_are_flags_too_and_one_may_name_the_model() -> None:
    found = settings(
        "docker run -e LLAMA_ARG_MODEL=/m/x.gguf -e LLAMA_ARG_CACHE_TYPE_K=q8_0 -v /data:/m "
        "ghcr.io/ggml-org/llama.cpp:server"
    )
    assert (found["model"], found["reference"]) == ("/data/x.gguf", {"kv": "q8_0/f16"})


@pytest.mark.parametrize(
    ("variable", "options"),
    [
        ("LLAMA_ARG_SWA_FULL=on", {"swa-full": "yes"}),
        ("LLAMA_ARG_SWA_FULL=0", {"swa-full": "no"}),
        ("LLAMA_ARG_KV_UNIFIED=false", {"kv-unified": "no"}),
        ("LLAMA_ARG_NO_KV_UNIFIED=anything", {"kv-unified": "no"}),
    ],
)
def test_values_of_switches_are_read_as_llama_server_reads_them(variable: str, options: dict[str, str]) -> None:
    assert settings(f"{variable} {M}")["engine_args"] == options


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"LLAMA_ARG_CACHE_TYPE_K=q8_0 {M} -ctk q4_0",
         "LLAMA_ARG_CACHE_TYPE_K=q8_0 and -ctk q4_0 differ, and llama-server takes the flag: write the flag alone"),
        (f"LLAMA_ARG_CACHE_TYP_K=q8_0 {M}", "no variable LLAMA_ARG_CACHE_TYP_K; did you mean LLAMA_ARG_CACHE_TYPE_K"),
        (f"LLAMA_ARG_SWA_FULL=perhaps {M}", "LLAMA_ARG_SWA_FULL=perhaps: write 1 or 0"),
        (f"LLAMA_ARG_FLASH_ATTN=perhaps {M}", "write on, off or auto"),
        (f"LLAMA_ARG_RPC=h:1 {M}", "LLAMA_ARG_RPC=h:1 computes on other machines"),
    ],
)  # fmt: skip
def test_a_variable_that_says_something_else_than_a_flag_or_nothing_is_refused(command: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(command)


def test_a_flag_of_the_command_wins_over_a_changed_variable_so_that_the_change_is_refused() -> None:
    with pytest.raises(UsageError, match="-ctk q8_0 differ, and llama-server takes the flag"):
        change("LLAMA_ARG_CACHE_TYPE_K=q4_0", f"{M} -ctk q8_0")


def test_a_variable_and_a_flag_that_say_the_same_are_one_setting() -> None:
    found = settings(f"LLAMA_ARG_FLASH_ATTN=1 {M} -fa on")
    assert found["engine_args"] == {"flash-attn": "on"}
    assert found["serve"]["ignored"] == {"LLAMA_ARG_FLASH_ATTN=1": "llama-server takes the flag -fa on"}


def test_no_host_is_a_flag_of_its_own_and_not_the_address_switched_off() -> None:
    found = settings(f"LLAMA_ARG_HOST=0.0.0.0 LLAMA_ARG_NO_HOST=1 {M} --no-host")
    assert found["engine_args"] == {"no-host": "yes"}
    assert found["serve"]["ignored"] == {
        "LLAMA_ARG_HOST=0.0.0.0": "only concerns serving",
        "LLAMA_ARG_NO_HOST=1": "llama-server takes the flag --no-host",
    }


def test_a_variable_that_only_the_server_reads_is_refused_for_a_configuration_with_the_setting_to_write() -> None:
    model = resolve("fake")
    for name, instead in (("CACHE_TYPE_K", "write kv=K/V"), ("N_CPU_MOE", "write n-cpu-moe=VALUE"), ("X", "leave it")):
        written = {"model": "fake", "engine": "llamacpp", "env": {f"LLAMA_ARG_{name}": "1"}, "candidates": ["kv=q8_0"]}
        experiment = Experiment.model_validate(written)
        with pytest.raises(UsageError, match=f"LLAMA_ARG_{name} is read by llama-server only.*: {instead}"):
            resolve_arm(experiment, experiment.reference, model)


def test_an_estimate_names_formats_that_an_engine_cannot_hold_for_these_heads(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--kv-heads", "2", "--params", "1e6", "--kv", "q8_0", "--kv", "fp8_e4m3")
    done = cli("estimate", *sizes, "--head-dim", "80", cwd=tmp_path)
    reason = "q8_0 on engine llamacpp: not supported: heads of 80 are no multiple of q8_0's block of 32"
    assert reason in done.out.splitlines()
    assert json.loads(cli("estimate", *sizes, "--head-dim", "80", "--json", cwd=tmp_path).out)["not_supported"] == [
        reason
    ]
    assert "not supported" not in cli("estimate", *sizes, "--head-dim", "64", cwd=tmp_path).out


# ------------------------------------------------------------------------------------------------- placement


def test_layers_on_the_cpu_are_patterns_of_their_tensors() -> None:
    found = overrides({"n-cpu-moe": "2", "override-tensor": "a=CPU,b=CUDA0", "cpu-moe": "no"})
    assert found[:2] == [("a", "CPU"), ("b", "CUDA0")]
    names = [f"blk.{layer}.ffn_{kind}_exps.weight" for layer in (0, 1, 2) for kind in ("up", "down", "gate")]
    names += ["blk.10.ffn_up_exps.weight", "blk.0.ffn_up.weight"]
    matched = {name for name in names for pattern, _ in found[2:] if re.search(pattern, name)}
    assert matched == set(names[:6])
    dense = overrides({"n-cpu-ffn": "1"})
    assert [name for name in names if re.search(dense[0][0], name)] == ["blk.0.ffn_up.weight"]


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("tensor-split", "3;1"),
        ("override-tensor", "a"),
        ("override-tensor", "(=CPU"),
        ("n-cpu-moe", "-1"),
        ("numa", "mirror"),
        ("override-kv", "a=int:x"),
        ("override-kv", "a=long:1"),
        ("override-kv", f"{'a' * 128}=int:1"),
        ("devices", "CUDA0;CUDA1"),
        ("main-gpu", "x"),
    ],
)
def test_a_value_of_placement_that_llama_cpp_cannot_read_is_refused_before_it_runs(option: str, bad: str) -> None:
    assert not LlamaCppEngine.options[option][0](bad)


def test_an_engine_argument_that_only_a_server_has_is_refused_with_the_reason() -> None:
    for name in ("prio", "threads-http", "lora"):
        with pytest.raises(UsageError, match=re.escape(BY_NAME[name].ignored or BY_NAME[name].refused)):
            LlamaCppEngine.supports(_arm(name))
    with pytest.raises(UsageError, match="did you mean n-cpu-moe"):
        LlamaCppEngine.supports(_arm("n-cpu-moes"))


def _arm(option: str) -> Any:
    from tests.engines.test_llamacpp import asked

    return asked(Path("m.gguf"), **{option: "1"})
