"""Prompt files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.core.errors import InputError
from fidelab.inputs.prompts import Prompt, load_prompts


def _file(tmp_path: Path, content: str, name: str = "p.jsonl") -> Path:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    return file


def test_prompt_is_a_users_message(tmp_path: Path) -> None:
    file = _file(tmp_path, '{"id": "a", "kind": "code", "prompt": "Hi"}\n')
    assert load_prompts(file) == (Prompt("a", "code", ({"role": "user", "content": "Hi"},)),)


def test_messages_are_kept(tmp_path: Path) -> None:
    roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (prompt,) = load_prompts(_file(tmp_path, f'\n{{"messages": {roles}}}\n'.replace("'", '"')))
    assert prompt == Prompt("2", "user", tuple(roles))


def test_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    prompts = load_prompts(_file(tmp_path, "\ufeffone\r\n\n  two \n", "p.txt"))
    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in prompts] == [("1", "one"), ("3", "two")]


def test_package_has_prompts_of_its_own() -> None:
    assert len(load_prompts()) >= 10


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: write an object with either 'prompt' or 'messages'"),
        ("{}", "line 2: write an object"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": 3}', "line 2: a prompt is text"),
        ('{"prompt": ""}', "line 2: a prompt is text"),
        ('{"messages": []}', "line 2: a prompt is text"),
        ('{"messages": [{"role": "user"}]}', "line 2: a prompt is text"),
    ],
)
def test_bad_line_is_named(line: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says) as caught:
        load_prompts(_file(tmp_path, f'{{"prompt": "fine"}}\n{line}\n'))
    assert "\n" not in str(caught.value)


def test_twin_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the id 'a' twice"):
        load_prompts(_file(tmp_path, '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n'))


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_file_without_prompts_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no prompt in it"):
        load_prompts(_file(tmp_path, "\n \n", name))


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.jsonl or \.txt"):
        load_prompts(_file(tmp_path, "x", "p.md"))


def test_other_encoding_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"fine\nf\xfcr\n")
    with pytest.raises(InputError, match=r"prompt file .* is not UTF-8: byte 0xfc in line 2"):
        load_prompts(tmp_path / "p.txt")
