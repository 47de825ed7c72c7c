"""Files of a run folder: whole or not there, whatever stops the process or the machine. An error of the disk names the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from fedloom import crash


def put(path: Path, content: bytes, kind: str = "", keep: Path | None = None) -> None:
    """Puts a file in place in one step and for good: whoever reads it, whenever, finds the old content or the new one.

    keep: where the file goes that was there before. kind: how crash points call it (the name of the file).
    """
    kind, fresh = kind or path.stem, path.with_name(path.name + ".new")
    with _named(path):
        try:
            with open(fresh, "wb", buffering=0) as file:
                _write(file, content, kind)
                os.fsync(file.fileno())
        except OSError:
            fresh.unlink(missing_ok=True)  # half a file is of no use, and the disk may be full
            raise
        crash.point(f"{kind}-synced")
        if keep is not None and path.exists():
            os.replace(path, keep)
            crash.point(f"{kind}-between-renames")
        os.replace(fresh, path)
        crash.point(f"{kind}-renamed")
        _sync(path.parent)
    crash.point(f"{kind}-in-place")


class Log:
    """A file that grows by whole pieces. `size` bytes of it count: what follows was being written when something stopped it."""

    def __init__(self, path: Path, size: int = 0):
        self.path, self.size = path, size

    def append(self, content: bytes) -> None:
        """Adds a piece, in place of whatever follows what counts."""
        with _named(self.path), open(self.path, "ab", buffering=0) as file:
            file.truncate(self.size)
            try:
                _write(file, content, self.path.stem)
            except OSError:
                file.truncate(self.size)
                raise
        self.size += len(content)

    def cut(self) -> None:
        """Takes away what does not count."""
        with _named(self.path), open(self.path, "ab") as file:
            file.truncate(self.size)
        crash.point(f"{self.path.stem}-cut")

    def sync(self) -> int:
        """Waits until what was appended would survive a power cut; gives how many bytes that are."""
        with _named(self.path):
            _sync(self.path)
        return self.size

    def read(self) -> str:
        """What counts. ValueError if the file has lost some of it."""
        with _named(self.path), open(self.path, "rb") as file:
            content = file.read(self.size)
        if len(content) < self.size:
            raise ValueError(f"{self.path.name} has lost lines: {len(content)} of {self.size} bytes are there")
        return content.decode()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A write that fails does not know the name of its file: here it gets it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(file: FileIO, content: bytes, kind: str) -> None:
    view = memoryview(content)
    for part, step in ((view[: len(view) // 2], "half"), (view[len(view) // 2 :], "written")):  # two steps: a test stops in between
        while part:
            part = part[file.write(part) :]  # the system may take less at once
        crash.point(f"{kind}-{step}")


def _sync(path: Path) -> None:
    """Has the system write a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
