"""Sealed letters: in a secure run clients write to each other through a server that cannot read, change or repeat what it carries.

    server                                  client
    greet_peers                          ►  ◄ key          a fresh X25519 public key
    meet_peers      everybody's keys     ►                 Postbox.meet: a key for each direction of each pair, by HKDF
    a phase         its message          ►  ◄ blobs        {receiver: letter under AES-256-GCM}: Postbox.seal
    its reader      {sender: blob}       ►                 Postbox.open, then the phase itself

A blob is the number of the letter in its direction (8 bytes), which is also the nonce, and the ciphertext with its tag. Numbers only go up,
so a letter that comes twice, or after a later one, is refused; the phase is written inside, so one of another phase is, too. A letter
that is held back until the same phase is asked again, and then comes in place of the next, is not noticed: a server that does so cheats.
What the server still sees is who writes to whom, when, and how much. As in secure sums there are no signatures: a server that hands out
keys of its own making stands in the middle, which an honest but curious one does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedloom.message import Message, check, decode, encode
from fedloom.method import expected_letters
from fedloom.privacy.secure_sum import KEY_BYTES, Refusal

if TYPE_CHECKING:
    from fedloom.method import Method
    from fedloom.party import Client, Server

KEY_PHASES = ("greet_peers", "meet_peers")
NUMBER_BYTES = 8


class Postbox:
    """One client's keys for letters. They live as long as the process and are never written down."""

    def __init__(self, name: str):
        self.name = name
        self._key = X25519PrivateKey.generate()
        self._outgoing: dict[str, tuple[AESGCM, int]] = {}  # the cipher, and the number of the last letter
        self._incoming: dict[str, tuple[AESGCM, int]] = {}

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def meet(self, keys: dict[str, bytes]) -> None:
        """Takes every client's public key, once: a server that could change them later could read from then on."""
        if self._outgoing:
            raise Refusal(f"client {self.name!r} refuses to meet its peers again: it has their keys")
        if keys.get(self.name) != self.public:
            raise Refusal(f"client {self.name!r} refuses to meet its peers: the key under its own name is not its own")
        if len(set(keys.values())) < len(keys):
            raise Refusal(f"client {self.name!r} refuses to meet its peers: one key is there twice")
        for peer, public in keys.items():
            if peer == self.name:
                continue
            try:
                secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise Refusal(f"client {self.name!r} refuses to meet its peers: the key of {peer!r} is not valid") from None
            self._outgoing[peer] = (_cipher(secret, self.name, self.public, peer, public), 0)
            self._incoming[peer] = (_cipher(secret, peer, public, self.name, self.public), 0)

    def knows(self, peer: str) -> bool:
        """Whether there is a key for letters to this client."""
        return peer in self._outgoing

    def seal(self, receiver: str, plain: bytes) -> bytes:
        """Takes what the receiver is to read, gives what may travel."""
        cipher, last = self._outgoing[receiver]
        number = last + 1
        self._outgoing[receiver] = (cipher, number)
        return number.to_bytes(NUMBER_BYTES, "big") + cipher.encrypt(number.to_bytes(12, "big"), plain, None)

    def open(self, sender: str, blob: bytes) -> bytes:
        """Takes what came, gives what the sender wrote; Refusal if it was changed, is not from the sender, or came before."""
        if sender not in self._incoming:
            raise Refusal(f"client {self.name!r} refuses the letter of {sender!r}: it has no key of that name")
        cipher, last = self._incoming[sender]
        number = int.from_bytes(blob[:NUMBER_BYTES], "big")
        if number <= last:
            raise Refusal(f"client {self.name!r} refuses the letter of {sender!r}: number {number} came before")
        try:
            plain = cipher.decrypt(number.to_bytes(12, "big"), blob[NUMBER_BYTES:], None)
        except InvalidTag:
            raise Refusal(f"client {self.name!r} refuses the letter of {sender!r}: it was changed on the way") from None
        self._incoming[sender] = (cipher, number)
        return plain


def _cipher(secret: bytes, sender: str, sender_key: bytes, receiver: str, receiver_key: bytes) -> AESGCM:
    """The cipher of one direction of a pair. Names cannot contain the separator, so no two directions have the same info."""
    info = b"fedloom letters\x1f" + sender.encode() + b"\x1f" + receiver.encode() + b"\x1f" + sender_key + receiver_key
    return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret))


# ---- a client's side ----
def meet(client: Client, phase: str, message: Message) -> Message:
    """A client's part in the exchange of keys."""
    if phase == "greet_peers":
        if client.postbox is not None:
            raise Refusal(f"client {client.name!r} refuses to greet its peers again: whoever changes keys may want to read")
        client.postbox = Postbox(client.name)
        return {"key": _tensor(client.postbox.public)}
    _postbox(client).meet({name: _bytes(key) for name, key in message["keys"].items()})
    return {}


def write(method: Method, client: Client, phase: Any, message: Message) -> Message:
    """A phase's letters, checked by their writer, since nobody on the way can, and sealed."""
    reply = phase(client, **message)
    expected = expected_letters(method, phase, message, reply, client.facts, client.name)
    check(reply, expected, f"client {client.name!r} in {phase.__name__!r}")
    if not phase.sealed:
        return reply
    box = _postbox(client)
    known = {to: letter for to, letter in reply.items() if box.knows(to)}  # who sent no key will not read
    return {to: _tensor(box.seal(to, encode(letter, phase.__name__))) for to, letter in known.items()}


def read(method: Method, client: Client, reader: str, letters: Message) -> Message:
    """The letters that came for a phase, opened and held against what their writer's phase declares."""
    writers = [f for f in map(method.__getattribute__, dir(type(method))) if getattr(f, "read_by", None) == reader]
    if len(writers) != 1:
        raise Refusal(f"client {client.name!r} refuses letters in {reader!r}: {len(writers)} phases write to it, must be one")
    (writer,) = writers
    opened = letters
    if writer.sealed:
        box = _postbox(client)
        opened = {sender: decode(box.open(sender, _bytes(blob)), writer.__name__) for sender, blob in letters.items()}
    expected = expected_letters(method, writer, {}, opened, client.facts, client.name)
    check(opened, expected, f"client {client.name!r} in {reader!r}, the letters")
    return opened


def _postbox(client: Client) -> Postbox:
    if client.postbox is None:
        raise Refusal(f"client {client.name!r} refuses: no keys for letters were exchanged")
    return client.postbox


# ---- the server's side ----
def introduce(server: Server) -> None:
    """Gives every client the others' keys, once a run."""
    if server.keys_met:
        return
    greeted = server.exchange("greet_peers", {c: {} for c in server.clients}, lambda *_: (("key", "uint8", (KEY_BYTES,)),))
    keys = greeted.column("key")
    server.exchange("meet_peers", {c: {"keys": keys} for c in greeted}, lambda *_: ())
    server.keys_met = True


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
