"""Private helpers around the operating system: files, crash points, signals, cores, memory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import os
import re
import resource
import shlex
import signal
import sys
import threading
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

from fedloom.errors import ConfigError, SecondWriterError, unknown

# ---- texts of others ----

TEXT_LENGTH = 500  # characters of a text that another process has sent


def plain_text(text: object, length: int = TEXT_LENGTH) -> str:
    """Returns a text that another process has sent as one short line without hidden characters.

    Control characters, among them those of terminals' escape sequences, and characters that change
    the direction of writing or that nobody sees become U+FFFD. White space becomes one space.

    Args:
        text: The text, or anything else.
        length: The largest number of characters. A longer text ends with "...".
    """
    cut = str(text)[: 8 * length + 8]  # the work does not grow with the text
    words = " ".join(cut.split())
    shown = "".join(
        letter if unicodedata.category(letter) not in _HIDDEN else "\N{REPLACEMENT CHARACTER}"
        for letter in words[: length + 1]
    )
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."


def without_control(content: Any) -> Any:
    """Returns JSON that another person may have written, without control characters in its texts.

    A terminal would execute its escape sequences. Each such character becomes U+FFFD; newlines and
    tabs stay.

    content: objects, lists, texts and numbers.
    """
    if isinstance(content, str):
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", content)
    if isinstance(content, dict):
        return {without_control(key): without_control(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_control(value) for value in content]
    return content


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Unicode's categories of control, format (bidirectional, zero width), surrogate, private and
# unassigned characters, and of line and paragraph separators.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))

# ---- the version ----


def installed_version() -> str:
    """Returns the version of fedloom: of the installed package, else of the source tree."""
    # `fedloom --help` need not wait for these.
    import tomllib
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedloom")
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        if not project.is_file():
            return "unknown"
        return str(tomllib.loads(project.read_text())["project"]["version"])


# ---- crash points: named places at which a test kills the process ----

_ATOMIC = ("config", "schemas", "checkpoint", "models", "summary")  # files of `write_atomic`
_APPENDED = ("history", "ledger")  # files of `AppendLog`
CRASH_POINTS = (
    "nothing-asked",
    "exchange-unsent",
    "exchange-answered",
    "round-unclosed",
    "round-closed",
    *(f"{f}-{s}" for f in _ATOMIC for s in ("half", "written", "synced", "renamed", "in-place")),
    *(f"{f}-{s}" for f in _APPENDED for s in ("half", "written")),
    "checkpoint-between-renames",
    "history-cut",
)
_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Kills this process if FEDLOOM_CRASH_AT names this point; otherwise does nothing.

    FEDLOOM_CRASH_AT="name:3" kills the process the third time it passes the point.
    """
    wanted = os.environ.get("FEDLOOM_CRASH_AT")
    if wanted is None:
        return
    point, _, time = wanted.partition(":")
    if point not in CRASH_POINTS:
        raise unknown("place in FEDLOOM_CRASH_AT", point, CRASH_POINTS)
    _passed[name] += 1
    if name == point and _passed[name] == int(time or 1):
        os.kill(os.getpid(), signal.SIGKILL)


# ---- files that survive a crash ----

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # modes: the owner's only, whatever the umask


def make_private(folder: Path) -> Path:
    """Makes a folder, and its missing parents, that only their owner can open. Returns it.

    A folder that exists already keeps its mode: it may be shared on purpose.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    return folder


def open_private(path: str | Path, flags: int) -> int:
    """Opens a file for its owner only; the `opener` of `open`.

    A file that exists already, of an older version, loses the access of others.
    """
    handle = os.open(path, flags, PRIVATE_FILE)
    with suppress(OSError):  # the file of another user, which that user has shared
        os.fchmod(handle, PRIVATE_FILE)
    return handle


def write_atomic(
    path: Path,
    content: bytes,
    kind: str = "",
    keep: Path | None = None,
    *,
    shared: bool = False,
) -> None:
    """Replaces a file in one step and flushes it: readers see the old content or the new one.

    Args:
        path: The file.
        content: Its new content.
        kind: The file's name in crash points. The default is the file's stem.
        keep: Where to move the previous version. The default is to discard it.
        shared: Let the umask decide who may read the file. By default only its owner may.
    """
    kind, fresh = kind or path.stem, path.with_name(path.name + ".new")
    with _naming(path):
        try:
            with open(fresh, "wb", buffering=0, opener=None if shared else open_private) as file:
                _write(file, content, kind)
                os.fsync(file.fileno())
        except OSError:
            fresh.unlink(missing_ok=True)  # half a file is useless, and the disk may be full
            raise
        crash_point(f"{kind}-synced")
        if keep is not None and path.exists():
            os.replace(path, keep)
            crash_point(f"{kind}-between-renames")
        os.replace(fresh, path)
        crash_point(f"{kind}-renamed")
        _sync(path.parent)
    crash_point(f"{kind}-in-place")


class AppendLog:
    """A file that grows by whole entries and has one writer.

    Only the first `size` bytes are valid. Anything after them was being written when the process
    before stopped, and the first `append` overwrites it. From then on the file must be as this
    process has left it.
    """

    def __init__(self, path: Path, size: int = 0):
        self.path, self.size = path, size
        self._ours = False  # whether this process has written to the file

    def append(self, content: bytes) -> None:
        """Adds an entry after the valid bytes.

        Raises a SecondWriterError, and writes nothing, if another process has changed the file.
        """
        with (
            _naming(self.path),
            open(self.path, "ab", buffering=0, opener=open_private) as file,
        ):
            found = os.fstat(file.fileno()).st_size
            if self._ours and found != self.size:
                raise SecondWriterError(
                    f"run: another process has changed {str(self.path)!r} ({found} bytes instead "
                    f"of {self.size}); this process stops and leaves the folder as it is"
                )
            file.truncate(self.size)
            self._ours = True
            try:
                _write(file, content, self.path.stem)
            except OSError:
                file.truncate(self.size)
                raise
        self.size += len(content)

    def truncate(self) -> None:
        """Removes the bytes that are not valid."""
        with _naming(self.path), open(self.path, "ab", opener=open_private) as file:
            file.truncate(self.size)
        crash_point(f"{self.path.stem}-cut")

    def sync(self) -> int:
        """Flushes the file to the disk. Returns the number of valid bytes."""
        with _naming(self.path):
            _sync(self.path)
        return self.size

    def read(self) -> str:
        """Returns the valid content. Raises ValueError if the file has lost some of it."""
        with _naming(self.path), open(self.path, "rb") as file:
            content = file.read(self.size)
        if len(content) < self.size:
            name, there = self.path.name, len(content)
            raise ValueError(f"{name} has lost lines: {there} of {self.size} bytes are there")
        return content.decode()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError: a failed write does not know it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(file: FileIO, content: bytes, kind: str) -> None:
    view = memoryview(content)
    half = len(view) // 2
    for part, step in ((view[:half], "half"), (view[half:], "written")):  # a test stops in between
        while part:
            part = part[file.write(part) :]  # the system may accept less than it is given
        crash_point(f"{kind}-{step}")


def _sync(path: Path) -> None:
    """Flushes a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- one process at a time ----

LOCK = ".lock"  # in the folder that it locks
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a network disk without locks
_HOLDER = 500  # the longest text about the process that holds a lock
_locks: set[int] = set()  # the file descriptors of the locks that this process holds


@contextmanager
def locked(
    folder: Path,
    what: str,
    field: str = "out",
    name: str = LOCK,
    advice: str = "wait until it ends, or choose another folder",
) -> Iterator[None]:
    """Holds the lock of a folder. The system releases it when the process ends, however it ends.

    Raises a ConfigError that names the other process if one holds the lock. On a file system
    without locks the file names the process, and counts until that process has ended.

    Args:
        folder: The folder, which exists.
        what: What the folder is for, for the error message: "run".
        field: The setting that names the folder, for the error message.
        name: The name of the lock's file.
        advice: What to do, for the error message.
    """
    path = folder / name
    handle, holder = _lock(path)
    if holder is not None:
        raise ConfigError(
            f"{field}: another process works on the {what} in {str(folder)!r} "
            f"({holder or 'pid unknown'}); {advice}"
        )
    try:
        yield
    finally:
        if handle in _locks:  # not in a forked process, which has no lock
            with suppress(OSError):  # a folder that has become read-only: the file locks nothing
                if _is_same_file(handle, path):
                    path.unlink()
            _locks.discard(handle)
            os.close(handle)


def _lock(path: Path) -> tuple[int, str | None]:
    """Locks a file, which then describes this process.

    Returns its file descriptor, and None or the process that holds the lock, in words.
    """
    while True:
        handle = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            holder = _holder_of(handle)
        except OSError:
            os.close(handle)
            raise
        if holder is not None:
            os.close(handle)
            return -1, holder
        if _is_same_file(handle, path):  # else the process before removed it in the meantime
            os.truncate(handle, 0)
            os.pwrite(handle, (_this_process() + "\n").encode(), 0)
            _locks.add(handle)
            return handle, None
        os.close(handle)


def _holder_of(handle: int) -> str | None:
    """Locks a file. Returns None, or the process that holds the lock, in words."""
    written = " ".join(os.pread(handle, _HOLDER, 0).decode(errors="replace").split())
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return plain_text(written, _HOLDER)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        found = re.match(r"pid (\d+) on (\S+),", written)
        ended = found is None or (found[2] == os.uname().nodename and not _is_alive(int(found[1])))
        return None if ended else plain_text(written, _HOLDER)
    return None


def _this_process() -> str:
    """Returns this process in words: its number, host, time and command."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # of `python -m PACKAGE`
        program = program.parent
    command = shlex.join([program.name or "python", *sys.argv[1:]])
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    words = f"pid {os.getpid()} on {os.uname().nodename}, since {now}: {command}"
    return plain_text(words, _HOLDER // 2)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it belongs to another user
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _release_in_child() -> None:
    """Closes a forked process's copies of the locks: they end with the process that took them."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


os.register_at_fork(after_in_child=_release_in_child)

# ---- Ctrl-C and SIGTERM ----

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def graceful_signals() -> Iterator[None]:
    """Raises KeyboardInterrupt on the first Ctrl-C and SystemExit(143) on the first SIGTERM.

    The second signal kills the process at once. Signals that the parent process set to be ignored
    (`nohup`, background jobs) stay ignored. Works in the main thread only.
    """
    before = {
        number: handler
        for number in SIGNALS
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in before:
        _arm(number)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _first_signal:  # else one came, and the next must kill
                signal.signal(number, handler)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Holds the first signal back until the end of the block. A second one takes effect at once."""
    main = threading.current_thread() is threading.main_thread()  # other threads get no signals
    before = {n: h for n in SIGNALS if callable(h := signal.getsignal(n))} if main else {}
    received: list[int] = []
    owner = os.getpid()

    def hold(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1 or os.getpid() != owner:  # a forked process does not leave the block
            before[signal.Signals(number)](number, None)

    for number in before:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is _first_signal:
                _arm(number)
            else:
                signal.signal(number, handler)
        if len(received) == 1:
            before[signal.Signals(received[0])](received[0], None)


def _arm(number: signal.Signals) -> None:
    """Installs `_first_signal`, and makes the system reset the signal when it arrives.

    Python runs its handlers between two bytecode instructions. During a long call into C that is
    too late for a second signal.
    """
    signal.signal(number, _first_signal)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sysv_signal"):  # glibc; elsewhere `_first_signal` resets it
        libc.signal.restype = ctypes.c_void_p
        handler = libc.signal(ctypes.c_int(number), ctypes.c_void_p(None))  # Python's C handler
        libc.sysv_signal(ctypes.c_int(number), ctypes.c_void_p(handler))


def _first_signal(number: int, frame: object) -> None:
    for each in SIGNALS:
        if signal.getsignal(each) is _first_signal:
            signal.signal(each, signal.SIG_DFL)
    if number == signal.SIGTERM:
        raise SystemExit(128 + number)
    raise KeyboardInterrupt


# ---- processes ----
_cores_are_shared = False


def cores() -> int:
    """Returns the number of cores that this process may use, within the limits of a container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, _quota(Path("/sys/fs/cgroup/cpu.max")))


def _quota(limit: Path) -> int:
    """Returns the cores that a control group (version 2) allows, at least 1."""
    if not limit.exists():
        return sys.maxsize
    quota, period = limit.read_text().split()
    return sys.maxsize if quota == "max" else max(1, int(quota) // int(period))


def share_cores() -> None:
    """Says that other processes do the same as this one at the same time; see `free_cores`."""
    global _cores_are_shared
    _cores_are_shared = True


def free_cores() -> int:
    """Returns how many cores this process may take without being asked to.

    It is one if another process started this one, as a pool does: its siblings have the others.
    """
    from multiprocessing import parent_process  # here, since most commands do not need it

    return 1 if _cores_are_shared or parent_process() is not None else cores()


@contextmanager
def forking() -> Iterator[None]:
    """Lets the block fork. Python 3.12 warns if there are threads, as in a notebook.

    A forked process of fedloom does not use its parent's threads. Signals wait for the end of the
    block, because Python ignores exceptions in the functions that it calls after a fork.
    """
    with deferred_signals(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        yield


# ---- memory ----

_LARGE = 256 * 2**20  # blocks of at least this many bytes are returned to the system when freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from malloc.h
MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


@contextmanager
def retained_memory() -> Iterator[None]:
    """Makes glibc keep freed memory until the end of the block.

    A training step allocates the same blocks as the step before it. By default glibc returns large
    blocks to the system when they are freed, and each step pays for fresh pages: a quarter of the
    time on small graphs. Other allocators, and settings from the environment, are left alone. The
    previous thresholds cannot be read, so they are not restored.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE)
    try:
        yield
    finally:
        libc.malloc_trim(ctypes.c_size_t(0))


def allocate_from_one_arena() -> None:
    """Makes the threads that this process starts from now on allocate where its main thread does.

    By default glibc gives each thread memory of its own, which it returns to the system in spite of
    `retained_memory`.
    """
    if libc := _glibc():
        libc.mallopt(_M_ARENA_MAX, 1)


def _glibc() -> ctypes.CDLL | None:
    """Returns glibc; None if another allocator or the environment decides about memory."""
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    return None if not is_glibc or any(n in os.environ for n in MALLOC_VARIABLES) else libc


def peak_memory() -> int:
    """Returns the largest number of bytes that this process has had in memory."""
    status = Path("/proc/self/status")
    if status.exists():  # `getrusage` may report the peak of the parent process here
        lines = status.read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        if "VmHWM" in values:
            return int(values["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---- modules ----
def import_compiled(name: str) -> ModuleType:
    """Imports a compiled module of a package without the rest of the package.

    Some packages import all their modules at once, which takes long. Raises an ImportError if the
    package is not installed or has no such module.

    name: the module's full name, such as "sknetwork.clustering.louvain_core". It must not need its
    package.
    """
    if name in sys.modules:
        return sys.modules[name]
    package, *inner, last = name.split(".")
    spec = importlib.util.find_spec(package)  # finds the package and does not import it
    for root in (spec and spec.submodule_search_locations) or ():
        compiled = (ExtensionFileLoader, EXTENSION_SUFFIXES)
        found = FileFinder(str(Path(root, *inner)), compiled).find_spec(last)
        if found is not None and found.loader is not None:
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            return module
    raise ImportError(f"there is no compiled module {name!r}", name=name)


# ---- a user's own code ----
def import_file(path: Path, field: str) -> ModuleType:
    """Imports a user's Python file. Raises a ConfigError if it cannot be imported.

    field: the setting that names the file, for the error message.
    """
    if not path.is_file():
        raise ConfigError(f"{field}: there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"fedloom_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        not_frozen = "cannot inherit non-frozen dataclass" in str(error)
        hint = "; write @dataclass(frozen=True)" if not_frozen else ""
        raise ConfigError(
            f"{field}: {str(path)!r} cannot be imported ({type(error).__name__}: {error}){hint}"
        ) from error
    return module
