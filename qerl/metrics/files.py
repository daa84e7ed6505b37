"""Files and folders that appear whole or not at all, and values as JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import numbers
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from qerl.errors import ConfigError, OutputError, QerlError, RunFolderError

_TEMPORARY = ".tmp-"
_OLD = ".old"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What a file system says that has no locks."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE)
"""What is said of a path that is there and not for this user, or on a device that fails."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name to write to; it becomes ``path`` when the block ends well and vanishes when it does not.

    Raises:
        OutputError: the disk is full, ``path`` is a device, pipe or socket (which a file would take the place of), or it cannot be
            written for another reason of the system's.
    """
    temporary = _temporary(path)
    with output_errors(path):
        _refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes ``path``, in place of an older one, when the block ends well.

    The older one is renamed, the new one takes its name, and then the older one is removed: a process that is killed between any two
    leaves one of them whole, which :func:`recover_folders` gives its name back.

    Raises:
        OutputError: the disk is full, or ``path`` cannot be written for another reason of the system's.
    """
    temporary = _temporary(path)
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            _replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _replace(new: Path, path: Path) -> None:
    """Give ``new`` the name of ``path``; a folder that has it is removed, and has it again if something goes wrong."""
    with _alone_in(path.parent):
        _recover(path)
        try:
            if path.exists():
                path.rename(_aside(path))
            new.rename(path)
        finally:
            _recover(path)


def recover_folders(parent: Path) -> None:
    """Finish what processes began that were killed while they replaced a folder of ``parent``: the older folder gets its name back, or
    goes where the new one has it. May be called while other processes write there.

    Raises:
        OutputError: the system refuses.
    """
    if not parent.is_dir():
        return
    with output_errors(parent), _alone_in(parent):
        for path in sorted(parent.glob(f".*{_OLD}")):
            _recover(path.with_name(path.name[1 : -len(_OLD)]))


def remove_leftovers(parent: Path) -> None:
    """Remove what processes of this machine that are gone left half written in ``parent``.

    Raises:
        OutputError: the system refuses.
    """
    with output_errors(parent):
        for path in sorted(parent.glob(f".*{_TEMPORARY}*")):
            number = path.name.rpartition(_TEMPORARY)[2]
            if number.isdigit() and not _is_alive(int(number)):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _recover(path: Path) -> None:
    aside = _aside(path)
    if not aside.exists():
        return
    if path.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_OLD}")


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process or thread replaces a folder in ``folder`` meanwhile, where the file system locks folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A network's may refuse to lock what is open for reading alone, with one of several numbers. What is written is no worse for it.
        with suppress(OSError):
            wait_for_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def wait_for_lock(file: int) -> None:
    """Wait until the operating system's lock on an open file is this process's alone; it ends when the file is closed. A file system
    without locks has none.

    Args:
        file: descriptor of a file or a folder.

    Raises:
        OSError: the system refuses for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turns what the system says against writing ``path`` into an error for the user.

    Raises:
        OutputError: the block raised an OSError, or safetensors its own form of one.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error


def is_full(error: BaseException) -> bool:
    """Whether an error of the system, or safetensors' form of one, says that there is no room."""
    return getattr(error, "errno", None) in _FULL or any(f"(os error {number})" in str(error) for number in _FULL)


def cannot_write(path: Path, error: Exception) -> OutputError:
    """The error for a path that cannot be written, with the system's reason."""
    # torch and safetensors report a full disk in forms of their own, which do not always say so.
    full = is_full(error) or not isinstance(error, OSError)
    return OutputError(
        f"{path} cannot be written",
        got=getattr(error, "strerror", None) or str(error),
        remedy="Free space on the disk; nothing half-written is left under its final name"
        if full
        else "Choose a place that can be written",
    )


def system_refusal(error: Exception) -> QerlError | None:
    """The error for what the system says against a path that a user gave, where no place in the program knew better; None for any other."""
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        # What a command prints goes to a file on a full disk.
        return cannot_write(Path("the output"), error)
    if error.errno == errno.ENAMETOOLONG:
        name = f"{str(error.filename)[:60]}…, of {len(str(error.filename))} characters"
        return ConfigError("a path is too long", got=name, expected="one that the file system can have")
    if error.errno in _CLOSED:
        return ConfigError(
            f"{error.filename or 'a file'} cannot be opened",
            got=error.strerror,
            expected="a path that this user may read",
            remedy="Change its permissions, or those of a folder above it, or give another path",
        )
    return None


def check_writable(path: str | Path, *, folder: bool = False) -> None:
    """Checks before any work that ``path`` can be written later; leaves nothing behind.

    Args:
        path: the file, or with ``folder`` the folder that files will go into; folders above it may be missing.
        folder: whether ``path`` is a folder.

    Raises:
        OutputError: something else stands at the path or above it, a name is too long, or the system refuses.
    """
    path = Path(path)
    with output_errors(path):
        _refuse_special(path)
        if path.is_dir() != folder and os.path.lexists(path):
            what, wanted = ("a file", "a folder") if folder else ("a folder", "a file")
            raise OutputError(f"{path} is {what}", expected=f"the name of {wanted}", remedy="Choose another name")
        if not folder and not path.name:
            raise OutputError("the name of the output file is empty", got=str(path), expected="the name of a file")
        # The longest name that will be made is the temporary one.
        missing = [path if folder else _temporary(path)]
        while not os.path.lexists(missing[-1]):
            missing.append(missing[-1].parent)
        ancestor = missing.pop()
        if not ancestor.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{ancestor} is not a folder")
        longest = os.pathconf(ancestor, "PC_NAME_MAX")
        if any(len(os.fsencode(part.name)) > longest for part in missing):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with tempfile.TemporaryFile(dir=ancestor):
            pass


def _refuse_special(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(
            f"{path} is a device, a pipe or a socket", expected="the name of a file", remedy="Choose another name"
        )


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}") if path.name else path


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all; numbers that are not finite become null."""
    with whole_file(path) as temporary:
        text = json.dumps(to_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        temporary.write_text(text, encoding="utf-8")


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds one object.

    Raises:
        RunFolderError: it cannot be read, or holds something else.
    """
    with damaged_file(path, "a JSON object"):
        return _object(path.read_text(encoding="utf-8"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line.

    Raises:
        RunFolderError: it cannot be read, or a line holds something else.
    """
    with damaged_file(path, "a JSON object in each line"):
        # Not splitlines: texts hold other signs that it takes for line ends.
        return [_object(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:80]!r} is no object")
    return value


@contextmanager
def damaged_file(path: Path, expected: str, *others: type[Exception]) -> Iterator[None]:
    """Errors of reading a file, those of ``others`` among them, as one that names it.

    Raises:
        RunFolderError: in place of them.
    """
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, RecursionError, *others)
    try:
        yield
    except kinds as error:
        raise RunFolderError(
            "a file of the run cannot be read",
            got=f"{path}: {' '.join(str(error).split())}",
            expected=expected,
            remedy="Copy it again from where it was whole, or delete it",
        ) from error


def to_json(value: Any) -> Any:
    """``value`` with tuples as lists, paths as text and numbers that are not finite as None.

    Raises:
        TypeError: something in it has no JSON form.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def is_temporary(path: Path) -> bool:
    """Whether a path is what ``whole_file`` or ``whole_folder`` left behind when the process was killed."""
    return path.name.startswith(".") and _TEMPORARY in path.name
