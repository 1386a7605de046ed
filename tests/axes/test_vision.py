"""Axis vision and the vision checks: whole runs of tiny models for images, and what cannot be asked."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fidelab.captures.reader import Capture
from fidelab.captures.requests import ImageForced
from fidelab.inputs.images import draw, drawn_prompts, png
from fidelab.models.tiny import make_tiny
from fidelab.results.measurement import Measurement
from tests.engines.openai_server import serving
from tests.run.harness import Done, cli, write_inputs

pytest.importorskip("PIL", reason="Pillow is not installed (extra vision)")

from tests.engines.test_images import true_rows
from tests.engines.vision_server import served_vision
from tests.present import present
from tests.tiny_vision import make_tiny_vision

SIZES = ("--dtype", "float32", "--reference", "f32", "--threads", 1, "--no-floor")
INPUTS = ("--text", "text.txt", "--prompts", "prompts.txt")
FEW = ("--set", "axes.vision.limit=4", "--set", "axes.vision.n_predict=4")
LIMIT = 4


def run(cwd: Path, model: Path, axes: str, *flags: object, inputs: tuple[str, ...] = INPUTS) -> Done:
    write_inputs(cwd)
    few = FEW if "vision" in axes.split(",") else ()
    return cli("compare", model, "--engine", "hf", "--axes", axes, *SIZES, *inputs, *few, *flags, cwd=cwd)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, llava: Path, text_model: Path) -> Done:
    """A coarse cache, a second exact one, and a model that takes no images."""
    more = ("--kv", "int4", "--kv", "f32", "--candidate", f"model={text_model},name=words")
    found = run(
        *(tmp_path_factory.mktemp("run"), llava, "vision,trajectory", *more, "--control", "none"),
        *("--limit", 2, "--n-predict", 4, "--set", "axes.vision.n_predict=4", "--set", "axes.vision.limit=4"),
    )
    assert found.code in (0, 1), found.err
    return found


def value(found: Measurement, name: str) -> float:
    got = found.value(name)
    assert got is not None, name
    return got


def captured(done: Done, arm: str, part: str) -> Capture:
    """The reference's or a candidate's capture of a part of the axis."""
    outcomes = json.loads((done.folder / "outcomes.json").read_text())
    record = next(one for one in outcomes["arms"] if one["role"] == arm)
    return Capture((done.folder / record["captures"][f"vision.{part}"]).resolve())


def test_a_coarse_cache_loses_behind_images_and_an_exact_one_nothing(done: Done) -> None:
    coarse, exact = done.axis("int4", "vision"), done.axis("f32", "vision")
    assert (value(exact, "mean_kl"), value(exact, "same_answers")) == (0, 1)
    assert value(coarse, "mean_kl") > 1e-3
    metric = present(coarse.metric("mean_kl"))
    assert metric.interval is not None
    assert metric.interval[0] < value(coarse, "mean_kl") < metric.interval[1]
    assert (coarse.cluster, coarse.n_clusters) == ("image", LIMIT)
    assert value(coarse, "questions") == LIMIT
    assert done.arm("f32")["status"] == "identical"


def test_dependence_on_the_image_is_the_kl_between_right_and_wrong_of_one_model(done: Done, llava: Path) -> None:
    right, wrong = captured(done, "reference", "right"), captured(done, "reference", "wrong")
    total, tokens, tokenizer = 0.0, 0, AutoTokenizer.from_pretrained(llava)
    for item in range(LIMIT):
        rows = []
        for capture in (right, wrong):
            request = capture.request
            assert isinstance(request, ImageForced)
            image = base64.b64decode(request.images[request.shows[item][0]])
            text = tokenizer.decode(request.prompts[item])
            given = request.continuations[item]
            rows.append(true_rows(llava, text, image, given, len(given)).double())
        p, q = rows
        total, tokens = total + float((p.exp() * (p - q)).sum()), tokens + len(p)
    found = done.axis("int4", "vision")
    assert value(found, "dependence_wrong_reference") == pytest.approx(total / tokens, rel=1e-3)
    assert total / tokens > 1e-3  # the tiny model looks at the image


def test_all_three_texts_behind_images_are_the_same(done: Done) -> None:
    parts = {part: captured(done, "reference", part).request for part in ("right", "wrong", "none")}
    assert all(isinstance(request, ImageForced) for request in parts.values())
    right, wrong, none = parts.values()
    assert right.continuations == wrong.continuations == none.continuations  # type: ignore[union-attr]
    assert set(none.shows) == {()}  # type: ignore[union-attr]
    images = [[request.images[i] for (i,) in request.shows] for request in (right, wrong)]  # type: ignore[union-attr]
    assert all(a != b for a, b in zip(*images, strict=True))


def test_an_arm_that_takes_no_images_is_told_apart_and_answers_the_rest(done: Done, text_model: Path) -> None:
    words = done.arm("words")
    vision = words["axes"]["vision"]
    assert (vision["status"], vision["reason"]) == (
        "not_measurable",
        f"the config of {text_model} has no part for images",
    )
    assert words["axes"]["trajectory"]["status"] in ("ok", "identical")
    assert "no part for images" not in str(words["axes"]["trajectory"]["reason"])
    assert done.axis("int4", "trajectory").value("score") is not None


def test_a_reference_without_vision_is_one_line(tmp_path: Path, text_model: Path) -> None:
    found = run(tmp_path, text_model, "vision", "--kv", "int4")
    assert found.code == 2
    assert found.err == f"fidelab: vision: the config of {text_model} has no part for images\n"


def test_another_engine_refuses_images_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = ("compare", "fake", "--engine", "fake", "--reference", "exact", "--kv", "tilt[q=0.6]", *INPUTS)
    found = cli(*words, "--axes", "vision", cwd=tmp_path)
    assert (found.code, found.err) == (2, "fidelab: vision: engine fake takes no images\n")
    assert not (tmp_path / "runs").exists()


def test_a_model_that_does_not_look_is_said_to_be_blind(tmp_path: Path) -> None:
    blind = make_tiny_vision(tmp_path / "blind", blind=True)
    found = run(tmp_path, blind, "vision", "--kv", "int4", "--control", "none")
    assert found.code in (0, 1), found.err
    vision = found.axis("int4", "vision")
    assert value(vision, "dependence_wrong_reference") == 0
    assert vision.value("dependence_kept_wrong") is None
    assert any(flag.kind == "blind" and "wrong image" in flag.text for flag in vision.flags)


def compare_servers(cwd: Path, llava: Path, **changes: Any) -> Done:
    """A server, and one whose model has rounded weights."""
    write_inputs(cwd)
    rounded = cwd / "rounded"
    shutil.copytree(llava, rounded)
    weights = load_file(rounded / "model.safetensors")
    step = {name: weight.float().abs().max() / 7 for name, weight in weights.items()}
    coarse = {
        name: ((w.float() / step[name]).round() * step[name]).to(w.dtype) if "layers" in name and w.dim() > 1 else w
        for name, w in weights.items()
    }
    save_file(coarse, rounded / "model.safetensors", {"format": "pt"})
    with serving(served_vision(llava, **changes)) as one, serving(served_vision(rounded, **changes)) as other:
        return cli(
            *("compare", llava, "--engine", "openai", "--base-url", one.url, "--axes", "vision", "--no-floor", *INPUTS),
            *("--candidate", f"base-url={other.url},name=rounded", "--threads", 1, *FEW),
            cwd=cwd,
        )


def test_two_servers_are_compared_on_images(tmp_path: Path, llava: Path) -> None:
    found = compare_servers(tmp_path, llava)
    assert found.code == 0, found.err
    vision = found.axis("rounded", "vision")
    metric = present(vision.metric("mean_kl"))
    assert (metric.bound, metric.value is not None and metric.value > 0) == (True, True)
    assert vision.metric("dependence_kept_wrong") is None  # of bounds there is no share
    assert value(vision, "questions") == LIMIT
    assert (vision.n_failed, vision.metric("score")) == (0, None)


def test_servers_that_score_no_chats_are_compared_by_their_answers(tmp_path: Path, llava: Path) -> None:
    found = compare_servers(tmp_path, llava, scores=False)
    assert found.code == 0, found.err
    vision = found.axis("rounded", "vision")
    assert (vision.metric("mean_kl"), value(vision, "questions")) == (None, LIMIT)
    assert 0 <= value(vision, "same_answers") <= 1
    [flag] = vision.flags
    assert "gives no log-probabilities of prompts with images" in flag.text


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """A log whose conversations show the images of these URLs."""

    def write(*urls: str) -> tuple[str, ...]:
        lines = []
        for number, url in enumerate(urls):
            content: list[dict[str, Any]] = [{"type": "text", "text": f"secret question {number}"}]
            content.append({"type": "image_url", "image_url": {"url": url}})
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "an answer"}]
            lines.append(json.dumps({"id": f"c{number}", "messages": messages}))
        (tmp_path / "log.jsonl").write_text("\n".join(lines))
        return ("--traffic", "log.jsonl")

    return write


def data_url(color: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(draw(color, 'circle', 1, size=32))).decode()}"


def test_images_of_a_log_are_asked_about_with_those_of_the_others_as_wrong_ones(
    tmp_path: Path, llava: Path, log: Callable[..., tuple[str, ...]]
) -> None:
    inputs = log(data_url("red"), data_url("green"), data_url("blue"))
    found = run(tmp_path, llava, "vision", "--kv", "int4", "--control", "none", inputs=inputs)
    assert found.code in (0, 1), found.err
    vision = found.axis("int4", "vision")
    assert (value(vision, "questions"), vision.facts["images"]) == (3, "traffic")
    assert vision.value("answers_right") is None  # nobody knows
    right, wrong = (captured(found, "reference", part).request for part in ("right", "wrong"))
    images = [[request.images[i] for (i,) in request.shows] for request in (right, wrong)]  # type: ignore[union-attr]
    assert images[1] == [*images[0][1:], images[0][0]]
    written = [path for path in found.folder.rglob("*") if path.is_file()]
    assert not any(b"secret question" in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "https://example.org/a.png",
            "the image is at a remote address, which is not fetched: write it as a data: URL",
        ),
        ("data:image/png;base64,aGVsbG8=", "the image cannot be read: cannot identify image file"),
        ("data:image/png;base64,?", "the data: URL of the image is not valid base64"),
        ("file:///etc/passwd", "the image is no data: URL"),
    ],
    ids=["remote", "no image", "no base64", "file"],
)
def test_an_image_that_cannot_be_used_is_named_and_can_be_left_out(
    url: str, said: str, tmp_path: Path, llava: Path, log: Callable[..., tuple[str, ...]]
) -> None:
    inputs = log(data_url("red"), url)
    found = run(tmp_path, llava, "vision", "--kv", "int4", "--dry-run", inputs=inputs)
    assert found.code == 2
    assert f"images in 1 conversations that cannot be used: conversation c1: {said}" in found.err.replace("\n", " ")
    rest = run(tmp_path, llava, "vision", "--kv", "int4", "--dry-run", "--skip-bad", inputs=inputs)
    assert rest.code == 0, rest.err


def test_every_drawn_question_has_an_image_of_its_own_and_a_wrong_one_with_another_answer() -> None:
    prompts = drawn_prompts()
    assert len({prompt.images for prompt in prompts}) == len(prompts) == 16
    assert all(prompt.images != prompt.wrong and prompt.right not in prompt.others for prompt in prompts)
    assert drawn_prompts() == prompts


def test_a_drawn_file_is_what_was_drawn() -> None:
    import io

    import PIL.Image

    pixels = draw("green", "triangle", 2, size=48)
    with PIL.Image.open(io.BytesIO(png(pixels))) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)
