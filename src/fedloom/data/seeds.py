"""Seeds by name: every random stream of a run depends on the run's seed and its own names only."""

import hashlib


def stream_seed(*names: object) -> int:
    """Returns a 63-bit seed that depends on all names: (run seed, party, purpose, ...)."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
