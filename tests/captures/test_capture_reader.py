"""Reading: a capture that was cut, edited or taken apart is refused by name."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fidelab.captures import reader
from fidelab.captures.container import BFloat16
from fidelab.captures.manifest import load_manifest
from fidelab.captures.reader import Capture, find_captures, is_complete
from fidelab.captures.writer import store_head
from fidelab.core.errors import CaptureError
from fidelab.core.serial import to_json
from tests.captures import sample
from tests.present import present

HEAD = {"weight": np.arange(32, dtype=np.float32).reshape(8, 4), "bias": np.ones(8, np.float32)}
PART = "part-00000.safetensors"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop(path: Path) -> None:
    path.unlink()


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return sample.write(tmp_path, head=HEAD, estimator="hidden")


def test_a_capture_says_what_it_was_given(capture: Path) -> None:
    opened = Capture(capture)
    assert (opened.axis, opened.estimator, len(opened.items)) == ("kld", "hidden", 3)
    assert opened.request == sample.WINDOWS
    assert opened.vocabulary == sample.vocabulary()
    assert opened.pieces() == sample.PIECES
    assert opened.manifest["asked"] == to_json(sample.ARM)


def test_generate_probes_come_back_as_they_went(tmp_path: Path) -> None:
    assert Capture(sample.write(tmp_path, request=sample.PROMPTS)).request == sample.PROMPTS


def test_rows_are_read_in_slices_as_float32(tmp_path: Path) -> None:
    out = sample.writer(tmp_path)
    bits = np.arange(0x3F80, 0x3F80 + 12, dtype=np.uint16).reshape(4, 3)
    for item in range(3):
        out.add(item, {"hidden": BFloat16(bits), "ids": np.array([4, 5], np.int32)})
    opened = Capture(out.finish("logprobs", {}, {}))
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(opened.floats(2, "hidden", 1, 3), expected[1:3])
    assert opened.array_shape(2, "hidden") == (4, 3)
    assert opened.ints(0, "ids") == [4, 5]
    assert sorted(opened.names(1)) == ["hidden", "ids"]


@pytest.mark.parametrize("harm", [cut, flip, drop])
@pytest.mark.parametrize("file", [PART, "probe.json.gz", "manifest.json"])
def test_a_harmed_file_is_refused_by_name(harm: Callable[[Path], None], file: str, capture: Path) -> None:
    harm(capture / file)
    with pytest.raises(CaptureError) as caught:
        Capture(capture)
    assert str(capture) in str(caught.value)
    assert file in str(caught.value)
    assert not is_complete(capture)


@pytest.mark.parametrize("harm", [cut, flip, drop])
def test_a_harmed_head_is_refused_by_name(harm: Callable[[Path], None], capture: Path, tmp_path: Path) -> None:
    [head] = (tmp_path / "heads").iterdir()
    harm(head)
    with pytest.raises(CaptureError) as caught:
        Capture(capture)
    assert str(capture) in str(caught.value)
    assert head.name in str(caught.value)
    assert not is_complete(capture)


@pytest.mark.parametrize("harm", [cut, flip, drop])
def test_a_harmed_vocabulary_is_refused_by_name(harm: Callable[[Path], None], capture: Path, tmp_path: Path) -> None:
    [words] = (tmp_path / "vocabularies").iterdir()
    harm(words)
    with pytest.raises(CaptureError, match=words.name):
        Capture(capture).pieces()


@pytest.fixture
def settled(capture: Path) -> Path:
    """A capture whose files are older than a tick of the file system's clock, so that a check of it is remembered."""
    time.sleep(2e-9 * reader._SETTLED)
    assert is_complete(capture)
    assert capture in reader._complete
    return capture


@pytest.mark.parametrize("harm", [cut, flip, drop])
@pytest.mark.parametrize("file", [PART, "probe.json.gz", "manifest.json", "head"])
def test_damage_after_a_first_reading_is_seen(
    harm: Callable[[Path], None], file: str, settled: Path, tmp_path: Path
) -> None:
    [head] = (tmp_path / "heads").iterdir()
    harm(head if file == "head" else settled / file)
    assert not is_complete(settled)


def test_a_capture_that_did_not_change_is_not_read_again(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Capture(settled).manifest["key"]
    monkeypatch.setattr(reader, "Capture", lambda folder: pytest.fail(f"{folder} was read"))
    assert is_complete(settled, key)
    assert not is_complete(settled, {**key, "replicate": 7})


def test_a_capture_of_another_key_is_not_the_one_that_is_wanted(capture: Path) -> None:
    key = Capture(capture).manifest["key"]
    assert is_complete(capture, key)
    assert not is_complete(capture, {**key, "replicate": 1})


def test_an_edited_value_or_another_schema_in_the_manifest_is_refused(capture: Path) -> None:
    path = capture / "manifest.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "gpu"'))
    with pytest.raises(CaptureError, match=r"manifest\.json was edited"):
        load_manifest(capture)
    sample.rewrite_manifest(capture, schema="fidelab.capture/9")
    with pytest.raises(CaptureError, match=r"fidelab\.capture/9.*fidelab\.capture/0"):
        Capture(capture)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"checksum": 1}', '"text"'])
def test_json_that_is_not_a_manifest_is_refused(content: str, capture: Path) -> None:
    (capture / "manifest.json").write_text(content)
    with pytest.raises(CaptureError, match=r"manifest\.json"):
        Capture(capture)


@pytest.mark.parametrize(
    "changes",
    [{"estimator": "guess"}, {"vocabulary": {}}, {"vocabulary": 3}],
    ids=["estimator", "no-field", "no-record"],
)
def test_a_manifest_that_misstates_something_is_refused(changes: dict[str, object], capture: Path) -> None:
    sample.rewrite_manifest(capture, **changes)
    with pytest.raises(CaptureError, match="lacks or misstates"):
        Capture(capture)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", ".."])
def test_a_file_name_in_a_manifest_cannot_leave_the_folder(name: str, capture: Path, tmp_path: Path) -> None:
    secret = capture.parent / "secret"
    secret.write_text("x")
    files = json.loads((capture / "manifest.json").read_text())["files"]
    sha = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    sample.rewrite_manifest(capture, files=[*files, {"name": name, "bytes": 1, "sha256": sha}])
    with pytest.raises(CaptureError, match="missing or truncated"):
        Capture(capture)


def test_a_head_name_in_a_manifest_cannot_leave_its_folder(capture: Path, tmp_path: Path) -> None:
    record = json.loads((capture / "manifest.json").read_text())["head"]
    outside = tmp_path / record["file"]
    (tmp_path / "heads" / record["file"]).rename(outside)
    sample.rewrite_manifest(capture, head={**record, "file": f"../{record['file']}"})
    with pytest.raises(CaptureError, match="is missing next to it"):
        Capture(capture)


@pytest.mark.parametrize("depth", ["store", "arm", "capture"])
def test_heads_are_found_when_a_capture_is_copied_with_them(depth: str, capture: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    base = {"store": away, "arm": away / capture.parent.name, "capture": away / capture.parent.name / capture.name}[
        depth
    ]
    target = away / capture.parent.name / capture.name
    shutil.copytree(capture, target)
    for kind in ("heads", "vocabularies"):
        shutil.copytree(tmp_path / kind, base / kind)
    opened = Capture(target)
    assert present(opened.head).path.is_relative_to(away)
    weight, bias = present(opened.head).load()
    np.testing.assert_array_equal(weight, HEAD["weight"])
    assert bias is not None
    np.testing.assert_array_equal(bias, HEAD["bias"])


def test_a_capture_copied_without_its_head_says_what_to_copy(capture: Path, tmp_path: Path) -> None:
    shutil.copytree(capture, tmp_path / "far" / "away" / "from" / "home")
    with pytest.raises(CaptureError, match=r"heads/.* is missing next to it; copy it along"):
        Capture(tmp_path / "far" / "away" / "from" / "home")


def test_captures_are_found_in_name_order_at_any_depth_and_a_missing_path_is_named(tmp_path: Path) -> None:
    folders = [sample.write(tmp_path / "s", sample.named(kv), replicate=n) for kv in ("b", "a") for n in (1, 0)]
    assert list(find_captures(tmp_path)) == sorted(folders)
    assert list(find_captures(folders[0])) == [folders[0]]
    with pytest.raises(CaptureError, match="nowhere does not exist"):
        Capture(tmp_path / "nowhere")


def test_a_capture_that_lost_its_manifest_is_found_and_refused(capture: Path, tmp_path: Path) -> None:
    drop(capture / "manifest.json")
    assert list(find_captures(tmp_path)) == [capture]
    with pytest.raises(CaptureError, match=r"no manifest\.json"):
        Capture(capture)


def test_a_heads_soft_cap_and_scale_travel_with_the_capture(tmp_path: Path) -> None:
    out = sample.writer(tmp_path)
    for item in range(3):
        out.add(item, {"hidden": np.zeros((2, 4), np.float32)})
    out.head(store_head(tmp_path, HEAD, 30.0, 0.5))
    head = Capture(out.finish("hidden", {}, {})).head
    assert (present(head).softcap, present(head).scale) == (30.0, 0.5)
