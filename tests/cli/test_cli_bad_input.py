"""Bad input: one clear line on standard error, exit code 2, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.run import harness
from tests.run.harness import cli, write_inputs

FAKE = ("compare", "fake", "--engine", "fake", "--reference", "exact")
SIZES = ("--windows", 2, "--n-ctx", 16, "--n-predict", 4, "--limit", 1)
TILT = (*FAKE, "--kv", "tilt", *SIZES)
HF = ("compare", "smollm2-135m", "--reference", "f32")


@pytest.fixture
def room(tmp_path: Path) -> Path:
    folder = tmp_path / "room"
    write_inputs(folder)
    return folder


def names(room: Path) -> list[str]:
    return sorted(str(path.relative_to(room)) for path in room.rglob("*"))


def refused(*words: object, cwd: Path) -> str:
    """The one line on standard error of a command that is refused and leaves nothing."""
    before = names(cwd)
    line = harness.refused(cli(*words, cwd=cwd))
    assert names(cwd) == before
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*FAKE, "--kv", "tlit", *SIZES), "did you mean 'tilt'? Nearest: tilt, "),
        (
            ("compare", "--serve", "vllm serve m; reboot", "--change", "-q x"),
            "--serve: more than one command: 'reboot' comes after",
        ),
        (("compare", "--serve", "vllm serve m"), "name at least one candidate"),
        (("compare", "m", "--serve", "vllm serve m", "--change", "-q x"), "leave out MODEL"),
        (("compare", "m", "--change", "-q x"), "give that with --serve COMMAND"),
        ((*HF, "--kv", "fp8_e4m2"), "did you mean 'fp8_e4m3'? Nearest: fp8_e4m3, "),
        ((*HF, "--kv", "q9"), "Nearest: q"),
        ((*HF, "--kv", "f32/nope"), "unknown KV format of engine hf 'nope'"),
        ((*FAKE, "--kv", "tilt[z=1]", *SIZES), "tilt has no option 'z'; it has: q"),
        ((*FAKE, "--kv", "tilt[q]", *SIZES), "option 'q' has no value"),
        ((*FAKE, "--kv", "tilt[q=2]", *SIZES), "q=2 cannot be"),
        ((*TILT, "--reference", "exakt"), "did you mean 'exact'?"),
        ((*TILT, "--control", "contrl"), "unknown KV format"),
        ((*TILT, "--engine", "fkae"), "unknown engine 'fkae'; did you mean 'fake'?"),
        ((*TILT, "--axes", "trajectory,kdl,kld"), "unknown test 'kdl'; did you mean 'kld'?"),
        ((*TILT, "--kv", "tilt"), "candidate 'tilt' is given twice"),
        ((*TILT, "--kv", "tilt/tilt"), "candidate 'tilt/tilt' is given twice (it means the same as 'tilt')"),
        (("compare", "smollm2-135m", "--engine", "fake", "--reference", "exact", "--kv", "tilt"), "go together"),
        ((*TILT, "--engine-arg", "delay"), "--engine-arg 'delay': write key=value"),
        ((*TILT, "--engine-arg", "=1"), "--engine-arg '=1': write key=value"),
        ((*TILT, "--engine-arg", "dleay=1"), "engine fake has no option 'dleay'"),
        ((*TILT, "--engine-arg", "delay=soon"), "delay=soon cannot be"),
        ((*TILT, "--bands", "mine"), "bands: Input should be 'fidelab' or 'refract'"),
        ((*TILT, "--protocol", "third"), "axes.kld.protocol: Input should be 'half', 'full', 'sliding' or 'depth'"),
        ((*TILT, "--dtype", "int3"), "dtype: Input should be"),
        ((*TILT, "--template", "fancy"), "axes.trajectory.template: Input should be"),
        ((*TILT, "--deadline", "0"), "--deadline '0' is not a time"),
        ((*TILT, "--deadline", "inf"), "--deadline 'inf' is not a time"),
        ((*TILT, "--threads", "0"), "threads: Input should be greater than or equal to 1"),
        ((*TILT, "--windows", "0"), "axes.kld.windows: Input should be greater than or equal to 1"),
        ((*TILT, "--windows", "many"), "'--windows': write a whole number"),
        ((*TILT, "--colour", "blue"), "no option --colour for fidelab compare"),
        (("compare",), "name a model"),
        (("compare", "fake"), "name at least one candidate"),
        (("compare", "--resume", "x", "--kv", "tilt"), "leave out --kv"),
        (("compare", "fake", "--resume", "x"), "leave out MODEL"),
        (("compare", "--resume", "x", "--windows", "3"), "leave out --windows"),
        (("compare", "--resume", "x", "--dry-run"), "leave out --dry-run"),
        (("compare", "--resume", "x", "-f", "x"), "--resume takes the settings of the run: leave out --file"),
        (("compare", "fake", "-f", "x.yaml"), "--file takes the settings of the file: leave out MODEL"),
        (("compare", "-f", "x.yaml", "--kv", "tilt"), "leave out --kv"),
        (("report", "x", "--format", "hub", "--json"), "--format writes its own files: leave out --json"),
        (("report", ".", "-o", "x"), "-o goes with --format"),
        (("report", ".", "--margin", "1%"), "--margin needs the scores again: add --rescore"),
        (("setup", "clean", "vlm-cpu"), "unknown row 'vlm-cpu'"),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else value,
)
def test_a_name_or_flag_that_cannot_be_is_one_line(words: tuple[object, ...], said: str, room: Path) -> None:
    assert said in refused(*words, cwd=room)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cmpare", "no command 'fidelab cmpare'; did you mean: fidelab compare"),
        ("chek", "no command 'fidelab chek'; did you mean: fidelab check or fidelab serve check"),
        ("share refrence", "no command 'fidelab share refrence'; did you mean: fidelab share reference"),
        ("audit", "no command 'fidelab audit'; did you mean: fidelab checkpoint audit"),
        ("runs gc", "no command 'fidelab runs gc' (see: fidelab runs --help)"),
    ],
)
def test_an_unknown_command_names_the_nearest_of_its_group_or_of_any(words: str, said: str, room: Path) -> None:
    assert refused(*words.split(), "x", "--y", cwd=room) == f"fidelab: {said}"


@pytest.mark.parametrize(("alias", "name"), [("llama.cpp", "llamacpp"), ("Transformers", "hf")])
def test_engines_are_also_known_by_their_projects_names(alias: str, name: str, room: Path) -> None:
    said = refused("compare", "smollm2-135m", "--engine", alias, "--kv", "qq", cwd=room)
    # before the formats of an engine are known it has to be installed, which it need not be here
    assert f"unknown KV format of engine {name}" in said or f"engine {name} is not installed" in said


def test_k16v8_and_its_meaning_are_one_candidate_twice(make_folder: object, room: Path) -> None:
    folder = make_folder(room / "model")  # type: ignore[operator]
    line = refused("compare", folder, "--kv", "k16v8", "--kv", "bf16/fp8_e4m3", cwd=room)
    assert "candidate 'bf16/fp8_e4m3' is given twice (it means the same as 'k16v8')" in line


def test_the_reference_itself_may_be_a_candidate(room: Path) -> None:
    done = cli(*FAKE, "--kv", "exact", *SIZES, "--no-floor", cwd=room)
    assert (done.code, done.arm("exact")["status"]) == (0, "identical")


def test_a_model_that_is_none_says_what_one_is(room: Path) -> None:
    (room / "model").mkdir()
    for model, said in (
        ("model", "has no config.json: a model folder holds config.json, *.safetensors and a tokenizer"),
        ("no model", "a model is an embedded name"),
        ("~nobody-here/model", "~nobody-here/model"),
    ):
        assert said in refused("compare", model, "--kv", "bf16", cwd=room)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"too short", "has 9 tokens, but 2 windows of n_ctx 16 need 32"),
        (b"fine\nthen \xff\xfe", "is not UTF-8: byte 0xff in line 2"),
    ],
    ids=["empty", "blank", "short", "latin-1"],
)
def test_a_text_that_cannot_be_used_says_why(content: bytes, said: str, room: Path) -> None:
    (room / "mine.txt").write_bytes(content)
    assert said in refused(*TILT, "--text", "mine.txt", cwd=room)


def test_a_text_or_prompt_file_that_is_not_there_or_cannot_be_used_is_named(room: Path) -> None:
    (room / "p.txt").write_text("\n\n")
    assert "'nowhere.txt'" in refused(*TILT, "--text", "nowhere.txt", cwd=room)
    assert "nowhere.txt" in refused(*TILT, "--prompts", "nowhere.txt", cwd=room)
    assert "has no prompt in it" in refused(*TILT, "--prompts", "p.txt", cwd=room)


def test_windows_and_prompts_beyond_the_models_limit_name_the_limit(room: Path) -> None:
    line = refused(*FAKE, "--kv", "tilt", "--windows", 1, "--n-ctx", 10**7, cwd=room)
    assert f"n_ctx {10**7} is beyond the limit of fake: at most " in line
    line = refused(*FAKE, "--kv", "tilt", "--axes", "trajectory", "--n-predict", 10**8, cwd=room)
    assert "beyond the model's limit of" in line


@pytest.mark.parametrize("place", ["file", "file/under/it"])
def test_an_output_folder_that_is_a_file_is_named(place: str, room: Path) -> None:
    (room / "file").write_text("mine")
    assert f"{room}/file is a file" in refused(*TILT, "--output-dir", place, cwd=room)
    assert (room / "file").read_text() == "mine"


def test_a_full_disk_is_said_before_anything_runs(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 9, 1))
    line = refused(*TILT, cwd=room)
    assert "saved outputs need about" in line
    assert re.search(r"need about [\d,]+ bytes in .*, 1 bytes are free", line)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(room: Path) -> None:
    (room / "locked").mkdir(mode=0o500)
    assert "is not writable" in refused(*TILT, "--output-dir", "locked", cwd=room)


GOOD = "model: fake\nengine: fake\nreference: exact\ncandidates: [tilt]\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: [fake\nengine: x\n", "mine.yaml:2:7 is not YAML"),
        ("- a\n- b\n", "expected keys like 'model:'"),
        ("", "expected keys like 'model:'"),
        (GOOD + "widnows: 3\n", "unknown key 'widnows'"),
        (GOOD + "axes: {kld: {widnows: 3}}\n", "unknown key 'axes.kld.widnows'; did you mean 'windows'?"),
        (GOOD + "axes: {kld: {windows: many}}\n", "axes.kld.windows: Input should be a valid integer"),
        (GOOD.replace("[tilt]", "tilt"), "candidates: Input should be a valid list"),
        (GOOD.replace("[tilt]", "[{kv: tilt, nmae: x}]"), "unknown key 'candidates.0.nmae'; did you mean 'name'?"),
        (GOOD.replace("engine: fake", "engine: {python: /p}"), "'engine.name' is missing"),
        (GOOD.replace("model: fake\n", ""), "'model' is missing"),
        (GOOD + "floor: .nan\n", "floor: Input should be"),
        (GOOD + "seed: -1\n", "seed: Input should be greater than or equal to 0"),
        (GOOD + "2: x\n", "mine.yaml"),
        (GOOD + "x: !!python/object:os.system {}\n", "is not YAML"),
    ],
)
def test_a_settings_file_that_is_wrong_names_the_place(content: str, said: str, room: Path) -> None:
    (room / "mine.yaml").write_text(content)
    assert said in refused("compare", "-f", "mine.yaml", cwd=room)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "--set 'seed': write a.b=value"),
        ("model.deep=1", "model is not a group of settings"),
        ("seed=[1", "the value is not YAML"),
        ("sede=1", "unknown key 'sede'; did you mean 'seed'?"),
        ("=1", "write a.b=value"),
    ],
)
def test_an_override_that_cannot_be_is_one_line(override: str, said: str, room: Path) -> None:
    (room / "mine.yaml").write_text(GOOD)
    assert said in refused("compare", "-f", "mine.yaml", "--set", override, cwd=room)


def test_a_settings_file_that_is_none_is_named(room: Path) -> None:
    assert "nowhere.yaml does not exist" in refused("compare", "-f", "nowhere.yaml", cwd=room)
    assert "is a folder; name an experiment file" in refused("compare", "-f", ".", cwd=room)
    (room / "latin.yaml").write_bytes(b"model: \xe9\n")
    assert "is not UTF-8 (byte 7)" in refused("compare", "-f", "latin.yaml", cwd=room)


@pytest.mark.parametrize("words", [("report", "--rescore"), ("report",), ("compare", "--resume")], ids=" ".join)
def test_a_folder_that_is_not_a_run_is_said_to_be_none(words: tuple[str, ...], room: Path) -> None:
    assert f"{room} is not a run folder: it holds no config.resolved.yaml" in refused(*words, room, cwd=room)
    assert "nowhere is not a run folder: it does not exist" in refused(*words, "nowhere", cwd=room)


@pytest.mark.parametrize("words", ["report --rescore", "report", "compare --resume", "report --format hub -o out"])
def test_a_run_of_another_kind_is_not_sent_in_a_circle(words: str, room: Path) -> None:
    (room / "config.resolved.yaml").write_text("# command: fidelab diagnose layers m\nmodel: m\nkind: layers\n")
    said = refused(*words.split(), ".", cwd=room)
    assert "it is of kind layers: its record lies there" in said
    assert "--resume ." not in said


def test_a_run_without_results_says_how_to_go_on(room: Path) -> None:
    folder = room / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(GOOD)
    for command in (("report", "--rescore"), ("report",)):
        assert f"fidelab compare --resume {folder}" in refused(*command, folder, cwd=room)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"facts": 1, "planned": [], "arms": [{}]}', '{"arms": 3}'])
def test_damaged_outcomes_say_how_to_repair_them(content: str, room: Path) -> None:
    folder = room / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(GOOD)
    (folder / "outcomes.json").write_text(content)
    line = refused("report", "--rescore", folder, cwd=room)
    assert "outcomes.json" in line
    assert f"--resume {folder}" in line


def test_captures_of_a_folder_that_is_not_there(room: Path) -> None:
    line = refused("setup", "clean", "outputs", "--captures-dir", "nowhere", cwd=room)
    assert "nowhere is not a folder of captures" in line


def test_a_real_process_says_one_line_and_exits_with_2(room: Path) -> None:
    command = [sys.executable, "-m", "fidelab", *map(str, TILT), "--bands", "mine"]
    done = subprocess.run(command, cwd=room, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_stops_reading_is_not_an_error(room: Path) -> None:
    line = f"{sys.executable} -m fidelab compare --help | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=room, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        "compare ~nobodyx/m --engine hf --kv q8_0",
        "compare fake --engine fake --candidate tilt --text ~nobodyx/t",
        "compare m.gguf --engine llamacpp --bin ~nobodyx/b --kv q8_0",
        "compare fake --engine fake --candidate tilt --axes gsm8k --set axes.gsm8k.data=~nobodyx/g",
        "compare fake --engine fake --candidate tilt --axes rniah --set axes.rniah.haystack=~nobodyx/g",
        "compare fake --engine fake --candidate tilt --output-dir ~nobodyx/o",
        "checkpoint audit ~nobodyx/c",
        "estimate ~nobodyx/m",
        "serve start ~nobodyx/p.yaml",
    ],
)
def test_the_home_of_a_user_who_does_not_exist_is_one_line(words: str, tmp_path: Path) -> None:
    done = cli(*words.split(), cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert re.fullmatch(r"fidelab: ~nobodyx/\S+: this machine has no user 'nobodyx'", line)


@pytest.mark.parametrize("name", ["FIDELAB_CACHE", "XDG_CONFIG_HOME"])
def test_a_folder_of_no_user_in_a_variable_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "~nobodyx/c")
    done = cli("compare", "m.gguf", "--engine", "llamacpp", "--kv", "q8_0", cwd=tmp_path)
    assert (done.code, done.err) == (2, "fidelab: ~nobodyx/c: this machine has no user 'nobodyx'\n")
