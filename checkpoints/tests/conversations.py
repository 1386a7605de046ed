"""A tokenizer and a chat template for synthetic checkpoints; whole, or with something changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AGENT = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}: "
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""With tools, and content in parts."""

TOKENS = ("<unk>", "<|im_start|>", "<|im_end|>", "<s>")


@dataclass
class Texts:
    """What lies beside the weights of a checkpoint with 64 tokens."""

    template: str | None = CHATML
    special: dict[str, Any] = field(
        default_factory=lambda: {"bos_token": None, "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    )
    added: tuple[str, ...] = TOKENS
    generation: dict[str, Any] | None = field(default_factory=lambda: {"eos_token_id": [2]})
    frame: str = ""  # what the tokenizer puts before a text
    raw: dict[str, str] = field(default_factory=dict)  # files with other content

    def write(self, folder: Path) -> Path:
        """As files of a checkpoint's folder."""
        letters = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ,. ")}
        base = Tokenizer(models.BPE({"<unk>": 0, **{x: n + 4 for x, n in letters.items()}}, [], unk_token="<unk>"))
        base.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        base.decoder = decoders.Fuse()
        content = json.loads(base.to_str())
        content["model"]["vocab"] = {token: n for n, token in enumerate((*TOKENS, *letters))}
        if self.added != TOKENS:
            kept = [token for token in TOKENS if token in self.added or token == "<unk>"]
            content["model"]["vocab"] = {token: n for n, token in enumerate((*kept, *letters))}
        built = Tokenizer.from_str(json.dumps(content))
        built.add_special_tokens(list(self.added))
        if self.frame:
            from tokenizers import processors

            bos = built.token_to_id("<s>")
            built.post_processor = processors.TemplateProcessing(
                single=f"{self.frame} $A", special_tokens=[("<s>", bos)]
            )
        built.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30, **self.special}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template)
        if self.generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(self.generation))
        for name, text in self.raw.items():
            (folder / name).write_text(text)
        return folder
