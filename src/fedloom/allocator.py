"""The C library's allocator, told to keep what is freed: a training step asks for the same blocks as the step before it.

Left alone, glibc gives large blocks back to the system as soon as they are freed, and every step then pays for fresh pages: on small graphs
that is a quarter of the time.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LARGE = 256 * 2**20  # bytes of a block from which on it is given back at once
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@contextmanager
def freed_is_kept() -> Iterator[None]:
    """Freed memory stays with the process until the end, then all of it goes back. Where the allocator is not glibc's, nothing is changed.

    glibc cannot be asked how it was set, so it is left as it is afterwards. Who has set it by its own variables is not overruled.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim") or any(name in os.environ for name in CHOSEN_BY_USER):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, LARGE)
    libc.mallopt(M_TRIM_THRESHOLD, 4 * LARGE)
    try:
        yield
    finally:
        libc.malloc_trim(ctypes.c_size_t(0))


def peak() -> int:
    """The most bytes that this process has had in memory so far."""
    status = Path("/proc/self/status")
    if status.exists():  # what `getrusage` says here may be the peak of the process that started this one
        told = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmHWM" in told:
            return int(told["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
