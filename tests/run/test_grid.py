"""The cells of a grid among the arms of a plan; what an engine refuses, and what nobody could run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.experiment import validate
from fidelab.core.errors import ConfigError, UnknownNameError, UsageError
from fidelab.plan.build import Plan
from fidelab.plan.prepare import prepare
from fidelab.plan.resolve import Settings, resolve_experiment

KLD = {"kld": {"windows": 8, "n_ctx": 32}}
FAKE: dict[str, Any] = {"model": "fake", "engine": "fake", "reference": "exact", "control": "none", "axes": KLD}


def settings(tmp_path: Path, **change: Any) -> Settings:
    return resolve_experiment(validate({**FAKE, "output_dir": str(tmp_path), **change}, "test"))


def plan(tmp_path: Path, **change: Any) -> Plan:
    return prepare(validate({**FAKE, "output_dir": str(tmp_path), **change}, "test")).plan


def test_cells_come_after_the_other_candidates_and_have_the_references_format_without_one(tmp_path: Path) -> None:
    found = settings(tmp_path, candidates=["decay"], vary=["kv=exact,tilt", "margin=1,2"]).candidates
    cells = [(kv, margin) for kv in ("exact", "tilt") for margin in ("1", "2")]
    assert [arm.name for arm in found] == ["decay", *(f"kv={kv}, margin={margin}" for kv, margin in cells)]
    assert [(arm.kv.label, dict(arm.options)) for arm in found[1:]] == [(kv, {"margin": m}) for kv, m in cells]
    found = settings(tmp_path, reference="tilt[q=0.55]", vary=["margin=1,2"]).candidates
    assert [(arm.name, arm.kv.label) for arm in found] == [("margin=1", "tilt[q=0.55]"), ("margin=2", "tilt[q=0.55]")]


def test_the_cell_that_is_the_reference_is_captured_again(tmp_path: Path) -> None:
    jobs = {job.role: job for job in plan(tmp_path, vary=["kv=exact,tilt"]).jobs}
    assert jobs["candidate:kv=exact"].arm.fingerprint() == jobs["reference"].arm.fingerprint()
    assert jobs["candidate:kv=exact"].replicate != jobs["reference"].replicate


def test_a_cell_that_the_engine_refuses_is_not_supported_and_the_others_run(tmp_path: Path) -> None:
    found = plan(tmp_path, vary=["kv=exact,refused", "margin=1,2"])
    assert set(found.settings.unsupported) == {"kv=refused, margin=1", "kv=refused, margin=2"}
    asked = [job.role for job in found.jobs if job.role.startswith("candidate")]
    assert asked == ["candidate:kv=exact, margin=1", "candidate:kv=exact, margin=2"]


def test_levels_that_go_together_in_some_cells_alone_leave_the_other_cells_unsupported(tmp_path: Path) -> None:
    found = settings(tmp_path, vary=["mask=on,off", "estimator=hidden,logprobs"])
    assert set(found.unsupported) == {"mask=on, estimator=hidden"}
    assert "no hidden state gives the logit" in found.unsupported["mask=on, estimator=hidden"]


def test_a_format_that_one_of_the_engines_lacks_is_not_supported_there(
    tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    folder = str(make_folder(tmp_path / "tiny"))
    base = {"model": folder, "engine": "hf", "reference": "f32", "dtype": "float32"}
    found = settings(tmp_path, **base, vary=["engine=hf,llamacpp", "kv=q8_0,int8"])
    assert "engine=llamacpp, kv=int8" in found.unsupported
    assert not [name for name in found.unsupported if name.startswith("engine=hf")]


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        (["foo=1,2"], "engine fake has no option 'foo'"),
        (["family=two-level,round"], "family=round cannot be"),
        (["kv=exact,tilt[q=2]"], "q=2 cannot be"),
        (["kv=exact,tilt[q"], "write a name, K/V, or options in brackets"),
        (["engine=fake,fakes"], "fakes"),
        (["kv=exact,tild"], "'tild'"),
        (["kv=exact,decay"], "given twice"),
    ],
)
def test_a_level_that_no_cell_can_have_and_a_candidate_that_is_one_already_are_mistakes(
    vary: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, ConfigError, UnknownNameError), match=says.replace("[", r"\[")):
        settings(tmp_path, candidates=["decay"], vary=vary)
