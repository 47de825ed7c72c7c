"""Key lock: one process at a time uses a key in a federation."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedloom._system import LOCK, locked
from fedloom.deploy.agreement import Agreement

END_IT = "end it first: a federation hears one process for each key"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def locked_key(key: Path, agreement: Agreement, owner: str) -> Iterator[None]:
    """Lets one process of this machine use a key. The lock is a file beside the key.

    Raises a ConfigError that names the other process. A folder of keys that cannot be written to
    has no locks. A key may serve several federations at the same time.

    Args:
        key: The file of the key, which exists.
        agreement: The agreement of the federation.
        owner: Whose key it is, for the error message.
    """
    federation = f"{agreement.coordinator.text()} {agreement.federation.address}"
    name = f".{key.name}.{hashlib.sha256(federation.encode()).hexdigest()[:8]}{LOCK}"
    with ExitStack() as lock:
        try:
            lock.enter_context(
                locked(key.parent, f"identity of {owner}", field="key", name=name, advice=END_IT)
            )
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
        yield
