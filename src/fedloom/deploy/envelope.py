"""Envelopes: what orders and answers travel in, so that each side knows who wrote them, for which exchange, and that nobody changed them.

    8 bytes   "fedloomE"
    2 bytes   version                          (numbers in front of the header are big-endian)
    2 bytes   length of the header
    header    canonical JSON: kind, party, phase, round, run, sequence, version
    64 bytes  Ed25519 signature over sha256(domain, length of the header, header, sha256(body))
    body      the rest: bytes of a message, or the text of an error

`party` is who answers: an order is signed by the coordinator and names the party that it is for, an answer by the party itself.

TLS tells the coordinator who sent something, as long as whoever carries it is honest; the signature holds also against a carrier that is
not. `Gate` lets in what answers the question that is open now, once, and nothing else. Whoever starts a run again from a checkpoint must
give it a new run id: under the old one, answers that were recorded after the checkpoint would fit once more.
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
ANSWER, ORDER = (
    b"fedloom envelope 1: a party's answer\0",
    b"fedloom envelope 1: an order\0",
)  # what a signature is for: it fits nothing else
PREFIX_BYTES = len(MAGIC) + 4
SIGNATURE_BYTES = 64
HEADER_LIMIT = 2048
DEFAULT_LIMIT = 2**31  # bytes of an envelope; a deployment sets its own
REMEMBERED = 64  # answered exchanges that a gate keeps for each party

Kind = Literal["order", "answer", "error"]
_RUN = re.compile(r"(?:[0-9a-f]{2}){4,32}")


class EnvelopeError(MessageError):
    """An envelope that is refused; `reason` is one word, for counting."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"envelope: {text}")
        self.reason = reason


@dataclass(frozen=True)
class Header:
    """What an envelope says of itself. `sequence` is the number of the exchange in its run, `run` the run's id as 8 to 64 hex digits."""

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
    """What was in an envelope that was let in."""

    kind: Kind
    body: bytes


def sign(body: bytes, header: Header, key: PartyKey) -> bytes:
    """Takes what a party answers and to what, or what it is ordered to do, gives the bytes that travel."""
    text = _canonical({**asdict(header), "version": VERSION})
    signature = key.signing.sign(_digest(header.kind, text, body))
    return b"".join(
        (MAGIC, VERSION.to_bytes(2, "big"), len(text).to_bytes(2, "big"), text, signature, body)
    )


def open_order(
    data: bytes, party: str, coordinator: PublicKey, limit: int = DEFAULT_LIMIT
) -> tuple[Header, bytes]:
    """Takes what a party was sent, gives the header and what is ordered; an EnvelopeError unless it is the coordinator's, for this party.

    Whether it is of now is for the party to say, who knows what came before.
    """
    header, text, signature, body = parse(data, limit)
    if header.kind != "order":
        raise EnvelopeError("format", f"is an {header.kind}, not an order")
    if header.party != party:
        raise EnvelopeError("foreign", f"is for {header.party!r}, this is {party!r}")
    if not _is_signed_by(coordinator.signing, signature, _digest(header.kind, text, body)):
        raise EnvelopeError("forged", "is not signed by the coordinator")
    return header, bytes(body)


class Gate:
    """The coordinator's side of one run: lets in each party's answer to the exchange that is open, once. For use in one thread.

    `refused` counts what was not let in, by the reason in the error:

        size, format, version    larger than the limit; not an envelope to the order; of another version of fedloom
        foreign, forged          says another party than its sender, or nobody known; the signature is not that party's
        run, round, phase        belongs to something else than what is asked now
        replay, late             of an earlier exchange that the party did answer in time, or did not
        duplicate, early         a second answer to this exchange; of an exchange that has not begun
    """

    def __init__(self, keys: Mapping[str, PublicKey], run: str, limit: int = DEFAULT_LIMIT):
        assert _RUN.fullmatch(run), "a run's id is 8 to 64 hex digits"
        self.run, self.limit = run, limit
        self.refused: Counter[str] = Counter()
        self._keys = dict(keys)
        self._answered: dict[str, deque[int]] = {party: deque(maxlen=REMEMBERED) for party in keys}
        self._open = 0

    def open(self, data: bytes, *, sender: str, round: int, sequence: int, phase: str) -> Opened:
        """Takes what `sender` sent while this exchange was open, gives what it holds; an EnvelopeError with a reason if it must not count.

        Checked in this order: size, header, whose it is, signature, run, sequence, round and phase. Numbers of exchanges never fall.
        """
        assert sequence >= self._open, (
            f"exchange {sequence} after {self._open}: an exchange that was closed stays closed"
        )
        self._open = sequence
        try:
            header, text, signature, body = parse(data, self.limit)
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
            raise EnvelopeError("foreign", f"sent by {sender!r}, who is no party of this run")
        if header.kind == "order":
            raise EnvelopeError("foreign", f"sent by {sender!r}, who gives no orders")
        if header.party != sender:
            raise EnvelopeError(
                "foreign", f"sent by {sender!r}, but says it is of {header.party!r}"
            )
        if not _is_signed_by(
            self._keys[sender].signing, signature, _digest(header.kind, text, body)
        ):
            raise EnvelopeError(
                "forged", f"says it is of {sender!r}, but {sender!r} did not sign it"
            )

    def _require_current(self, header: Header, round: int, sequence: int, phase: str) -> None:
        who, number, answered = (
            f"of {header.party!r}",
            header.sequence,
            self._answered[header.party],
        )
        if header.run != self.run:
            raise EnvelopeError("run", f"{who} belongs to run {header.run}, this is {self.run}")
        if number > sequence:
            raise EnvelopeError("early", f"{who} answers exchange {number}, now is {sequence}")
        if number in answered and number == sequence:
            raise EnvelopeError("duplicate", f"{who} answers exchange {number} a second time")
        forgotten = (
            len(answered) == REMEMBERED and number < answered[0]
        )  # so old that only a replay is likely
        if number in answered or forgotten:
            raise EnvelopeError(
                "replay", f"{who} answers exchange {number} again, now is {sequence}"
            )
        if number < sequence:
            raise EnvelopeError(
                "late", f"{who} answers exchange {number}, which was closed: now is {sequence}"
            )
        if header.round != round:
            raise EnvelopeError(
                "round",
                f"{who} says exchange {number} is in round {header.round}, it is in {round}",
            )
        if header.phase != phase:
            raise EnvelopeError("phase", f"{who} answers {header.phase!r}, asked was {phase!r}")


def parse(data: bytes, limit: int = DEFAULT_LIMIT) -> tuple[Header, bytes, bytes, memoryview]:
    """Takes an envelope, gives its header, the header's bytes, the signature and the body, all unproven: only the form is checked."""
    if len(data) > limit:
        raise EnvelopeError("size", f"{len(data)} bytes, more than the limit of {limit}")
    if len(data) < PREFIX_BYTES + SIGNATURE_BYTES:
        raise EnvelopeError("format", f"{len(data)} bytes, too short to be one")
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
            "format", f"cut off: header and signature need {start} bytes, {len(data)} came"
        )
    text = data[PREFIX_BYTES : PREFIX_BYTES + length]
    return _read_header(text), text, data[PREFIX_BYTES + length : start], memoryview(data)[start:]


def _read_header(text: bytes) -> Header:
    try:
        said = json.loads(text)
        canonical = isinstance(said, dict) and _canonical(said) == text
    except (ValueError, RecursionError):
        canonical = False
    if not canonical:
        raise EnvelopeError("format", "the header is not canonical JSON")
    fields = {*Header.__dataclass_fields__, "version"}
    for name in sorted(fields - said.keys()):
        raise EnvelopeError("format", f"the header has no {name!r}")
    for name in sorted(said.keys() - fields):
        raise EnvelopeError(
            "format", f"the header has an unknown {name[:40]!r}; valid: {', '.join(sorted(fields))}"
        )
    version = said.pop("version")
    if type(version) is not int:
        raise EnvelopeError("format", "version is not a whole number")
    _require_version(version)
    return Header(**said)


def _require_version(version: int) -> None:
    if version != VERSION:
        raise EnvelopeError("version", f"version {version}, this side speaks {VERSION}")


def _canonical(header: dict[str, Any]) -> bytes:
    """The one way to write a header: sorted names, no spaces, ASCII."""
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
