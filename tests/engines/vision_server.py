"""A tiny model for images behind the API of a server: Transformers answers, in vLLM's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engines.openai_server import Served

__all__ = ["VisionModel", "served_vision"]


class VisionModel:
    """Answers to POSTs.  ``scores``: whether it gives log-probabilities of a chat's prompt."""

    def __init__(self, folder: Path, *, scores: bool = True) -> None:
        self._scores = scores
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = transformers.AutoProcessor.from_pretrained(folder)

    def __call__(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        match path:
            case "/tokenize":
                return {"tokens": self._processor.tokenizer.encode(body["prompt"], add_special_tokens=False)}
            case "/v1/completions":
                return self._completion(body, {"input_ids": torch.tensor([body["prompt"]])})
            case "/v1/chat/completions":
                return self._completion(body, self._inputs(body))
        return None

    def _inputs(self, body: dict[str, Any]) -> dict[str, Any]:
        images, messages = [], []
        for message in body["messages"]:
            content = message["content"]
            for part in [] if isinstance(content, str) else content:
                if part["type"] == "image_url":
                    head, _, data = part["image_url"]["url"].partition(",")
                    assert head == "data:image/png;base64"
                    images.append(transformers.image_utils.load_image(data))
                    part["type"] = "image"
            messages.append(message)
        goes_on = bool(body.get("continue_final_message"))
        text = self._processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        return dict(self._processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False))

    @torch.no_grad()
    def _completion(self, body: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        prompt = inputs["input_ids"][0].tolist()
        stop = set(body.get("stop_token_ids") or ())
        read, generated, tops = {**inputs}, list[int](), list[torch.Tensor]()
        while len(generated) < body["max_tokens"] and not stop.intersection(generated):
            rows = self._model(**read).logits[0].float().log_softmax(-1)
            if not generated and (top := body.get("prompt_logprobs")) is not None:
                scored = [None, *(_entries(row, top, token) for row, token in zip(rows, prompt[1:], strict=False))]
            tops.append(rows[-1])
            generated.append(int(rows[-1].argmax()))
            more = torch.tensor([[generated[-1]]])
            read = {**inputs, "input_ids": torch.cat((read["input_ids"], more), dim=1)}
            read.pop("attention_mask", None)
        text = self._processor.tokenizer.decode([token for token in generated if token not in stop])
        ended = "stop" if stop.intersection(generated) else "length"
        choice: dict[str, Any] = {"finish_reason": ended, "token_ids": generated, "logprobs": None}
        answer: dict[str, Any] = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(generated)},
        }
        chat = "messages" in body
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("prompt_logprobs") is not None and (self._scores or not chat):
            (answer if chat else choice)["prompt_logprobs"] = scored
        if body.get("logprobs") and not chat:
            named = [_entries(row, body["logprobs"], token) for row, token in zip(tops, generated, strict=True)]
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in generated],
                "token_logprobs": [row[str(token)]["logprob"] for row, token in zip(named, generated, strict=True)],
                "top_logprobs": [{f"token_id:{t}": e["logprob"] for t, e in row.items()} for row in named],
            }
        return answer


def _entries(row: torch.Tensor, top: int, token: int) -> dict[str, dict[str, float]]:
    """The top tokens behind a context, and the actual one."""
    ids = {*row.topk(top).indices.tolist(), token}
    return {str(i): {"logprob": float(row[i])} for i in ids}


def served_vision(folder: Path, **changes: Any) -> Served:
    """What a server of such a model can do."""
    return Served(computed=VisionModel(folder, **changes))
