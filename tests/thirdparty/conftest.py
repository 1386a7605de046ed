"""A package besides fidelab, installed: its metadata lies on the path of this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fidelab.core import registry
from tests.run.harness import Done, cli, write_inputs

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    site = tmp_path_factory.mktemp("site")
    info = site / "thirdparty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1\n")
    shutil.copy(Path(__file__).with_name("entry_points.txt"), info)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(_ROOT))))  # of workers, too
        registry._foreign.cache_clear()
        yield
    registry._foreign.cache_clear()


@pytest.fixture(scope="package")
def run(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Beside ours the third party's axis and bench, on the fake engine; a candidate ends every fourth answer early."""
    cwd = tmp_path_factory.mktemp("thirdparty")
    write_inputs(cwd)
    (cwd / "exp.yaml").write_text(
        "model: fake\nengine: fake\nreference: exact\ncontrol: 'tilt[q=0.52]'\n"
        "candidates: ['short[at=3,every=4]', exact]\ntext: text.txt\nprompts: prompts.txt\n"
        "axes:\n  kld: {windows: 8, n_ctx: 16}\n  trajectory: {n_predict: 8}\n  length: {n_predict: 8}\n"
        "benches:\n  first_word: {}\n"
    )
    done = cli("compare", "-f", "exp.yaml", cwd=cwd)
    assert done.code == 0, done.err
    return done
