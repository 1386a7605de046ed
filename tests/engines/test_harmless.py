"""Options of foreign files: what passes unasked, what an adapter refuses, what a preset cannot set."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fidelab.config.presets import find_preset, listing, load_preset
from fidelab.config.profiles import experiments, find_experiment
from fidelab.config.trust import demands
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import UsageError
from fidelab.engines import ENGINES
from fidelab.engines.harmless import (
    COUNT,
    MODEL,
    NAME,
    SHARE,
    SWITCH,
    TOKENS,
    Amount,
    Beside,
    Count,
    Fields,
    Here,
    Listed,
    Values,
    Words,
)
from fidelab.engines.sglang.launch import engine_options as sglang_options
from fidelab.engines.vllm.launch import check_speculation
from fidelab.engines.vllm.launch import engine_options as vllm_options
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli

# Names of options that reach other machines, open something, or load code; none may be in a table.
REACHES = re.compile(
    r"(^|-)(addr|address|host|ip|port|ports|url|urls|uri|uds|rpc|endpoint|endpoints|socket|nccl|master|grpc|http2?|ssl"
    r"|cls|class|plugin|plugins|module|middleware|hooks|sidecar|connector|loader|config|path|dir|folder|file|key|hf-token"
    r"|trust|allow|allowed|remote|insecure|cors|origins|lora|ray|nnodes|node|nodes|headless|disaggregation)($|-)"
)
EXCEPT = {
    "speculative-config": "its fields are listed one by one",
    "speculative-draft-model-path": "the name of a model, as the experiment's own",
}
HOSTILE = ("/etc/passwd", "../x", "a.b", "evil.module:Class", "http://10.0.0.1", "10.0.0.1", "::", "0.0.0.0:1", "x\ny")


@pytest.mark.parametrize("engine", ["hf", "llamacpp", "sglang", "vllm"])
def test_no_option_that_reaches_out_or_loads_code_is_harmless(engine: str) -> None:
    table = ENGINES.load(engine).harmless
    assert {name for name in table if REACHES.search(name)} == EXCEPT.keys() & table.keys()
    assert all(one.why and one.values.said for one in table.values())


@pytest.mark.parametrize("engine", ["hf", "llamacpp", "sglang", "vllm"])
def test_no_harmless_option_takes_a_path_a_module_or_an_address(engine: str) -> None:
    taken = {
        (name, value)
        for name, one in ENGINES.load(engine).harmless.items()
        for value in HOSTILE
        if one.values.allows(value) and not (one.values == MODEL and value in ("a.b", "10.0.0.1"))  # names of models
    }
    assert taken == set()


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [
        (COUNT, ["0", "7", 7, "2147483647"], ["-1", "2147483648", "1e9", "1.0", "true", True, "", "٣", "7\n", "0x7"]),
        (Count(-1), ["-1", "0"], ["-2", "--1"]),
        (TOKENS, ["32K", "32k", "2.5M", "4Gi", "4294967296"], ["-1", "K", "4X", "1e9"]),
        (SHARE, ["0.9", "0", "1", 0.5], ["1.1", "-0.1", "nan", "inf", "90%"]),
        (Amount(-1), ["-1", "1e-5", "10000.0"], ["-2", "1e13", "1e", "infinity"]),
        (SWITCH, ["yes", "off", True], ["1", "0", "maybe", 1]),
        (NAME, ["TRITON_ATTN", "fp8", "a-b"], ["a.b", "a/b", "-a", "a b", "", "a" * 65, "é"]),
        (MODEL, ["owner/name-1.5B", "name"], ["/abs", "../up", "a/b/c", "~/m", "a:b", ".hidden"]),
        (Listed(COUNT), ["[1, 2]", "1 2", "1,2", [1, 2]], ["[1, -2]", '["x"]', "[[1]]", "1 x", '{"a": 1}', "[1"]),
        (Fields({"a": COUNT}), ['{"a": 1}', "{}"], ['{"b": 1}', '{"a": {"a": 1}}', '{"a": null}', "[]", "{"]),
        (Fields({"a": COUNT}), [], ["[" * 4000, '{"a": ' * 600 + "1" + "}" * 600]),
        (Fields({"a": COUNT}, ("a",)), ['{"a": 1}'], ["{}"]),
        (Words(("x",)), ["x"], ["X", "x ", ["x"]]),
        (Here(), ["http://127.0.0.1:80", "localhost", "[::1]:80"], ["http://127.0.0.1.evil", "2130706433.x", "http://10.0.0.1"]),
        (Beside(NAME), ["chatml"], ["a.jinja"]),
        (Beside(), [], ["chatml"]),
    ],
)  # fmt: skip
def test_values_are_what_they_say_and_nothing_else(values: Values, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not values.allows(value)] == []
    assert [value for value in bad if values.allows(value)] == []


def arm(engine: str, **options: str) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm("x", engine, "m", "m", "", KVSpec.parse("auto"), "bfloat16", "cpu", 1, named)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler_cls": "evil.Scheduler"},
        {"logits_processors": '["evil.X"]'},
        {"kv_transfer_config": '{"kv_connector": "X", "kv_connector_module_path": "evil"}'},
        {"compilation_config": '{"backend": "evil.compile"}'},
        {"spec_method": "custom_class"},
        {"spec_model": "evil.X"},
    ],
)
def test_code_that_an_option_names_is_refused_by_the_adapter_of_vllm_too(options: dict[str, str]) -> None:
    (name,) = (key.replace("_", "-") for key in options)
    with pytest.raises(UsageError, match=rf"{name}=.* runs code that it names: add trust-remote-code=yes "):
        vllm_options(arm("vllm", **options))


@pytest.mark.parametrize("name", ["custom_weight_loader", "forward_hooks", "sidecar", "enable_custom_logit_processor"])
def test_code_that_an_option_names_is_refused_by_the_adapter_of_sglang_too(name: str) -> None:
    with pytest.raises(UsageError, match=r"runs code that it names: add trust-remote-code=yes"):
        sglang_options(arm("sglang", **{name: "evil.Loader"}))


@pytest.mark.parametrize(
    "config", [{"method": "custom_class", "model": "evil/X"}, {"model": "evil.X"}, {"model": "a.b.C", "method": ""}]
)
def test_a_class_that_drafts_is_refused_by_the_adapter_also_where_vllm_infers_it(config: dict[str, str]) -> None:
    text = json.dumps({**config, "num_speculative_tokens": 2})
    with pytest.raises(UsageError, match=r"speculative-config=.* runs code that it names: add trust-remote-code=yes"):
        check_speculation(arm("vllm", speculative_config=text))


# ------------------------------------------------------------------------------------------------- presets

OWN = {"host": "0", "port": "80", "uds": "/tmp/s", "model": "other/m", "served_model_name": "x", "dtype": "float32"}


@pytest.mark.parametrize("place", ["serve", "engine_args"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("key", OWN)
def test_a_preset_cannot_set_what_fidelab_itself_writes(engine: str, key: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(json.dumps({"engine": engine, "model": "m", place: {key: OWN[key]}}))
    for words in (("start", file, "--dry-run", "--trust", file), ("show", file)):
        done = cli("serve", *words, cwd=tmp_path)
        assert (done.code, done.out) == (2, "")
        (line,) = done.err.splitlines()
        assert f"{file}: a preset cannot set {key.replace('_', '-')}: " in line


def test_what_fidelab_always_writes_into_a_servers_command_is_what_presets_cannot_set() -> None:
    for engine, kv in (("vllm", "fp8_e4m3"), ("sglang", "fp8_e5m2"), ("llamacpp", "q8_0")):
        cls, one = ENGINES.load(engine), replace(arm(engine), path="/models/m", kv=KVSpec.parse(kv), device="cuda")
        written = {word[2:] for word in cls.serve_command(one, "127.0.0.1", 8000) if word.startswith("--")}
        optional = {"n-gpu-layers", "flash-attn"}  # written where a preset leaves them out
        assert written - optional <= cls.own_flags.keys()
        assert not optional & cls.own_flags.keys()


def test_llama_servers_parser_shortens_nothing_and_its_other_flags_stay_a_presets(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    options = {"cache-type": "ram", "device": "CUDA0"}
    file.write_text(json.dumps({"engine": "llamacpp", "model": "m.gguf", "serve": options}))
    write_gguf(tmp_path / "m.gguf")
    done = cli("serve", "show", file, "--trust", file, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "--cache-type ram --device CUDA0" in done.out


def test_a_preset_of_ones_own_that_sets_an_address_is_named_and_the_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "fidelab" / "presets"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(json.dumps({"engine": "vllm", "model": "m", "serve": {"port": 1}}))
    done = cli("serve", "presets", cwd=tmp_path)
    assert done.code == 1
    assert "smollm2-cpu-vllm" in done.out
    assert "mine.yaml: a preset cannot set port: pass --port" in done.err


@pytest.mark.parametrize("key", ["hos", "po", "model-p", "served-model"])
def test_nor_can_it_by_the_beginning_of_a_name_which_argparse_takes_for_the_whole(key: str, tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(json.dumps({"engine": "sglang", "model": "m", "serve": {key: "0"}}))
    done = cli("serve", "start", file, "--dry-run", "--trust", file, cwd=tmp_path)
    assert (done.code, f"cannot set {key}: " in done.err) == (2, True)


def test_a_changed_value_cannot_either_and_the_flags_that_can_are_named(tmp_path: Path) -> None:
    done = cli("serve", "start", "smollm2-cpu", "--engine", "vllm", "--dry-run", "--set", "serve.host=0", cwd=tmp_path)
    assert (done.code, "cannot set host: pass --host" in done.err) == (2, True)


@pytest.mark.parametrize("name", ["ho st", "host=0", "a\nb", "-x", ""])
def test_a_name_of_an_option_is_a_word(name: str, tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(json.dumps({"engine": "vllm", "model": "m", "serve": {name: "0"}}))
    done = cli("serve", "show", file, cwd=tmp_path)
    assert (done.code, "is not the name of an option" in done.err, len(done.err.splitlines())) == (2, True, 1)


@pytest.mark.parametrize("name", sorted(listing()))
def test_presets_that_ship_would_pass_unasked_as_a_strangers(name: str) -> None:
    assert demands(load_preset(find_preset(name))) == []


@pytest.mark.parametrize("name", experiments())
def test_experiments_that_ship_would_pass_unasked_as_a_strangers(name: str) -> None:
    from fidelab.config.experiment import read_settings
    from fidelab.config.load import read_yaml

    path = find_experiment(Path(name))
    assert [
        one for one in demands(read_settings(read_yaml(path), str(path))) if one.key not in ("text", "prompts")
    ] == []
