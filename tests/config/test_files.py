"""Candidates that name several files by a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.config.experiment import validate
from fidelab.core.errors import ConfigError
from tests.models.tiny_gguf import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five models of one family, one of them split, and a vision tower."""
    for name in ("F16", "Q8_0", "Q4_K_M", "IQ2_XS", "Q6_K-00001-of-00002", "Q6_K-00002-of-00002"):
        write_gguf(tmp_path / f"tiny-1.5-{name}.gguf")
    write_gguf(tmp_path / "mmproj-tiny-1.5.gguf", architecture="clip")
    return tmp_path


def expanded(folder: Path, pattern: str, base: str = "tiny-1.5-F16.gguf", **more: str) -> dict[str, str]:
    """Name → file name of each candidate."""
    data = {"model": str(folder / base), "engine": "llamacpp", "candidates": [{"model": str(folder / pattern), **more}]}
    found = validate(data, "test").candidates
    return {str(arm.name): Path(str(arm.model)).name for arm in found}


def test_a_pattern_is_a_candidate_per_model_named_by_what_differs_without_the_reference(folder: Path) -> None:
    assert expanded(folder, "*.gguf") == {
        "IQ2_XS": "tiny-1.5-IQ2_XS.gguf",
        "Q4_K_M": "tiny-1.5-Q4_K_M.gguf",
        "Q6_K": "tiny-1.5-Q6_K-00001-of-00002.gguf",
        "Q8_0": "tiny-1.5-Q8_0.gguf",
    }


def test_one_file_is_named_as_it_differs_from_the_reference(folder: Path) -> None:
    assert expanded(folder, "*Q4*.gguf") == {"Q4_K_M": "tiny-1.5-Q4_K_M.gguf"}


def test_names_do_not_depend_on_a_reference_of_another_name(folder: Path) -> None:
    other = write_gguf(folder / "base.gguf")
    assert set(expanded(folder, "tiny*.gguf", other.name)) == {"F16", "IQ2_XS", "Q4_K_M", "Q6_K", "Q8_0"}


def test_a_cache_format_holds_for_every_file_and_is_part_of_its_name(folder: Path) -> None:
    assert set(expanded(folder, "*Q[48]*.gguf", kv="q8_0")) == {"Q4_K_M q8_0", "Q8_0 q8_0"}


def test_the_text_form_of_the_command_line_is_expanded(folder: Path) -> None:
    data = {
        "model": str(folder / "tiny-1.5-F16.gguf"),
        "engine": "llamacpp",
        "candidates": [f"model={folder}/*Q8*.gguf"],
    }
    assert [arm.name for arm in validate(data, "test").candidates] == ["Q8_0"]


def test_a_vision_tower_is_left_out_and_the_line_says_what_it_is(folder: Path) -> None:
    data = {"model": str(folder / "tiny-1.5-F16.gguf"), "candidates": [{"model": str(folder / "*.gguf")}]}
    [line] = validate(data, "test").left_out
    assert line.startswith("left out: mmproj-tiny-1.5.gguf is the vision part")


@pytest.mark.parametrize("pattern", ["*.none.gguf", "mmproj*.gguf", "*F16*.gguf"])
def test_a_pattern_without_a_model_is_refused_in_one_line(pattern: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="matches no GGUF model") as found:
        expanded(folder, pattern)
    assert "\n" not in str(found.value)


def test_one_name_for_several_files_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"would name 4 files of .*: omit name"):
        expanded(folder, "*.gguf", name="mine")


def test_models_of_one_name_in_several_folders_are_named_by_their_folders(tmp_path: Path) -> None:
    for name in ("one", "two", "base"):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "model.gguf")
    assert set(expanded(tmp_path, "*/model.gguf", "base/model.gguf")) == {"one/model", "two/model"}
