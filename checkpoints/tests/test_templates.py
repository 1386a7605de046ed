"""Faults of chat templates, special tokens and sizes are found by their rules; whole ones give no finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny_gguf import write_gguf

from checkpoints.tests.conversations import AGENT, CHATML, TOKENS, Texts
from checkpoints.tests.synthetic import EXPERTS, FFN, HIDDEN, LAYERS, VOCAB, Synthetic, plain, quantized
from fidelab.models import bounds
from fidelab_checkpoints.audit import audit
from fidelab_checkpoints.catalogue import page
from fidelab_checkpoints.rules import RULES, Finding

SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}


def found(folder: Path) -> dict[str, list[Finding]]:
    by_rule: dict[str, list[Finding]] = {}
    for finding in audit(folder).findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    return by_rule


def said(findings: dict[str, list[Finding]]) -> dict[str, list[tuple[str | None, str]]]:
    return {rule: [(finding.severity, finding.text) for finding in each] for rule, each in findings.items()}


WHOLE: dict[str, Callable[[], Texts]] = {
    "ChatML": Texts,
    "tools and parts": lambda: Texts(template=AGENT),
    "no template": lambda: Texts(template=None),
    "BOS by the template": lambda: Texts(template="{{ bos_token }}" + AGENT, special=SPECIAL),
    "BOS by the tokenizer": lambda: Texts(special=SPECIAL, frame="<s>"),
    "system refused": lambda: Texts(
        template="{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    ),
    "thinking left out of old turns": lambda: Texts(
        template=CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    ),
    "thoughts that an old answer closes": lambda: Texts(
        template=CHATML.replace(
            " + '\n' + m['content']", " + '\n' + ('</think>' if m.role == 'assistant' else '') + m.content"
        ).replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
    ),
    "closed by the next turn's mark": lambda: Texts(
        template="{% for m in messages %}{{ ('<|im_end|>' if m.role == 'user' else '<|im_start|>') + m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    ),
    "no generation config": lambda: Texts(generation=None),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_nothing_is_found_in_whole_texts(kind: str, tmp_path: Path) -> None:
    assert said(found(WHOLE[kind]().write(plain().write(tmp_path / "m")))) == {}


def test_an_encoder_needs_no_end_of_sequence(tmp_path: Path) -> None:
    content = plain()
    content.config["architectures"] = ["BertModel"]
    texts = Texts(template=None, special={"unk_token": "<unk>"}, generation=None)
    assert said(found(texts.write(content.write(tmp_path / "m")))) == {}


@dataclass
class Fault:
    """Texts with something wrong, the rule that must find it, and what it must say."""

    rule: str
    texts: Callable[[], Texts]
    text: str
    severity: str | None = None
    also: frozenset[str] = frozenset()  # rules that rightly speak up, too


FAULTS: dict[str, Fault] = {
    "tokenizer.json cut": Fault(
        "tokenizer-unreadable", lambda: Texts(raw={"tokenizer.json": '{"version": "1.0", '}), "tokenizer.json"
    ),
    "generation config is a list": Fault(
        "tokenizer-unreadable", lambda: Texts(raw={"generation_config.json": "[]"}), "should hold a JSON object"
    ),
    "BOS not in the vocabulary": Fault(
        "special-token-unknown", lambda: Texts(special={**SPECIAL, "bos_token": "<bos>"}), "bos_token '<bos>'"
    ),
    "BOS is unk": Fault(
        "special-token-unknown", lambda: Texts(special={**SPECIAL, "bos_token": "<unk>"}), "the unknown token '<unk>'"
    ),
    "EOS id outside": Fault(
        "special-id-range",
        lambda: Texts(generation={"eos_token_id": [2, VOCAB]}),
        f"eos_token_id {VOCAB} of generation",
    ),
    "tokens beyond the embedding": Fault(
        "vocabulary-beyond-embedding",
        lambda: Texts(added=(*TOKENS, *(f"<|more_{n}|>" for n in range(30)))),
        "beyond the 64 rows",
    ),
    "no EOS": Fault(
        "eos-missing", lambda: Texts(special={"unk_token": "<unk>"}, generation=None), "names an end-of-sequence token"
    ),
    "EOS of the base model": Fault(
        "eos-disagree",
        lambda: Texts(generation={"eos_token_id": 3}),
        "is id 2, eos_token_id of generation_config.json is 3",
    ),
    "BOS twice in the template": Fault(
        "bos-doubled", lambda: Texts(template="<s>{{ bos_token }}" + CHATML, special=SPECIAL), "begins with '<s>' twice"
    ),
    "BOS twice by the tokenizer": Fault("bos-doubled", lambda: Texts(special=SPECIAL, frame="<s> <s>"), "a text twice"),
    "BOS by template and tokenizer": Fault(
        "bos-doubled",
        lambda: Texts(template="{{ bos_token }}" + CHATML, special=SPECIAL, frame="<s>"),
        "the template writes '<s>' and the tokenizer adds it",
        "information",
    ),
    "template does not parse": Fault(
        "template-invalid", lambda: Texts(template="{% for m in %}"), "refuses one question"
    ),
    "template refuses answers": Fault(
        "template-invalid",
        lambda: Texts(template="{% if messages|length > 1 %}{{ messages[7].content.x }}{% endif %}" + CHATML),
        "refuses a question, an answer",
    ),
    "template loses questions": Fault(
        "template-invalid", lambda: Texts(template=CHATML.replace("m['content']", "''")), "the text of a user's message"
    ),
    "template reaches for internals": Fault(
        "template-invalid", lambda: Texts(template="{{ messages.__class__.__mro__[1].__subclasses__() }}"), "unsafe"
    ),
    "parts are blanked": Fault(
        "template-parts",
        lambda: Texts(template=CHATML.replace("m['content']", "(m['content'] if m['content'] is string else '')")),
        "is shown without its text",
    ),
    "arguments as Python": Fault(
        "template-tool-arguments",
        lambda: Texts(template=AGENT.replace("c.function.arguments | tojson", "c.function.arguments")),
        "as Python writes them",
    ),
    "arguments must be text": Fault(
        "template-tool-arguments",
        lambda: Texts(template=AGENT.replace("c.function.arguments | tojson", "'' + c.function.arguments")),
        "given as an object are refused",
    ),
    "arguments encoded twice": Fault(
        "template-tool-arguments",
        lambda: Texts(template=AGENT.replace("arguments | tojson", "arguments | tojson | string | tojson")),
        "object are encoded twice",
    ),
    "JSON text encoded twice": Fault(
        "template-tool-arguments",
        lambda: Texts(template=AGENT.replace("{{ c.function.arguments }}", "{{ c.function.arguments | tojson }}")),
        "JSON text, as clients send them, are encoded twice",
        "information",
    ),
    "tools ignored": Fault(
        "template-tools-ignored",
        lambda: Texts(
            template=AGENT.replace("{{ t | tojson }}", "").replace(
                "{% if tools %}{{ '<|im_start|>system\n' }}", "{% if tools and false %}"
            )
        ),
        "tools that are offered",
    ),
    "result of a tool dropped": Fault(
        "template-tools-ignored",
        lambda: Texts(
            template=AGENT.replace(
                "{% if m.content is string %}", "{% if m.role == 'tool' %}{% elif m.content is string %}"
            )
        ),
        "the result of a tool is not in the prompt",
    ),
    "system dropped": Fault(
        "template-role-dropped",
        lambda: Texts(template=CHATML.replace("messages %}", "messages if m.role != 'system' %}")),
        "role system",
    ),
    "developer dropped": Fault(
        "template-role-dropped",
        lambda: Texts(template=CHATML.replace("messages %}", "messages if m.role != 'developer' %}")),
        "role developer",
        "information",
    ),
    "turn without an end": Fault(
        "template-unclosed-turn", lambda: Texts(template=CHATML.replace("<|im_end|>", "")), "nothing closes"
    ),
    "turn closed by a plain word": Fault(
        "template-unclosed-turn", lambda: Texts(template=CHATML.replace("<|im_end|>", "END")), "is not a special token"
    ),
    "end of turn does not end": Fault(
        "template-unclosed-turn",
        lambda: Texts(special={**SPECIAL, "eos_token": "<s>"}, generation={"eos_token_id": 3}),
        "closed by '<|im_end|>', id 2, which is not among",
    ),
    "no generation prompt": Fault(
        "template-generation-prompt",
        lambda: Texts(template=CHATML.partition("{% if add")[0]),
        "add_generation_prompt adds nothing",
    ),
    "generation prompt of another format": Fault(
        "template-generation-prompt",
        lambda: Texts(template=CHATML.replace("im_start|>assistant", "im_start|>model")),
        "a prompt ends with",
    ),
    "template of another model": Fault(
        "template-special-tokens",
        lambda: Texts(template=CHATML.replace("<|im_start|>", "<|begin|>")),
        "no token of the vocabulary: '<|begin|>'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_template_or_tokens_is_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    findings = found(fault.texts().write(plain().write(tmp_path / "m")))
    assert set(findings) == {fault.rule, *fault.also}, said(findings)
    [finding] = findings[fault.rule]
    assert fault.text in finding.text
    assert finding.severity == (fault.severity or RULES[fault.rule].severity)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end within"),
        ("{{ 'x' * 3000000000 }}", "memory"),
        ("{{ 'x' * 2000000 }}", "2,000,000 characters"),
    ],
)
def test_a_template_that_is_meant_to_harm_is_a_finding(
    template: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.3)
    findings = found(Texts(template=template).write(plain().write(tmp_path / "m")))
    assert set(findings) == {"template-invalid"}
    assert text in findings["template-invalid"][0].text


def test_the_template_of_a_gguf_file_is_rendered(tmp_path: Path) -> None:
    findings = found(write_gguf(tmp_path / "m.gguf", template=CHATML.replace("<|im_end|>", "")))
    assert set(findings) == {"template-unclosed-turn"}


def _config(**values: Any) -> Callable[[Synthetic], None]:
    return lambda content: content.config.update(values)


def _shape(name: str, *shape: int) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        content.tensors[name] = torch.full(shape, 0.5).bfloat16()

    return change


def _without(part: str) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        content.tensors = {name: value for name, value in content.tensors.items() if part not in name}

    return change


MOE: Callable[[], Synthetic] = lambda: plain(moe=True)  # noqa: E731
SIZES: dict[str, tuple[str, Callable[[], Synthetic], Callable[[Synthetic], None], str]] = {
    "layer missing": ("geometry-layers", plain, _without("model.layers.1."), "1 of them has no tensor"),
    "layers of a smaller model": ("geometry-layers", plain, _config(num_hidden_layers=1), "1 more, from layer 1"),
    "hidden size": ("geometry-shapes", plain, _config(hidden_size=HIDDEN * 2), f"inputs, configured {HIDDEN * 2}"),
    "heads": ("geometry-shapes", plain, _config(num_attention_heads=8), "2 q_proj have 128 outputs, configured 256"),
    "key-value heads": ("geometry-shapes", plain, _config(num_key_value_heads=4), "2 k_proj have 64 outputs"),
    "head dimension": ("geometry-shapes", plain, _config(head_dim=64), "2 q_proj have 128 outputs, configured 256"),
    "intermediate size": ("geometry-shapes", plain, _config(intermediate_size=FFN + 64), "2 down_proj have 256 inputs"),
    "intermediate size, GPTQ": (
        "geometry-shapes",
        lambda: quantized("gptq"),
        _config(intermediate_size=FFN + 64),
        "2 down_proj have 256 inputs",
    ),
    "intermediate size, AWQ": (
        "geometry-shapes",
        lambda: quantized("awq"),
        _config(intermediate_size=FFN + 64),
        "2 gate_proj have 256 outputs",
    ),
    "one matrix cut": (
        "geometry-shapes",
        plain,
        _shape("model.layers.1.self_attn.o_proj.weight", HIDDEN, HIDDEN // 2),
        "model.layers.1.self_attn.o_proj has 64 inputs, configured 128",
    ),
    "vocabulary": ("geometry-vocabulary", plain, _config(vocab_size=VOCAB * 2), "64 rows for a vocabulary of 128"),
    "head cut": ("geometry-vocabulary", plain, _shape("lm_head.weight", VOCAB - 8, HIDDEN), "lm_head has 56 rows"),
    "experts": ("geometry-experts", MOE, _config(num_experts=EXPERTS * 2), "other than 8 experts"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_the_configuration_does_not_explain_is_found(name: str, tmp_path: Path) -> None:
    rule, whole, change, text = SIZES[name]
    content = whole()
    change(content)
    findings = found(content.write(tmp_path / "m"))
    assert rule in findings, said(findings)
    assert any(text in finding.text for finding in findings[rule]), said(findings)


@pytest.mark.parametrize(
    "config", [{"vocab_size": VOCAB - 5}, {"num_hidden_layers": LAYERS - 1, "num_nextn_predict_layers": 1}]
)
def test_padding_of_the_vocabulary_and_layers_for_drafting_are_no_fault(config: dict[str, int], tmp_path: Path) -> None:
    content = plain()
    content.config |= config
    assert said(found(content.write(tmp_path / "m"))) == {}


def test_sizes_of_a_gguf_file_are_compared_with_its_metadata(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", template=CHATML, changed={"blk.0.ffn_down.weight": (32, 96)})
    assert [finding.tensors for finding in found(file)["geometry-shapes"]] == [["blk.0.ffn_down"]]


def test_the_text_model_of_a_model_for_images_is_compared_with_its_own_configuration(tmp_path: Path) -> None:
    content = plain()
    content.tensors |= {"model.visual.blocks.0.mlp.up_proj.weight": torch.full((20, 10), 0.5).bfloat16()}
    inner = {key: value for key, value in content.config.items() if key != "architectures"}
    content.config = {"architectures": ["SomeVL"], "text_config": inner, "vision_config": {"depth": 1}}
    assert "geometry-shapes" not in found(content.write(tmp_path / "a"))
    inner["intermediate_size"] = FFN * 3
    assert "geometry-shapes" in found(content.write(tmp_path / "b"))


def test_the_failure_catalogue_is_the_page_that_the_rules_make() -> None:
    committed = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    assert committed == page(), "run: python -m fidelab_checkpoints.catalogue > docs/failures.md"
    for rule in RULES.values():
        assert committed.count(f"`{rule.id}`") == 1
        assert all((rule.title, rule.symptom, rule.cause, rule.check, rule.command))
