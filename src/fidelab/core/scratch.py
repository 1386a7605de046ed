"""Temporary folders with an owner, so that those of killed processes are found and removed.  Standard library only.

A folder ``PURPOSE-TOKEN`` has three entries: ``files``, which is used; ``lock``, which its process holds locked; and
``beside``, the path of a second such folder where the result must be on the disk of its target.  The system frees a
lock however its process ends, and a process number that is used again proves nothing.  A lock that cannot be taken,
also for lack of support by the file system, counts as held.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fidelab.core.errors import OutputError
from fidelab.core.locks import lock as take

_LOCK, _FILES, _BESIDE = "lock", "files", "beside"
_TOKEN = "[0-9a-f]{16}"
_NAME = re.compile(rf"[a-z0-9]+(?:-[a-z0-9]+)*-{_TOKEN}")
_NAME_BESIDE = re.compile(rf"\..*\.part-{_TOKEN}", re.DOTALL)
_MAX_NAME_BYTES = 180  # of a target's name: file systems allow 255, and the token has its share
_MAX_PATH_BYTES = 1 << 16
_ATTEMPTS = 100  # at a folder that another process takes for a leftover before it is locked
_OWNED: dict[str, int] = {}
_BY_DESCRIPTOR = hasattr(os, "O_DIRECTORY") and hasattr(os, "getuid")  # all systems but Windows


def scratch_root() -> Path:
    """Return the folder of this user's temporary folders; it may not exist."""
    user = os.getuid() if _BY_DESCRIPTOR else "user"  # whose folder it is already, on Windows
    return Path(tempfile.gettempdir()).absolute() / f"fidelab-{user}"


@contextmanager
def scratch(purpose: str, beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty private folder that is removed at the end; first, remove those whose owners are dead.

    Windows has no descriptors of folders, by which a removal is safe: there leftovers of killed processes stay.

    Args:
        purpose: what it is for, in lower-case letters and hyphens; part of its name.
        beside: make it next to this path, on the same disk, so that what is in it can be renamed to the path.

    Raises:
        OutputError: If the folder of all temporary folders cannot be made, or belongs to another user.
        OSError: If the folder next to ``beside`` cannot be made.
    """
    if not _BY_DESCRIPTOR:
        with _plain(purpose, beside) as folder:
            yield folder
        return
    root = _private_root()
    sweep(root)
    with _owned(root, purpose) as own:
        if beside is None:
            yield own / _FILES
            return
        parent = beside.absolute().parent
        stem = os.fsdecode(os.fsencode(beside.name)[:_MAX_NAME_BYTES])
        sweep(parent)
        with _owned(parent, f".{stem}.part", own / _BESIDE) as other:
            yield other / _FILES


@contextmanager
def _plain(purpose: str, beside: Path | None) -> Iterator[Path]:
    """A folder that is removed at the end, and is left where this process is killed."""
    parent, stem = (
        (None, purpose) if beside is None else (beside.absolute().parent, f".{beside.name[:_MAX_NAME_BYTES]}")
    )
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{stem}.part-", dir=parent))
    except OSError as error:
        if beside is not None:
            raise
        raise OutputError(f"cannot make a temporary folder ({error.strerror or error}); set TMPDIR") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def owner_descriptors(folder: Path) -> tuple[int, ...]:
    """Return what a child process must inherit (``pass_fds``) to own a :func:`scratch` folder as well.

    Such a folder is not removed while the child lives, even if this process is killed.
    """
    return tuple(_OWNED[name] for name in (str(folder.parent),) if name in _OWNED)


def sweep(folder: Path | None = None) -> None:
    """Remove the temporary folders in ``folder`` whose owners are dead; by default those of this user.

    Folders of living owners and of other users stay, and so do links and everything that has another form.
    """
    for path in abandoned(folder):
        _remove(path)


def abandoned(folder: Path | None = None) -> list[Path]:
    """Return the temporary folders that :func:`sweep` would remove."""
    if not _BY_DESCRIPTOR:
        return []
    try:
        root = scratch_root()
        folder = root if folder is None else folder
        form = _NAME if folder == root else _NAME_BESIDE
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if form.fullmatch(entry.name))
    except OSError:
        return []
    return [folder / name for name in names if _is_abandoned(folder / name)]


def _private_root() -> Path:
    root = Path(f"fidelab-{os.getuid()}")
    try:
        root = scratch_root()
        with suppress(FileExistsError):
            root.mkdir(0o700)
        found = root.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            if found.st_mode & 0o077:
                root.chmod(0o700)
            return root
    except OSError as error:
        raise OutputError(
            f"cannot make {root} ({error.strerror or error}); set TMPDIR to a folder that you may write"
        ) from None
    raise OutputError(f"{root} is not a folder of this user; remove it, or set TMPDIR to another folder")


@contextmanager
def _owned(parent: Path, stem: str, note: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that this process holds locked, and remove it at the end.

    ``note``: a file that gets its path before it is made.
    """
    folder, lock = _claim(parent, stem, note)
    _OWNED[str(folder)] = lock
    try:
        (folder / _FILES).mkdir(0o700)
        yield folder
    finally:
        del _OWNED[str(folder)]
        with suppress(OSError), _opened(folder) as entry:
            _empty(folder, entry)
        os.close(lock)


def _claim(parent: Path, stem: str, note: Path | None) -> tuple[Path, int]:
    """Make and lock a folder. Another process may take it for a leftover until it is locked."""
    for _ in range(_ATTEMPTS):
        folder = parent / f"{stem}-{secrets.token_hex(8)}"
        if note is not None:
            note.write_bytes(os.fsencode(folder))
        folder.mkdir(0o700)
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _is_locked(lock, folder / _LOCK):
                return folder, lock
            os.close(lock)
    raise OutputError(f"cannot make a temporary folder in {parent}: another process removes it")


def _is_locked(lock: int, path: Path) -> bool:
    """Lock a new file; whether it is this process's, and still there."""
    try:
        take(lock, wait=False)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: nobody can prove that the owner is dead, so it stays
        return True
    return path.exists() and os.path.samestat(os.fstat(lock), path.stat())


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder of this user. A later rename does not change what it refers to.

    Raises:
        OSError: If it is a link, another kind of file, or another user's.
    """
    entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(entry).st_uid != os.getuid():
            raise PermissionError(str(folder))
        yield entry
    finally:
        os.close(entry)


@contextmanager
def _seized(entry: int) -> Iterator[bool]:
    """Lock a folder of a dead owner; whether it is one.

    Raises:
        OSError: If that cannot be found out.
    """
    found = set(os.listdir(entry))
    if not found <= {_LOCK, _FILES, _BESIDE}:
        yield False
        return
    if _LOCK not in found:
        yield not found  # its owner was killed before it made the lock, or after it removed it
        return
    lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry)
    try:
        try:
            take(lock, wait=False)
            seized = True
        except BlockingIOError:
            seized = False
        yield seized
    finally:
        os.close(lock)


def _is_abandoned(folder: Path) -> bool:
    try:
        with _opened(folder) as entry, _seized(entry) as seized:
            return seized
    except OSError:
        return False


def _remove(folder: Path) -> bool:
    """Remove a folder whose owner is dead; return whether nothing is left."""
    with suppress(OSError), _opened(folder) as entry, _seized(entry) as seized:
        if seized:
            _empty(folder, entry)
    return not os.path.lexists(folder)


def _empty(folder: Path, entry: int) -> None:
    """Remove the files, then the lock, then the folder: a removal that is stopped can be repeated.

    Raises:
        OSError: If something cannot be removed, or the folder holds more than this module makes.
    """
    with suppress(FileNotFoundError):
        note = os.open(_BESIDE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry)
        with os.fdopen(note, "rb") as file:
            other = Path(os.fsdecode(file.read(_MAX_PATH_BYTES)))
        if other.is_absolute() and _NAME_BESIDE.fullmatch(other.name) and os.path.lexists(other) and not _remove(other):
            return
        os.unlink(_BESIDE, dir_fd=entry)
    with suppress(FileNotFoundError):
        shutil.rmtree(_FILES, dir_fd=entry)
    with suppress(FileNotFoundError):
        os.unlink(_LOCK, dir_fd=entry)
    folder.rmdir()
