"""The tokenizer of a model whose weights are elsewhere."""

from __future__ import annotations

from pathlib import Path

from fidelab.errors import InputError
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from fidelab.models.embedded import NAMES
from fidelab.models.hub import first_line
from fidelab.models.resolve import listing

__all__ = ["find_tokenizer", "load_tokenizer"]

_FILES = ["*token*", "*.model", "vocab*", "merges*", "*.jinja", "config.json", "generation_config.json"]


def load_tokenizer(name: str) -> Tokenizer:
    """By an embedded name, a folder, a ``.gguf`` file, or a hub id, of which no weights are fetched.

    Raises:
        InputError: there is none.
    """
    if name in NAMES or Path(name).expanduser().exists() or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return Tokenizer.load(resolve(name))
    return _of_hub(name, fetch=True)


def find_tokenizer(name: str) -> Tokenizer | None:
    """The same where it lies on this machine; nothing is fetched."""
    present = any(model.name == name and model.present for model in listing()) or Path(name).expanduser().exists()
    try:
        if present:
            return load_tokenizer(name)
        return _of_hub(name, fetch=False) if name.count("/") == 1 else None
    except InputError:
        return None


def _of_hub(name: str, *, fetch: bool) -> Tokenizer:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        path = snapshot_download(
            repo, revision=revision or None, allow_patterns=_FILES, ignore_patterns=["*/*"], local_files_only=not fetch
        )
    except Exception as error:  # huggingface_hub lets errors of several HTTP libraries through
        raise InputError(
            f"cannot fetch the tokenizer of {name} from the hub ({first_line(error)}); name a folder"
        ) from error
    files = Model(
        name=name,
        path=Path(path),
        kind="folder",
        weights="",
        revision=revision or None,
        vocab_size=0,
        hidden_size=0,
        max_positions=None,
        parameters=0,
        native="bf16",
        architecture="",
    )
    return Tokenizer.load(files)
