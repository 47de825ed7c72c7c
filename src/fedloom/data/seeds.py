"""Seeds by name: a random stream depends only on the run's seed and on the stream's names."""

import hashlib


def stream_seed(*names: object) -> int:
    """Returns a 63-bit seed that depends on all names: (run seed, party, purpose, ...)."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
