"""Identity: how a client proves to the others that a statement is its own.

Every client has an Ed25519 key, and the public keys of all others. A signature covers its purpose
and the context of the run, so that it is valid for nothing else. In a deployment the keys are those
of the agreement, and the context is the digest of the agreement. In a simulation the keys follow
from the seed: the protocol and its cost are the same, and there is nothing to protect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_BYTES = 64


class Identity:
    """A client's signing key, and the public keys of all clients.

    Args:
        name: The client's name.
        key: Its signing key.
        keys: Returns the public key of each client. Keys may change during a run.
        context: What all clients of the run have agreed to, as a digest.
    """

    def __init__(
        self,
        name: str,
        key: Ed25519PrivateKey,
        keys: Callable[[], Mapping[str, Ed25519PublicKey]],
        context: bytes,
    ):
        self.name, self._key, self._keys, self._context = name, key, keys, context

    def sign(self, purpose: str, content: bytes) -> bytes:
        """Returns the client's signature of a statement, 64 bytes.

        Args:
            purpose: What the statement is for.
            content: The statement.
        """
        return self._key.sign(self._statement(self.name, purpose, content))

    def is_signed(self, client: str, purpose: str, content: bytes, signature: bytes) -> bool:
        """Returns whether a client has signed a statement for this purpose in this context."""
        if (key := self._keys().get(client)) is None:
            return False
        statement = self._statement(client, purpose, content)
        return _is_valid(key.public_bytes_raw(), statement, signature)

    def _statement(self, client: str, purpose: str, content: bytes) -> bytes:
        parts = (b"fedloom statement 1", purpose.encode(), self._context, client.encode(), content)
        return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


@lru_cache(maxsize=2**14)  # in a simulation many clients of one process verify the same signature
def _is_valid(public: bytes, statement: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except InvalidSignature:
        return False
    return True


def simulated_identity(name: str, clients: tuple[str, ...], seed: int) -> Identity:
    """Returns the identity of a client in a simulation.

    Args:
        name: The client's name.
        clients: The names of all clients.
        seed: The seed of the run.
    """
    context = sha256(f"fedloom simulation {seed}".encode()).digest()
    keys = partial(_simulated_keys, clients, seed)
    return Identity(name, _simulated_key(name, seed), keys, context)


def _simulated_key(name: str, seed: int) -> Ed25519PrivateKey:
    secret = sha256(f"fedloom simulated client {seed} {name}".encode()).digest()
    return Ed25519PrivateKey.from_private_bytes(secret)


@lru_cache(maxsize=4)
def _simulated_keys(clients: tuple[str, ...], seed: int) -> Mapping[str, Ed25519PublicKey]:
    return {name: _simulated_key(name, seed).public_key() for name in clients}
