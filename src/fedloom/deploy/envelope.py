"""Envelopes: signed containers for orders and answers.

An envelope proves who wrote its content and for which exchange, and that it was not changed.

    8 bytes   "fedloomE"
    2 bytes   version                          (numbers in front of the header are big-endian)
    2 bytes   length of the header
    header    canonical JSON: kind, party, phase, round, run, sequence, version
    64 bytes  Ed25519 signature over sha256(domain, length of the header, header, sha256(body))
    body      the rest: bytes of a message, or the text of an error

The coordinator signs an order; its `party` is the receiver. A party signs its answer; its `party`
is the sender.

TLS identifies the sender only if the SuperLink that relays the message is honest. The signature
also protects against a dishonest relay. `Gate` accepts one answer per party to the exchange that
is open, and nothing else. A run that is resumed from a checkpoint must get a new run id: under the
old one, answers that were recorded after the checkpoint would be valid again.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedloom.deploy.keys import PARTY_NAME, PartyKey, PublicKey
from fedloom.errors import MessageError

VERSION = 1
MAGIC = b"fedloomE"
# The domain of a signature: a signature of one domain is not valid in another.
ANSWER = b"fedloom envelope 1: a party's answer\0"
ORDER = b"fedloom envelope 1: an order\0"
PREFIX_BYTES = len(MAGIC) + 4
SIGNATURE_BYTES = 64
HEADER_LIMIT = 2048
ENVELOPE_BYTES = PREFIX_BYTES + HEADER_LIMIT + SIGNATURE_BYTES  # besides the content, at most
DEFAULT_LIMIT = 2**31  # bytes of an envelope; a deployment sets its own
REMEMBERED = 64  # answered exchanges that a gate remembers for each party

Kind = Literal["order", "answer", "error"]
_RUN = re.compile(r"(?:[0-9a-f]{2}){4,32}")


class EnvelopeError(MessageError):
    """An envelope is refused. `reason` is one word, for counting."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"envelope: {text}")
        self.reason = reason


@dataclass(frozen=True)
class Header:
    """The header of an envelope.

    Attributes:
        run: The id of the coordinator's session, 8 to 64 hex digits.
        round: The round of the exchange.
        sequence: The number of the exchange in its run.
        party: The party that receives the order, or that sends the answer.
        phase: The phase that is ordered or answered.
        kind: "order", "answer" or "error".
    """

    run: str
    round: int
    sequence: int
    party: str
    phase: str
    kind: Kind = "answer"

    def __post_init__(self) -> None:
        for name in ("run", "party", "phase", "kind"):
            if not isinstance(getattr(self, name), str):
                raise EnvelopeError("format", f"{name} is not a text")
        for name in ("round", "sequence"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**63:  # a bool is an int too
                raise EnvelopeError("format", f"{name} is not a whole number from 0 to 2^63 - 1")
        if not _RUN.fullmatch(self.run):
            raise EnvelopeError("format", "run is not 8 to 64 hex digits")
        if not PARTY_NAME.fullmatch(self.party):
            raise EnvelopeError("format", "party is not a valid name")
        if not self.phase.isidentifier() or len(self.phase) > 64:
            raise EnvelopeError("format", "phase is not a valid name")
        if self.kind not in ("order", "answer", "error"):
            raise EnvelopeError(
                "format", f"kind is {self.kind[:20]!r}; valid: order, answer, error"
            )


@dataclass(frozen=True)
class Opened:
    """The content of an envelope that was accepted."""

    kind: Kind
    body: bytes


def sign(body: bytes, header: Header, key: PartyKey) -> bytes:
    """Returns the envelope of an order or an answer, signed with the sender's key."""
    text = _canonical({**asdict(header), "version": VERSION})
    signature = key.signing.sign(_digest(header.kind, text, body))
    return b"".join(
        (MAGIC, VERSION.to_bytes(2, "big"), len(text).to_bytes(2, "big"), text, signature, body)
    )


def open_order(
    data: bytes, party: str, coordinator: PublicKey, limit: int = DEFAULT_LIMIT
) -> tuple[Header, bytes]:
    """Returns the header and the body of an order.

    Raises EnvelopeError unless the coordinator signed it for this party. The party itself must
    check that the order is current.
    """
    header, text, signature, body = parse(data, limit)
    if header.kind != "order":
        raise EnvelopeError("format", f"is an {header.kind}, not an order")
    if header.party != party:
        raise EnvelopeError("foreign", f"is for {header.party!r}, but this is {party!r}")
    if not _is_signed_by(coordinator.signing, signature, _digest(header.kind, text, body)):
        raise EnvelopeError("forged", "is not signed by the coordinator")
    return header, bytes(body)


class Gate:
    """Accepts one answer per party to the exchange that is open. For use in one thread.

    `refused` counts refused envelopes by reason:

        size         larger than the limit
        format       not a well-formed envelope
        version      another version of fedloom
        foreign      names a party other than its sender, or an unknown one
        forged       the signature is not the party's
        run          belongs to another run
        round        names another round than the exchange that is open
        phase        names another phase than the exchange that is open
        replay       answers an earlier exchange that the party answered in time
        late         answers an earlier exchange that the party did not answer in time
        duplicate    a second answer to this exchange
        early        answers an exchange that has not begun
    """

    def __init__(self, keys: Mapping[str, PublicKey], run: str, limit: int = DEFAULT_LIMIT):
        assert _RUN.fullmatch(run), "a run's id is 8 to 64 hex digits"
        self.run, self.limit = run, limit
        self.refused: Counter[str] = Counter()
        self._answered: dict[str, deque[int]] = {}
        self._open = 0
        self.admit(keys)

    def admit(self, keys: Mapping[str, PublicKey]) -> None:
        """Changes the parties' keys. A party without a key is not accepted any more."""
        self._keys = dict(keys)
        for party in keys:
            self._answered.setdefault(party, deque(maxlen=REMEMBERED))

    def open(
        self,
        data: bytes,
        *,
        sender: str,
        round: int,
        sequence: int,
        phase: str,
        limit: int | None = None,
    ) -> Opened:
        """Returns the content of an envelope, or raises EnvelopeError with a reason.

        The checks are, in this order: size, header, sender, signature, run, sequence, round, phase.

        Args:
            data: The envelope.
            sender: The party that it came from.
            round: The round of the exchange that is open.
            sequence: The number of that exchange; it never decreases.
            phase: The phase of that exchange.
            limit: The most bytes of the content. None: the gate's limit is the only one.
        """
        assert sequence >= self._open, (
            f"exchange {sequence} after {self._open}: a closed exchange stays closed"
        )
        self._open = sequence
        try:
            allowed = self.limit if limit is None else min(self.limit, limit + ENVELOPE_BYTES)
            header, text, signature, body = parse(data, allowed)
            self._require_signed(header, sender, text, signature, body)
            self._require_current(header, round, sequence, phase)
        except EnvelopeError as error:
            self.refused[error.reason] += 1
            raise
        self._answered[sender].append(sequence)
        return Opened(header.kind, bytes(body))

    def _require_signed(
        self, header: Header, sender: str, text: bytes, signature: bytes, body: memoryview
    ) -> None:
        if sender not in self._keys:
            raise EnvelopeError("foreign", f"sent by {sender!r}, which is not a party of this run")
        if header.kind == "order":
            raise EnvelopeError("foreign", f"sent by {sender!r}, which may not give orders")
        if header.party != sender:
            raise EnvelopeError(
                "foreign", f"sent by {sender!r}, but its header names {header.party!r}"
            )
        if not _is_signed_by(
            self._keys[sender].signing, signature, _digest(header.kind, text, body)
        ):
            raise EnvelopeError(
                "forged", f"its header names {sender!r}, but {sender!r} did not sign it"
            )

    def _require_current(self, header: Header, round: int, sequence: int, phase: str) -> None:
        sender, number = f"from {header.party!r}", header.sequence
        answered = self._answered[header.party]
        if header.run != self.run:
            raise EnvelopeError(
                "run", f"{sender}: belongs to run {header.run}, this run is {self.run}"
            )
        now = f"the current one is {sequence}"
        if number > sequence:
            raise EnvelopeError("early", f"{sender}: answers exchange {number}, {now}")
        if number in answered and number == sequence:
            raise EnvelopeError("duplicate", f"{sender}: answers exchange {number} a second time")
        # An answer to an exchange that is too old to be remembered is most likely a replay.
        forgotten = len(answered) == REMEMBERED and number < answered[0]
        if number in answered or forgotten:
            raise EnvelopeError("replay", f"{sender}: answers exchange {number} again, {now}")
        if number < sequence:
            raise EnvelopeError("late", f"{sender}: answers closed exchange {number}, {now}")
        if header.round != round:
            raise EnvelopeError(
                "round",
                f"{sender}: names round {header.round}, exchange {number} is in round {round}",
            )
        if header.phase != phase:
            raise EnvelopeError(
                "phase", f"{sender}: answers {header.phase!r}, the phase is {phase!r}"
            )


def parse(data: bytes, limit: int = DEFAULT_LIMIT) -> tuple[Header, bytes, bytes, memoryview]:
    """Returns the header, the header's bytes, the signature and the body of an envelope.

    It checks the form only, not the signature.
    """
    if len(data) > limit:
        raise EnvelopeError("size", f"{len(data)} bytes, more than the limit of {limit}")
    if len(data) < PREFIX_BYTES + SIGNATURE_BYTES:
        raise EnvelopeError("format", f"{len(data)} bytes, too short to be an envelope")
    if data[: len(MAGIC)] != MAGIC:
        raise EnvelopeError("format", f"does not begin with {MAGIC.decode()!r}")
    version = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "big")
    _require_version(version)
    length = int.from_bytes(data[len(MAGIC) + 2 : PREFIX_BYTES], "big")
    if length > HEADER_LIMIT:
        raise EnvelopeError("format", f"the header claims {length} bytes, more than {HEADER_LIMIT}")
    start = PREFIX_BYTES + length + SIGNATURE_BYTES
    if start > len(data):
        raise EnvelopeError(
            "format", f"cut off: header and signature need {start} bytes, there are {len(data)}"
        )
    text = data[PREFIX_BYTES : PREFIX_BYTES + length]
    return _read_header(text), text, data[PREFIX_BYTES + length : start], memoryview(data)[start:]


def _read_header(text: bytes) -> Header:
    try:
        header = json.loads(text)
        canonical = isinstance(header, dict) and _canonical(header) == text
    except (ValueError, RecursionError):
        canonical = False
    if not canonical:
        raise EnvelopeError("format", "the header is not canonical JSON")
    fields = {*Header.__dataclass_fields__, "version"}
    for name in sorted(fields - header.keys()):
        raise EnvelopeError("format", f"the header has no {name!r}")
    for name in sorted(header.keys() - fields):
        raise EnvelopeError(
            "format", f"the header has an unknown {name[:40]!r}; valid: {', '.join(sorted(fields))}"
        )
    version = header.pop("version")
    if type(version) is not int:
        raise EnvelopeError("format", "version is not a whole number")
    _require_version(version)
    return Header(**header)


def _require_version(version: int) -> None:
    if version != VERSION:
        raise EnvelopeError("version", f"version {version}, this side uses {VERSION}")


def _canonical(header: dict[str, Any]) -> bytes:
    """Returns the only valid form of a header: sorted names, no spaces, ASCII."""
    return json.dumps(
        header, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def _digest(kind: Kind, text: bytes, body: bytes | memoryview) -> bytes:
    domain = ORDER if kind == "order" else ANSWER
    return sha256(
        b"".join((domain, len(text).to_bytes(2, "big"), text, sha256(body).digest()))
    ).digest()


def _is_signed_by(key: Ed25519PublicKey, signature: bytes, digest: bytes) -> bool:
    try:
        key.verify(signature, digest)
    except InvalidSignature:
        return False
    return True
