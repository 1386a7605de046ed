"""Files from the Hugging Face hub; errors become one line with advice.

The token is the one ``huggingface_hub`` finds itself (``HF_TOKEN``, or a stored login); fidelab never sees
it. An interrupted download is resumed or repeated by ``huggingface_hub``: a file gets its name only when it
is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fidelab.core.errors import InputError, UnavailableError
from fidelab.models import reading

_TEXTS = ["*.json", "*.model", "*.txt", "*.jinja"]
_ALLOWED = [*_TEXTS, "*.safetensors"]
_IGNORED = ["*/*", "consolidated*"]  # sub-folders and second copies of the weights in other layouts


def snapshot(repo: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
    """Return the folder of a model repository on this machine, and its commit.

    ``weights=False``: only config, tokenizer and template.

    Raises:
        InputError: If the repository is gated or missing, or has no such revision.
        UnavailableError: If the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    allowed = _ALLOWED if weights else _TEXTS
    if reading.current() is not None:
        try:
            path = Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, local_files_only=True))
        except LocalEntryNotFoundError:
            raise InputError(
                f"{repo} is not on this machine, and a dry run downloads nothing: fidelab setup fetch {repo}"
            ) from None
        return path, path.name
    with _hub_errors(repo, revision):
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=_IGNORED))
    return path, path.name


def dataset_sizes(repo: str, revision: str | None) -> dict[str, int]:
    """Return all files of a dataset repository, with their sizes in bytes.

    Raises:
        InputError, UnavailableError: As :func:`snapshot`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with _hub_errors(repo, revision):
        tree = HfApi().list_repo_tree(repo, recursive=True, revision=revision, repo_type="dataset")
        return {file.path: file.size for file in tree if isinstance(file, RepoFile)}


def dataset_files(repo: str, revision: str | None, names: list[str], *, local: bool = False) -> Path:
    """Return a folder with these files of a dataset repository; ``local``: use files fetched before, without a request.

    Raises:
        InputError, UnavailableError: As :func:`snapshot`.
    """
    from huggingface_hub import snapshot_download

    with _hub_errors(repo, revision):
        return Path(
            snapshot_download(
                repo, repo_type="dataset", revision=revision, allow_patterns=names, local_files_only=local
            )
        )


def upload_dataset(repo: str, folder: Path, message: str, replaced: list[str]) -> str:
    """Publish a folder in a dataset repository in one commit, and return the commit.

    The repository is created if needed. Its files that match ``replaced`` and are not in the folder are removed. Data
    of an interrupted upload belong to no commit, and the next upload does not send them again.

    Raises:
        InputError: If the hub refuses, such as for a missing token.
        UnavailableError: If the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _hub_errors(repo, None, "publish"):
        api = HfApi()
        api.create_repo(repo, repo_type="dataset", exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, repo_type="dataset", folder_path=folder, commit_message=message, delete_patterns=replaced
        )
        return str(done.oid)


def dataset_file(repo: str, filename: str) -> Path:
    """Return one file of a dataset repository.

    Raises:
        InputError, UnavailableError: As :func:`snapshot`.
    """
    from huggingface_hub import snapshot_download

    with _hub_errors(repo, None):
        file = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=[filename])) / filename
    if not file.is_file():
        raise InputError(f"{repo} on the hub no longer has the file {filename}")
    return file


@contextmanager
def _hub_errors(repo: str, revision: str | None, doing: str = "fetch") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the one boundary: huggingface_hub lets errors of several HTTP libraries through
        if (refusal := _refusal(error, repo, revision)) is not None:
            raise InputError(refusal) from error
        cause = first_line(error.__cause__ or error)
        where = f"{repo} from" if doing == "fetch" else f"{repo} on"
        raise UnavailableError(
            f"cannot {doing} {where} the hub ({cause}); check the connection and run again, or pass a path"
        ) from error


def _refusal(error: Exception, repo: str, revision: str | None) -> str | None:
    """The message for what the hub itself refused; ``None`` where it was not reached."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return (
                f"{repo} is gated: accept its terms on its hub page, "
                "then set HF_TOKEN to a token of that account and run again"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{repo} is neither a path here nor a repository on the hub that you may read; "
                "check the spelling, or set HF_TOKEN if it is private"
            )
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision!r}; name a branch, tag or commit from its hub page"
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"the hub does not let you write to {repo}; set HF_TOKEN to a token that may"
        case errors.HFValidationError():
            return f"{repo!r} is not a hub id: write owner/name or owner/name@revision"
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message without its full stop, or its type's name if empty."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
