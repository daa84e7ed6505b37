"""One process writes a folder at a time: a run folder, or the folder of an unfinished quantization.

The lock is the operating system's (``flock``) on ``run.lock`` in the folder: it ends with the process, however that ends, so
a crash leaves nothing to clean up. The file holds the number of the process, for the message that another one gets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from qerl.errors import RunFolderError
from qerl.metrics.files import WITHOUT_LOCKS, output_errors

LOCK_NAME = "run.lock"


class RunLock:
    """Context manager that holds the lock of a folder.

    Args:
        folder: the folder. It is made if it is missing, and removed at the end if it was made and is still empty.
        what: what it is, for the message that another process gets.
        remedy: what that process's user can do.

    Attributes:
        note: why there is no lock, on a file system that has none; else None.
    """

    def __init__(
        self,
        folder: Path,
        what: str = "run folder",
        remedy: str = "Wait until it ends or stop it, or choose another run.name",
    ):
        self.what = what
        self.remedy = remedy
        self.folder = folder
        self.path = folder / LOCK_NAME
        self.note: str | None = None
        self._file: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> RunLock:
        """Take the lock.

        Raises:
            RunFolderError: another process holds it.
            OutputError: the folder cannot be written.
        """
        with output_errors(self.folder):
            self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            while self._file is None:
                self._file = self._try_lock()
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Removed while it is still held: whoever locks the removed file meanwhile sees that it is gone and tries again.
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _try_lock(self) -> int | None:
        """An open, locked file; None when its holder removed it just now."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            raise RunFolderError(
                f"another process is writing this {self.what}",
                got=f"{self.folder}, process {holder or 'unknown'}",
                expected=f"one process a {self.what}",
                remedy=self.remedy,
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                os.close(file)
                raise
            self.note = f"{self.folder} is on a file system without locks: see to it that one process alone writes it"
        if self.path.exists() and os.path.samestat(os.fstat(file), os.stat(self.path)):
            return file
        os.close(file)
        return None


def is_held(folder: Path) -> bool | None:
    """Whether a process is writing the run folder; None on a file system without locks.

    The lock is taken together with other readers for the moment of asking, and never waited for.
    """
    try:
        with (folder / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return None
    return False
