"""Peer channel: in a secure run, clients write to each other through a server that cannot read it.

    server                                  client
    greet_peers                          ►  ◄ key       a fresh X25519 public key, signed
    meet_peers      all public keys      ►              PeerChannel.meet: a key per direction (HKDF)
    a phase         its message          ►  ◄ blobs     {receiver: AES-256-GCM}: PeerChannel.seal
    its reader      {sender: blob}       ►              PeerChannel.open, then the phase itself

A blob is the number of the message in its direction (8 bytes), which is also the nonce, and the
ciphertext with its tag. Numbers only increase, so a message that arrives twice, or after a later
one, is refused. The phase is part of the plaintext, so a message of another phase is refused too.
A server that holds a message back until the same phase is asked again, and then delivers it in
place of the next one, is not noticed. The server still sees who writes to whom, when, and how much.
Every key is signed by its owner (`Identity`), so the server cannot hand out keys of its own.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedloom.errors import Refusal
from fedloom.privacy.identity import SIGNATURE_BYTES, Identity

KEY_BYTES = 32
ANNOUNCED_BYTES = KEY_BYTES + SIGNATURE_BYTES
NUMBER_BYTES = 8


class PeerChannel:
    """One client's keys for peer messages. They live as long as the process and are never saved.

    identity: the client's signing key and the public keys of all clients.
    """

    def __init__(self, identity: Identity):
        self.name, self._identity = identity.name, identity
        self._key = X25519PrivateKey.generate()
        # By peer: the cipher, and the number of the last message.
        self._outgoing: dict[str, tuple[AESGCM, int]] = {}
        self._incoming: dict[str, tuple[AESGCM, int]] = {}

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def announced(self) -> bytes:
        """The public key and its signature, 96 bytes."""
        return self.public + self._identity.sign("peer key", self.public)

    def meet(self, announced: dict[str, bytes]) -> None:
        """Takes what every client announced, once.

        A server that could change the keys later could read all messages from then on.
        """
        keys = {name: content[:KEY_BYTES] for name, content in announced.items()}
        if self._outgoing:
            raise Refusal(
                f"client {self.name!r} refuses to meet its peers again: it has their keys"
            )
        if keys.get(self.name) != self.public:
            raise Refusal(
                f"client {self.name!r} refuses to meet its peers: "
                "the key under its own name is not its own"
            )
        if len(set(keys.values())) < len(keys):
            raise Refusal(f"client {self.name!r} refuses to meet its peers: one key is there twice")
        for peer, public in keys.items():
            if peer == self.name:
                continue
            signature = announced[peer][KEY_BYTES:]
            if not self._identity.is_signed(peer, "peer key", public, signature):
                raise Refusal(
                    f"client {self.name!r} refuses to meet its peers: "
                    f"{peer!r} has not signed the key under its name"
                )
            try:
                secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise Refusal(
                    f"client {self.name!r} refuses to meet its peers: "
                    f"the key of {peer!r} is not valid"
                ) from None
            self._outgoing[peer] = (_cipher(secret, self.name, self.public, peer, public), 0)
            self._incoming[peer] = (_cipher(secret, peer, public, self.name, self.public), 0)

    def knows(self, peer: str) -> bool:
        """Returns whether there is a key for messages to this client."""
        return peer in self._outgoing

    def seal(self, receiver: str, plain: bytes) -> bytes:
        """Returns the encrypted message to a receiver."""
        cipher, last = self._outgoing[receiver]
        number = last + 1
        self._outgoing[receiver] = (cipher, number)
        encrypted = cipher.encrypt(number.to_bytes(12, "big"), plain, None)
        return number.to_bytes(NUMBER_BYTES, "big") + encrypted

    def open(self, sender: str, blob: bytes) -> bytes:
        """Decrypts a message.

        Raises Refusal if it was changed, is not from the sender, or arrived before.
        """
        if sender not in self._incoming:
            raise Refusal(
                f"client {self.name!r} refuses the message of {sender!r}: "
                "it has no key of that name"
            )
        cipher, last = self._incoming[sender]
        number = int.from_bytes(blob[:NUMBER_BYTES], "big")
        if number <= last:
            raise Refusal(
                f"client {self.name!r} refuses the message of {sender!r}: "
                f"number {number} came before"
            )
        try:
            plain = cipher.decrypt(number.to_bytes(12, "big"), blob[NUMBER_BYTES:], None)
        except InvalidTag:
            raise Refusal(
                f"client {self.name!r} refuses the message of {sender!r}: it was changed on the way"
            ) from None
        self._incoming[sender] = (cipher, number)
        return plain


def _cipher(
    secret: bytes, sender: str, sender_key: bytes, receiver: str, receiver_key: bytes
) -> AESGCM:
    """The cipher of one direction of a pair. Names cannot contain the separator \\x1f."""
    keys = sender_key + receiver_key
    info = b"\x1f".join((b"fedloom peer messages", sender.encode(), receiver.encode(), keys))
    return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret))
