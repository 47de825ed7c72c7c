"""Request signatures: every request of a party to the SuperLink is signed as a whole.

    x-fedloom-request: TIME NONCE DIGEST SIGNATURE

    TIME        seconds since 1970 at the party, with milliseconds
    NONCE       16 hex digits that the party uses once
    DIGEST      sha256 of the body, in hex
    SIGNATURE   Ed25519, in base64, over method, path, length of the body, time, nonce and digest

Flower signs only the time, with the party's node key, and verifies it after the body is in memory.
So whoever sees one request could send any other one for five minutes. This signature covers the
whole request and is verified before the body is read. `Verifier` accepts each request once.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNED = "x-fedloom-request"  # header: time, nonce, digest and signature of a party's request
DOMAIN = "fedloom request 1: to the SuperLink"  # a signature of another domain is not valid here
# Seconds that a party's clock may be behind or ahead. Flower, behind the door, allows 305 and 5.
BEHIND, AHEAD = 300.0, 5.0
_FORM = re.compile(r"(\d{1,12}\.\d{3}) ([0-9a-f]{16}) ([0-9a-f]{64}) ([A-Za-z0-9+/]{86}==)")


NOT_REGISTERED = "the key of this request is not registered"


class UnverifiedError(Exception):
    """A request that its sender has not proven to have signed. The text says why."""


class ClockError(UnverifiedError):
    """A request with a valid signature whose time is not valid."""


def sign_request(
    key: Ed25519PrivateKey, method: str, path: str, body: bytes, now: float | None = None
) -> str:
    """Returns the value of the header `SIGNED`.

    Args:
        key: The party's signing key.
        method: The HTTP method.
        path: The path of the URL.
        body: The body.
        now: Seconds since 1970; None asks this machine's clock.
    """
    stamp = f"{time.time() if now is None else now:.3f}"
    nonce, digest = secrets.token_hex(8), sha256(body).hexdigest()
    signature = key.sign(_signed_bytes(method, path, len(body), stamp, nonce, digest))
    return f"{stamp} {nonce} {digest} {base64.b64encode(signature).decode('ascii')}"


def _signed_bytes(
    method: str, path: str, length: int, stamp: str, nonce: str, digest: str
) -> bytes:
    return "\n".join((DOMAIN, method, path, str(length), stamp, nonce, digest)).encode()


class Verifier:
    """Verifies the signatures of requests. It accepts each request once.

    It remembers the nonces of the last five to ten minutes, about 100 bytes for each request.

    Args:
        keys: The parties' signing keys, by the name that a request states.
        clock: Returns the time, in seconds since 1970.
    """

    def __init__(
        self, keys: Mapping[str, Ed25519PublicKey], clock: Callable[[], float] = time.time
    ):
        self.keys, self._clock = keys, clock
        self._number_of: dict[str, int] = {}
        self.admit(keys)
        self._recent: set[int] = set()
        self._older: set[int] = set()
        self._since = clock()

    def admit(self, keys: Mapping[str, Ed25519PublicKey]) -> None:
        """Accepts requests that are signed with these keys, and no others from now on."""
        self.keys = keys
        for party in keys:
            self._number_of.setdefault(party, len(self._number_of))

    def verify(self, party: str, header: str, method: str, path: str, length: int) -> str:
        """Returns the digest that the body must have. Raises UnverifiedError.

        Args:
            party: The party that the request claims to be from.
            header: The value of `SIGNED`.
            method: The HTTP method.
            path: The path of the URL.
            length: The length of the body.
        """
        key, found = self.keys.get(party), _FORM.fullmatch(header)
        if key is None:
            raise UnverifiedError(NOT_REGISTERED)
        if found is None:
            raise UnverifiedError(f"this request has no valid header {SIGNED}")
        stamp, nonce, digest, signature = found.groups()
        try:
            key.verify(
                base64.b64decode(signature, validate=True),
                _signed_bytes(method, path, length, stamp, nonce, digest),
            )
        except (InvalidSignature, binascii.Error):
            raise UnverifiedError("the signature of this request is not valid") from None
        self._require_time(float(stamp))
        self._require_new(party, nonce)
        return digest

    def _require_time(self, stamp: float) -> None:
        offset = stamp - self._clock()
        if not -BEHIND < offset < AHEAD:
            raise ClockError(
                f"the clock of this party is {abs(offset):.0f} s "
                f"{'ahead of' if offset > 0 else 'behind'} the coordinator's, which allows "
                f"{AHEAD:.0f} s ahead and {BEHIND:.0f} s behind; set the clock"
            )

    def _require_new(self, party: str, nonce: str) -> None:
        now, used = self._clock(), self._number_of[party] << 64 | int(nonce, 16)
        if now - self._since >= BEHIND + AHEAD:
            # The time of every request in the older set is by now too long ago.
            self._older, self._recent, self._since = self._recent, set(), now
        if used in self._recent or used in self._older:
            raise UnverifiedError("this request was sent before")
        self._recent.add(used)
