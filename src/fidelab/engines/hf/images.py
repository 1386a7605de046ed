"""Read images through a model's own processor: its pixels, and the tokens that it puts in an image's place."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fidelab.captures.requests import ImageForced, ImageGenerate, Tokens
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.engines.base import Sink, add_sequence, one_line
from fidelab.engines.hf.generate import greedy
from fidelab.engines.hf.model import HFModel

if TYPE_CHECKING:
    from torch import Tensor


def answer_images(model: HFModel, request: ImageGenerate | ImageForced, sink: Sink) -> dict[str, Any]:
    """Answer a request item by item. The facts name the processor and the number of image tokens.

    Raises:
        NotSupportedError: If the model takes no images, or Pillow is not installed.
        EngineError: If its processor cannot be loaded.
    """
    images = _Images(model, request)
    read = produced = 0
    for index in range(len(request.prompts)):
        try:
            ids, pixels = images.inputs(index)
        except EngineError as error:
            sink.fail(index, str(error))
            continue
        if isinstance(request, ImageForced):
            _force(model, request, index, ids, pixels, sink)
        else:
            [(generated, rows, failed)] = greedy(model, request, [ids], sink, images=pixels or None)
            add_sequence(sink, index, generated, rows, failed)
            produced += len(generated)
        read += len(ids)
    return {
        "tokens": read + produced,
        **({"generated": produced} if isinstance(request, ImageGenerate) else {"one_prefill": True}),
        "image_tokens": images.tokens,
        "image_processor": images.name,
    }


class _Images:
    """The processor of a model, and the images of a request as it reads them."""

    def __init__(self, model: HFModel, request: ImageGenerate | ImageForced) -> None:
        if find_spec("PIL") is None:
            raise NotSupportedError("engine hf takes images with Pillow: pip install 'fidelab[vision]'")
        self._model, self._request = model, request
        self.tokens = 0
        self._processor = model.processor()
        self.name = type(getattr(self._processor, "image_processor", self._processor)).__name__

    def inputs(self, index: int) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids of an item with the tokens of its images, and further model inputs (empty without images).

        Raises:
            EngineError: If the processor refuses the item, or its prompt tokens differ from the request's.
        """
        request, tokenizer = self._request, self._model.tokenizer
        prompt = request.prompts[index]
        after: Tokens = request.continuations[index] if isinstance(request, ImageForced) else ()
        if not request.shows[index]:
            return [*prompt, *after], {}
        text = tokenizer.decode(list(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tuple(tokenizer.encode(text, add_special_tokens=False)) != prompt:
            raise EngineError("the prompt's text gives other tokens than the prompt has")
        try:
            shown = [_opened(request.images[i]) for i in request.shows[index]]
            found = dict(self._processor(text=[text], images=[shown], return_tensors="pt", add_special_tokens=False))
        except Exception as error:  # processors and Pillow raise errors of any kind
            raise EngineError(f"the image cannot be read by the model's processor: {one_line(error)}") from error
        ids = [int(token) for token in found.pop("input_ids")[0]]
        found.pop("attention_mask", None)
        if len(ids) < len(prompt):
            raise EngineError("the model's processor leaves out tokens of the prompt")
        self.tokens += len(ids) - len(prompt) + len(shown)
        return [*ids, *after], self._model.inputs(found, len(ids), len(after))


def _opened(image: str) -> Any:
    import PIL.Image

    with PIL.Image.open(io.BytesIO(base64.b64decode(image))) as file:
        return file.convert("RGB")


def _force(
    model: HFModel, request: ImageForced, index: int, ids: Sequence[int], pixels: Mapping[str, Tensor], sink: Sink
) -> None:
    given = request.continuations[index]
    if not given:
        add_sequence(sink, index, (), failed="empty continuation")
        return
    keep = len(given) + 1  # the state after the last token predicts no given token
    logits, states = model.forward(model.tensor([ids]), model.new_cache(), keep=keep, more=pixels or None)
    if not model.sentinels:
        model.check_replay(states[0, -keep:], logits[0])
    rows = model.rows(states[0, -keep:-1], logits[0, :-1])
    add_sequence(sink, index, given, model.stored(rows))
    sink.progress(len(ids))
