"""Images on engines hf and openai, against Transformers' own forward of tiny models."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fidelab.captures.requests import ImageForced, ImageGenerate, request_from_record, request_hash, request_record
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.engines.base import Answer
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.model import HFModel
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from fidelab.engines.openai.adapter import OpenAIEngine
from fidelab.inputs.images import draw, png
from fidelab.models.tiny import make_tiny
from tests.engines.openai_server import Served, serving
from tests.engines.tiny import Answers, arm, hidden, ids, opened, replayed
from tests.engines.vision_server import served_vision

pytest.importorskip("PIL", reason="Pillow is not installed (extra vision)")

from tests.tiny_vision import make_tiny_vision, make_tiny_vl

RIGHT, WRONG = png(draw("red", "circle", 1, size=32)), png(draw("blue", "square", 2, size=32))
IMAGES = tuple(base64.b64encode(image).decode() for image in (RIGHT, WRONG))
QUESTION = "Which color?"
STOP = (1,)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("llava"))


class Asked:
    """A question about images in a model's tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content}]
        self.text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        self.ids = tuple(self.tokenizer.encode(self.text, add_special_tokens=False))
        self.image = max(i for i, token in enumerate(self.ids) if token >= 512)
        self.at = self.image + 1 + self.ids[self.image + 1 :].index(self.tokenizer.encode("Which")[0])
        words = list(self.tokenizer.encode(QUESTION, add_special_tokens=False))
        self.answer = tuple(self.tokenizer.encode("a red one", add_special_tokens=False))
        self.messages = [{"role": "user", "content": [{"type": "image"}, words]}]

    def forced(self) -> ImageForced:
        """The text behind the image, with the right image, a wrong one, and none."""
        answer = self.answer
        said = [*self.messages, {"role": "assistant", "content": [list(answer)]}]
        blind = [{"role": "user", "content": self.messages[0]["content"][1:]}, said[-1]]
        none = tuple(token for token in self.ids[: self.image] if token < 512)
        return ImageForced(
            "vision.right",
            (self.ids[: self.at], self.ids[: self.at], none),
            ((*self.ids[self.at :], *answer),) * 3,
            images=IMAGES,
            shows=((0,), (1,), ()),
            messages=(json.dumps(said), json.dumps(said), json.dumps(blind)),
        )

    def generate(self, n: int = 8) -> ImageGenerate:
        return ImageGenerate(
            *("vision.answer", (self.ids, self.ids), n, STOP),
            images=IMAGES,
            shows=((0,), (1,)),
            messages=(json.dumps(self.messages),) * 2,
        )


def true_rows(
    folder: Path, text: str, image: bytes, after: tuple[int, ...], n: int, processor: Any = None
) -> torch.Tensor:
    """Log-probabilities of the last ``n`` tokens of a text with an image and ``after``, by Transformers alone."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = _processed(processor or transformers.AutoProcessor.from_pretrained(folder), text, image)
    more = torch.tensor([after], dtype=torch.long)
    read = torch.cat((inputs.pop("input_ids"), more), dim=1)
    inputs = {
        name: torch.nn.functional.pad(value, (0, len(after))) if name == "mm_token_type_ids" else value
        for name, value in inputs.items()
        if name != "attention_mask"
    }
    with torch.no_grad():
        rows: torch.Tensor = model(input_ids=read, **inputs).logits[0].log_softmax(-1)
    return rows[-n - 1 : -1]


def _processed(processor: Any, text: str, image: bytes) -> dict[str, Any]:
    import io

    import PIL.Image

    picture = PIL.Image.open(io.BytesIO(image)).convert("RGB")
    return dict(processor(text=[text], images=[picture], return_tensors="pt", add_special_tokens=False))


def answered(engine: HFEngine | OpenAIEngine, request: ImageForced | ImageGenerate) -> tuple[Answers, Answer]:
    sink = Answers()
    return sink, engine.answer(request, sink)


def test_an_image_is_part_of_the_request_and_of_its_key(llava: Path) -> None:
    request = Asked(llava).forced()
    assert request_from_record(json.loads(json.dumps(request_record(request)))) == request
    other = ImageForced(**{**_fields(request), "images": (IMAGES[1], IMAGES[1])})
    assert request_hash(other) != request_hash(request)
    right, wrong, none = request.items()
    assert len({right, wrong, none}) == 3
    assert right[-5:] == wrong[-5:] == none[-5:]
    assert request.select([1]).items() == (wrong,)


@pytest.mark.parametrize(
    "change",
    [{"images": ("no base64!",)}, {"shows": ((7,), (0,), ())}, {"messages": ("[]",)}, {"shows": ((0,),)}],
    ids=["no base64", "no such image", "a conversation is lacking", "shows are lacking"],
)
def test_a_record_that_is_no_request_with_images_is_refused(llava: Path, change: dict[str, Any]) -> None:
    record = {**request_record(Asked(llava).forced()), **change}
    with pytest.raises(ValueError, match="is not what it should be"):
        request_from_record(json.loads(json.dumps(record)))


def _fields(request: ImageForced) -> dict[str, Any]:
    return {name: value for name, value in vars(request).items() if name != "kind"}


def test_rows_behind_an_image_are_those_of_transformers(llava: Path) -> None:
    asked, engine = Asked(llava), opened(llava)
    request = asked.forced()
    sink, answer = answered(engine, request)
    assert not sink.failed
    n, after = len(request.continuations[0]), asked.answer
    for item, image in enumerate((RIGHT, WRONG)):
        expected = true_rows(llava, asked.text, image, after, n)
        found = replayed(answer, sink.items[item]).log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    facts = answer.facts
    assert (facts["image_tokens"], facts["image_processor"]) == (8, "CLIPImageProcessorPil")
    assert engine.runtime_info().more["proof"]["received"] == "shown"


def test_right_wrong_and_no_image_give_three_distributions(llava: Path) -> None:
    sink, _ = answered(opened(llava), Asked(llava).forced())
    right, wrong, none = (hidden(sink.items[item]) for item in range(3))
    assert right.shape == wrong.shape == none.shape
    assert not torch.allclose(right, wrong)
    assert not torch.allclose(right, none)


def test_greedy_answers_about_an_image_are_those_of_generate(llava: Path) -> None:
    asked = Asked(llava)
    sink, _ = answered(opened(llava), asked.generate())
    model = transformers.AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(llava)
    for item, image in enumerate((RIGHT, WRONG)):
        inputs = _processed(processor, asked.text, image)
        whole = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
        assert ids(sink.items[item]) == whole[inputs["input_ids"].shape[1] :].tolist()


def test_a_coarse_cache_changes_what_stands_behind_an_image(llava: Path) -> None:
    request = Asked(llava).forced()
    exact, _ = answered(opened(llava), request)
    engine = opened(llava, "int4")
    coarse, _ = answered(engine, request)
    assert not torch.allclose(hidden(exact.items[0]), hidden(coarse.items[0]))
    ran = engine.runtime_info()
    assert (ran.k_format, ran.more["proof"]["stored"]) == ("int4", "shown")


def test_an_image_that_cannot_be_read_fails_its_item_alone(llava: Path) -> None:
    request = Asked(llava).forced()
    broken = base64.b64encode(RIGHT[:100]).decode()
    sink, _ = answered(opened(llava), ImageForced(**{**_fields(request), "images": (broken, IMAGES[1])}))
    assert list(sink.failed) == [0]
    assert sink.failed[0].startswith("the image cannot be read by the model's processor")
    assert {*sink.items} == {1, 2}


def test_a_model_for_text_takes_no_images(tmp_path: Path, llava: Path) -> None:
    text = make_tiny(tmp_path / "text")
    assert HFEngine.images_refused(arm(text)) == "the config of text has no part for images"
    assert HFEngine.images_refused(arm(llava)) == ""
    with pytest.raises(NotSupportedError, match="llama takes no images"):
        answered(opened(text), Asked(llava).generate())


def test_an_engine_without_images_says_so_by_name(llava: Path) -> None:
    assert LlamaCppEngine.images_refused(arm(llava)) == "engine llamacpp takes no images"


def test_positions_in_rows_and_columns_are_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_tiny_vl(tmp_path)
    monkeypatch.setattr(HFModel, "processor", lambda _self: processor)
    asked = Asked(tmp_path)
    request = asked.forced()
    sink, answer = answered(opened(tmp_path), request)
    assert not sink.failed
    rows = [replayed(answer, sink.items[item]).log_softmax(-1) for item in (0, 1)]
    n = len(request.continuations[0])
    for found, image in zip(rows, (RIGHT, WRONG), strict=True):
        expected = true_rows(tmp_path, asked.text, image, asked.answer, n, processor)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(rows[0], rows[1], atol=1e-3)
    generated, _ = answered(opened(tmp_path), asked.generate())
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = _processed(processor, asked.text, RIGHT)
    whole = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    assert ids(generated.items[0]) == whole[inputs["input_ids"].shape[1] :].tolist()


def remote(folder: Path, served: Served) -> OpenAIEngine:
    engine = OpenAIEngine()
    kv = KVSpec.parse("as-served")
    options = (("base-url", served.url),)
    engine.open(Arm("as-served", "openai", "tiny", str(folder), "0" * 8, kv, "float32", "cpu", 1, options))
    return engine


def test_a_server_gets_the_image_itself_and_answers_as_engine_hf(llava: Path) -> None:
    asked = Asked(llava)
    with serving(served_vision(llava)) as served:
        sink, _ = answered(remote(llava, served), asked.generate())
        chats = [body["messages"] for body in served.requests if "messages" in body]
    local, _ = answered(opened(llava), asked.generate())
    assert [ids(sink.items[i]) for i in (0, 1)] == [ids(local.items[i]) for i in (0, 1)]
    parts = sorted((chat[0]["content"] for chat in chats), key=lambda chat: IMAGES.index(_data(chat)))
    assert [_data(content) for content in parts] == [*IMAGES]
    assert {content[1]["text"] for content in parts} == {QUESTION}


def _data(content: list[dict[str, Any]]) -> str:
    return str(content[0]["image_url"]["url"]).removeprefix("data:image/png;base64,")


def test_a_server_scores_text_behind_images_as_engine_hf_does(llava: Path) -> None:
    request = Asked(llava).forced()
    with serving(served_vision(llava)) as served:
        sink, answer = answered(remote(llava, served), request)
    assert (sink.failed, answer.facts["one_prefill"]) == ({}, True)
    local, own = answered(opened(llava), request)
    for item in range(3):
        rows = replayed(own, local.items[item]).log_softmax(-1)
        tops, values = (np.asarray(sink.items[item][name]) for name in ("topk_ids", "topk_logprobs"))
        assert len(tops) == len(request.continuations[item])
        for row, some, logprobs in zip(rows, tops, values, strict=True):
            known = some >= 0
            np.testing.assert_allclose(row.numpy()[some[known]], logprobs[known], atol=1e-4)


def test_a_server_without_scores_of_chats_still_answers(llava: Path) -> None:
    asked = Asked(llava)
    with serving(served_vision(llava, scores=False)) as served:
        engine = remote(llava, served)
        sink, answer = answered(engine, asked.forced())
        answers, _ = answered(engine, asked.generate())
    assert "gives no log-probabilities of prompts with images" in answer.facts["not_measurable"]
    assert {*sink.failed} == {0, 1, 2}
    assert not answers.failed


def test_text_that_a_server_reads_as_other_tokens_is_refused(llava: Path) -> None:
    asked = Asked(llava)
    request = asked.forced()
    other = tuple((*ids[:-1], 5) for ids in request.continuations[:1])  # not what its conversation says
    changed = ImageForced(**{**_fields(request), "continuations": (*other, *request.continuations[1:])})
    with serving(served_vision(llava)) as served:
        sink, _ = answered(remote(llava, served), changed)
    assert "a different token" in sink.failed[0]
    assert {*sink.items} == {1, 2}
