"""Arms of one run that differ in engine, environment, model or options."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.config.schema import ArmConfig, EngineConfig
from fidelab.core import KVSpec
from fidelab.engines import ENGINES
from fidelab.engines.base import Support
from fidelab.engines.fake import FakeEngine
from fidelab.plan.arms import served_name, with_kv
from tests.environments.conftest import Second, second
from tests.run.harness import Done, axis_of, cli, compare, fake_file, refused

__all__ = ["second"]

AXES = {"kld": {"windows": 20, "n_ctx": 16}}


class Fussy(FakeEngine):
    """Knows that it gets one format wrong, and runs it only when forced."""

    name = "fake"

    @classmethod
    def supports(cls, arm: Any) -> Support:
        options = dict(arm.options)
        forced = options.pop("force", "no") == "yes"
        verdict = super().supports(type(arm)(**{**vars(arm), "options": tuple(options.items())}))
        if verdict.ok and arm.kv.k.name in ("garbage", "silent") and not forced:
            return Support(False, "something else comes out")
        return verdict


class Absent(FakeEngine):
    """An engine whose package nobody has installed."""

    name = "absent"
    packages = ("no-such-package-anywhere",)


class Served(FakeEngine):
    """An engine that somebody else started."""

    name = "fake"
    is_server = True


def run(cwd: Path, **more: Any) -> Done:
    file = fake_file(cwd, **{"control": "none", "axes": AXES, "floor": 0.0, **more})
    return cli("compare", "-f", file, "--trust", file, cwd=cwd)


def test_a_candidate_may_differ_in_its_engine_options_alone_and_the_resolved_file_names_the_inherited_format(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, candidates=["family=geometric", "kv=tilt[q=0.6]"])
    assert done.code == 0
    assert (done.axis("family=geometric", "kld").value("mean") or 0) > 0.1
    assert done.axis("tilt[q=0.6]", "kld").value("mean") == pytest.approx(0.0204, rel=0.01)
    resolved = yaml.safe_load((done.folder / "config.resolved.yaml").read_text())
    unsaid: dict[str, Any] = {**dict.fromkeys(("engine", "model", "dtype", "engine_args")), "env": {}, "without": []}
    assert resolved["candidates"][0] | {"engine_args": None} == {"kv": "exact", "name": "family=geometric", **unsaid}
    assert cli("compare", "-f", done.folder / "config.resolved.yaml", cwd=tmp_path).code == 0


def test_an_arm_runs_in_the_interpreter_that_it_names(tmp_path: Path, second: Second) -> None:
    done = run(tmp_path, candidates=[f"kv=tilt[q=0.6],engine=fake,python={second.python},name=there"])
    assert (done.code, done.err) == (0, done.err)
    assert done.axis("there", "kld").value("mean") == pytest.approx(0.0204, rel=0.01)
    [log] = (done.folder / "logs").glob("*there*")
    assert "Error" not in log.read_text()


def test_a_shim_folder_is_recorded_with_its_hash_and_makes_another_capture(tmp_path: Path, second: Second) -> None:
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "unused_module.py").write_text("x = 1\n")
    engine = {"name": "fake", "python": second.python, "pythonpath": [str(shim)]}
    first = run(tmp_path, engine=engine, candidates=["tilt[q=0.6]"])
    [recorded] = first.report["reference"]["ran"]["pythonpath"]
    assert recorded["folder"] == "shim"
    (shim / "unused_module.py").write_text("x = 2\n")
    again = run(tmp_path, engine=engine, candidates=["tilt[q=0.6]"])
    assert again.report["reference"]["ran"]["pythonpath"][0]["sha256"] != recorded["sha256"]
    assert str(tmp_path) not in json.dumps(again.report["reference"])


def test_a_candidate_whose_engine_is_not_installed_leaves_the_others_theirs_and_one_for_all_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES._table, "absent", "tests.run.test_run_arms:Absent")
    assert "engine absent is not installed" in refused(run(tmp_path, engine="absent", candidates=["tilt[q=0.6]"]))
    assert not list(tmp_path.glob("runs/2*"))
    done = run(tmp_path, candidates=["tilt[q=0.6]", "kv=exact,engine=absent,model=fake"])
    absent = done.arm("fake absent exact")
    assert absent["status"] == "not_supported"
    assert "engine absent is not installed" in absent["reason"]
    assert done.arm("tilt[q=0.6]")["status"] == "ok"


@pytest.mark.parametrize(("flags", "status"), [((), "not_supported"), (("--force",), "ok")])
def test_force_runs_what_the_engine_is_known_to_run_wrongly_and_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], status: str
) -> None:
    monkeypatch.setitem(ENGINES._table, "fake", "tests.run.test_run_arms:Fussy")
    done = compare(tmp_path, "garbage", "decay[b=0.6]", flags=(*flags, "--engine-arg", "family=geometric"))
    assert done.arm("garbage")["status"] == status
    assert done.arm("decay[b=0.6]")["status"] == "ok"
    if flags:
        assert done.arm("garbage")["verdict"]["band"] == "FAIL"


def test_what_was_forced_and_did_not_engage_fails_without_a_number_that_looks_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES._table, "fake", "tests.run.test_run_arms:Fussy")
    done = compare(tmp_path, "silent", flags=("--force",))
    arm = done.arm("silent")
    assert (arm["status"], arm["verdict"]["band"]) == ("not_engaged", "FAIL")
    assert arm["verdict"]["sentence"].startswith("do not use, something else ran")
    assert axis_of(arm, "kld").value("mean") is None
    assert compare(tmp_path / "unforced", "silent").arm("silent")["status"] == "not_supported"


def test_the_same_server_twice_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES._table, "fake", "tests.run.test_run_arms:Served")
    assert "which the floor does" in refused(run(tmp_path, candidates=["tilt[q=0.6]"]))
    assert run(tmp_path, candidates=["kv=exact,family=geometric"]).code == 0


def test_answers_of_a_server_are_not_found_again_by_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES._table, "fake", "tests.run.test_run_arms:Served")
    arms = {"candidates": ["kv=tilt[q=0.6],family=two-level"]}
    run(tmp_path, **arms)
    time.sleep(1.1)  # runs are told apart by the second
    done = run(tmp_path, **arms)
    captures = sorted((tmp_path / "runs" / "captures").glob("*/kld-*"))
    assert len(captures) == 4
    assert cli("compare", "--resume", done.folder, cwd=tmp_path).code == 0
    assert sorted((tmp_path / "runs" / "captures").glob("*/kld-*")) == captures  # the same run does find its own


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("http://127.0.0.1:8001/v1", "127.0.0.1:8001"),
        ("https://user:secret@gpu7:8000/v1/", "gpu7:8000"),
        ("https://host/openai/v1", "host/openai"),
        ("http://[::1]:80", "[::1]:80"),
    ],
)
def test_a_server_without_a_name_is_called_by_its_host(address: str, name: str) -> None:
    arm = ArmConfig(engine_args={"base-url": address, "concurrency": "4"})
    assert with_kv(arm, KVSpec.parse("server")).name == f"{name} concurrency=4"


def test_the_model_of_an_arm_on_a_server_is_what_the_server_calls_it() -> None:
    arm = ArmConfig(model="org/served-name", engine_args={"base-url": "http://h/v1"})
    served = served_name(arm, EngineConfig(name="openai"))
    assert served.model is None
    assert served.engine_args == {"base-url": "http://h/v1", "model": "org/served-name"}
    assert served_name(arm, EngineConfig(name="hf")) is arm
