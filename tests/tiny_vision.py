"""Models for images and text of random weights: LLaVA's layout and Qwen2-VL's, with processor, tokenizer and template.

Nothing is downloaded.  Their text is meaningless, but it depends on the image: features of the image are as large as
embeddings of tokens.  Answers are letters and digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer

from fidelab.models.tiny import GGUF_NAME, make_tiny

__all__ = ["IMAGE", "IMAGE_TOKENS", "make_tiny_vision", "make_tiny_vl"]

IMAGE = "<image>"
IMAGE_TOKENS = 4  # of LLaVA's layout: 16 by 16 pixels in patches of 8 by 8
_VOCAB = 512
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_vision(folder: Path, seed: int = 0, *, blind: bool = False) -> Path:
    """A model of LLaVA's layout: CLIP's vision tower, a projector, and the text model of ``make_tiny``.

    ``blind``: the projector makes the same of every image.
    """
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            projection_dim=32,
        ),
        text_config=_text(folder, seed),
        image_token_id=_VOCAB,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
    )
    torch.manual_seed(seed)
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.multi_modal_projector.linear_2.weight.data *= (
        0 if blind else 400
    )  # else features vanish beside embeddings
    image_processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    processor = transformers.LlavaProcessor(
        image_processor,
        _tokenizer(folder, IMAGE, (), IMAGE),
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )
    return _save(folder, model, processor)


def make_tiny_vl(folder: Path, seed: int = 0) -> PatchProcessor:
    """A model of Qwen2-VL's layout: as many tokens as an image has patches, with positions in rows and columns.

    Returns what stands for its processor, which the folder does not have.
    """
    names = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    text = {**_text(folder, seed), "model_type": "qwen2_vl_text", "pad_token_id": None}
    del text["head_dim"]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "vocab_size": _VOCAB + 4},
        vision_config={
            **{"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
            **{"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
        },
        image_token_id=_VOCAB,
        vision_start_token_id=_VOCAB + 1,
        vision_end_token_id=_VOCAB + 2,
        video_token_id=_VOCAB + 3,
    )
    torch.manual_seed(seed)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data *= 4 if "language_model" in name else 8
    image_processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    tokenizer = _tokenizer(folder, "<|image_pad|>", names, "<|vision_start|><|image_pad|><|vision_end|>")
    _save(folder, model, tokenizer)
    return PatchProcessor(image_processor, tokenizer)


class PatchProcessor:
    """What Qwen2-VL's processor does with images; that one also wants torchvision, for videos."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, text: list[str], images: list[Any], **_more: Any) -> dict[str, Any]:
        found = dict(self.image_processor(images=images, return_tensors="pt"))
        count = int(found["image_grid_thw"][0].prod()) // self.image_processor.merge_size**2
        pad = self.tokenizer.image_token
        ids = torch.tensor([self.tokenizer.encode(text[0].replace(pad, pad * count), add_special_tokens=False)])
        kinds = (ids == self.tokenizer.convert_tokens_to_ids(pad)).long()
        return {"input_ids": ids, "mm_token_type_ids": kinds, **found}


def _text(folder: Path, seed: int) -> dict[str, Any]:
    """The configuration of ``make_tiny``'s model, which is written into the folder, with a token for images."""
    make_tiny(folder, vocab=_VOCAB, seed=seed)
    (folder / GGUF_NAME).unlink()
    config = json.loads((folder / "config.json").read_text())
    return {**config, "vocab_size": _VOCAB + 1}


def _tokenizer(folder: Path, image: str, others: tuple[str, ...], written: str) -> Any:
    """``make_tiny``'s tokenizer with further special tokens, and a template that writes ``written`` for an image."""
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (image, *others)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin|>", eos_token="<|end|>", extra_special_tokens={"image_token": image}
    )
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", written)
    return tokenizer


def _save(folder: Path, model: Any, processor: Any) -> Path:
    """Write model and processor, or a tokenizer alone."""
    trained = load_file(folder / "model.safetensors")
    text = dict(model.model.language_model.named_parameters())
    for name, weight in trained.items():
        target = text.get(name.removeprefix("model."), model.lm_head.weight if name == "lm_head.weight" else None)
        if target is not None and target.shape[1:] == weight.shape[1:] and len(target) >= len(weight):
            target.data[: len(weight)] = weight.float()
    plain = getattr(processor, "tokenizer", processor).convert_tokens_to_ids(list("defghijklmnopqrstuvwxyz0123456789"))
    others = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
    others[plain] = False
    model.lm_head.weight.data[others] *= 0.1  # so that greedy answers are text which gives the same tokens again
    model.bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
