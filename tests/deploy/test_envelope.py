"""Envelopes: a gate accepts one answer per party to the open exchange, and nothing else."""

import json
from collections import Counter

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.deploy import envelope
from fedloom.deploy.envelope import (
    MAGIC,
    PREFIX_BYTES,
    REMEMBERED,
    SIGNATURE_BYTES,
    EnvelopeError,
    Gate,
    Header,
    Opened,
    parse,
    sign,
)
from fedloom.deploy.keys import PartyKey
from fedloom.errors import MessageError

RUN, OTHER_RUN = "0123456789abcdef", "fedcba9876543210"
KEYS = {
    party: PartyKey(ec.generate_private_key(ec.SECP384R1()), Ed25519PrivateKey.generate())
    for party in ("bank-a", "bank-b")
}
PUBLIC = {party: key.public for party, key in KEYS.items()}


def answer(body=b"numbers", party="bank-a", key=None, **given):
    header = {"run": RUN, "round": 2, "sequence": 5, "party": party, "phase": "train", **given}
    return sign(body, Header(**header), KEYS[key or party])


def opened(gate, data, **asked):
    return gate.open(
        data, **{"sender": "bank-a", "round": 2, "sequence": 5, "phase": "train", **asked}
    )


def reason(gate, data, **asked):
    before = Counter(gate.refused)
    with pytest.raises(EnvelopeError) as refused:
        opened(gate, data, **asked)
    assert gate.refused - before == {refused.value.reason: 1}
    assert "\n" not in str(refused.value)
    return refused.value.reason


def with_header(text, body=b"numbers", party="bank-a"):
    """Returns an envelope with this header and a valid signature: a party may send it."""
    signature = KEYS[party].signing.sign(envelope._digest("answer", text, body))
    return MAGIC + b"\0\1" + len(text).to_bytes(2, "big") + text + signature + body


FIELDS = {
    "kind": "answer",
    "party": "bank-a",
    "phase": "train",
    "round": 2,
    "run": RUN,
    "sequence": 5,
    "version": 1,
}


def canonical(fields):
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


@pytest.fixture
def gate():
    return Gate(PUBLIC, RUN)


# ---- what is accepted ----
@pytest.mark.parametrize("kind", ["answer", "error"])
@pytest.mark.parametrize("body", [b"", b"numbers", bytes(range(256)) * 999])
def test_an_answer_is_accepted(gate, kind, body):
    assert opened(gate, answer(body, kind=kind)) == Opened(kind, body)
    assert not gate.refused


def test_the_layout_is_the_documented_one(gate):
    data = answer(b"numbers")
    assert data == with_header(canonical(FIELDS))  # Ed25519 signatures are deterministic
    header, text, signature, body = parse(data)
    assert (header.sequence, text, len(signature), bytes(body)) == (
        5,
        canonical(FIELDS),
        SIGNATURE_BYTES,
        b"numbers",
    )


def test_memory_does_not_grow_with_the_run(gate):
    for sequence in range(100):
        for party in KEYS:
            exchange = {"round": sequence // 3, "sequence": sequence}
            data = answer(party=party, **exchange)
            assert opened(gate, data, sender=party, **exchange).kind == "answer"
    assert all(len(numbers) == REMEMBERED for numbers in gate._answered.values())
    assert not gate.refused


# ---- what is refused ----
def test_forged_answers_are_refused(gate):
    assert reason(gate, answer(key="bank-b")) == "forged"
    data = answer()
    assert reason(gate, data[:-1] + b"X") == "forged"
    assert reason(gate, data + b"X") == "forged"
    assert reason(gate, data[:-1]) == "forged"
    assert reason(gate, data.replace(b'"round":2', b'"round":3'), round=3) == "forged"
    _, text, signature, _ = parse(data)
    assert reason(gate, data.replace(signature, bytes(64))) == "forged"
    without_domain = KEYS["bank-a"].signing.sign(text + b"numbers")
    assert reason(gate, data.replace(signature, without_domain)) == "forged"
    assert opened(gate, data).body == b"numbers"  # forgeries in its name do not block a party


def test_answers_of_another_sender_are_refused(gate):
    assert reason(gate, answer(), sender="bank-b") == "foreign"
    assert reason(gate, answer(party="bank-b", key="bank-a")) == "foreign"
    assert reason(gate, answer(), sender="stranger") == "foreign"
    assert reason(gate, answer(party="stranger", key="bank-a"), sender="stranger") == "foreign"
    assert reason(gate, answer(party="stranger", key="bank-a")) == "foreign"


def test_answers_of_another_run_round_or_phase_are_refused(gate):
    assert reason(gate, answer(run=OTHER_RUN)) == "run"
    assert reason(gate, answer(round=1)) == "round"
    assert reason(gate, answer(phase="evaluate")) == "phase"
    assert opened(gate, answer())


def test_second_answers_are_duplicates_and_later_replays(gate):
    data = answer()
    assert opened(gate, data)
    assert reason(gate, data) == "duplicate"
    assert reason(gate, answer(b"other numbers")) == "duplicate"
    assert reason(gate, answer(b"went wrong", kind="error")) == "duplicate"
    assert reason(gate, data, sequence=6) == "replay"
    assert opened(gate, answer(sequence=6), sequence=6)
    assert reason(gate, data, sequence=6) == "replay"
    assert gate.refused == {"duplicate": 3, "replay": 2}


def test_late_answers_are_not_replays(gate):
    assert opened(gate, answer(sequence=4), sequence=4)
    late = answer(sequence=5)
    assert reason(gate, late, sequence=6) == "late"
    assert reason(gate, late, sequence=6) == "late"  # still never answered
    assert opened(gate, answer(sequence=6), sequence=6)
    assert reason(gate, late, sequence=6) == "late"  # also after a later one was answered
    assert reason(gate, answer(sequence=4), sequence=6) == "replay"
    other = answer(party="bank-b", sequence=4)
    assert reason(gate, other, sender="bank-b", sequence=6) == "late"  # answers count per party


def test_an_answer_that_is_too_old_to_remember_is_a_replay(gate):
    for sequence in range(1, REMEMBERED + 2):
        assert opened(gate, answer(sequence=sequence), sequence=sequence)
    now = {"sequence": REMEMBERED + 2}
    assert reason(gate, answer(sequence=0), **now) == "replay"
    assert reason(gate, answer(sequence=1), **now) == "replay"
    assert reason(gate, answer(sequence=REMEMBERED), **now) == "replay"


def test_early_answers_are_refused(gate):
    early = answer(sequence=6)
    assert reason(gate, early) == "early"
    assert reason(gate, answer(sequence=2**63 - 1)) == "early"
    assert opened(gate, early, sequence=6)  # the exchange is open now


def test_the_number_of_the_exchange_never_decreases(gate):
    opened(gate, answer())
    with pytest.raises(AssertionError, match="stays closed"):
        opened(gate, answer(sequence=4), sequence=4)


def replayed(times):
    """Records a run of 250 exchanges and replays its envelopes. Returns the refusals by reason."""
    gate, recorded = Gate(PUBLIC, RUN), []
    for sequence in range(250):
        for party in KEYS:
            if (sequence + len(party)) % 7:  # sometimes a party is too slow
                exchange = {"round": sequence // 2, "sequence": sequence}
                recorded.append((party, answer(party=party, **exchange)))
                opened(gate, recorded[-1][1], sender=party, **exchange)
    for number in range(times):
        party, data = recorded[number * 7919 % len(recorded)]
        sequence = 249 + number // 100
        with pytest.raises(EnvelopeError):
            opened(gate, data, sender=party, round=sequence // 2, sequence=sequence)
    return gate.refused


@pytest.mark.parametrize("times", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_10_000_replays_of_recorded_envelopes_are_refused(times):
    refused = replayed(times)
    assert refused.total() == times
    assert refused.keys() <= {"replay", "duplicate"}


@settings(max_examples=100)
@given(st.data())
def test_any_bit_flipped_anywhere_is_refused(data):
    good = answer(data.draw(st.binary(max_size=40)))
    place = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[place // 8] ^= 1 << place % 8
    gate = Gate(PUBLIC, RUN)
    with pytest.raises(EnvelopeError):
        opened(gate, bytes(bad))
    assert opened(gate, good)


def test_all_flipped_bits_and_truncations_of_one_envelope_are_refused(gate):
    good = answer(b"12345678")
    for place in range(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        reason(gate, bytes(bad))
    for cut in range(len(good)):
        reason(gate, good[:cut])
    assert opened(gate, good)


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda b: MAGIC + b"\0\1" + b))
def test_noise_is_refused(noise):
    with pytest.raises(EnvelopeError):
        opened(Gate(PUBLIC, RUN), noise)


def test_without_the_signature_a_forgery_is_accepted(gate, monkeypatch):
    forged = answer(b"poison", key="bank-b")
    assert reason(gate, forged) == "forged"
    monkeypatch.setattr(envelope, "_is_signed_by", lambda *_: True)
    assert opened(gate, forged).body == b"poison"


def test_without_the_sequence_a_replay_is_accepted(gate, monkeypatch):
    earlier = answer(b"from round 1", round=1, sequence=3)
    assert reason(gate, earlier) == "late"
    assert reason(gate, answer(run=OTHER_RUN)) == "run"
    monkeypatch.setattr(Gate, "_require_current", lambda *_: None)
    for recorded in (earlier, earlier, answer(run=OTHER_RUN)):
        assert opened(gate, recorded)


def test_without_the_version_another_version_is_accepted(gate, monkeypatch):
    newer = with_header(canonical({**FIELDS, "version": 2})).replace(
        MAGIC + b"\0\1", MAGIC + b"\0\2"
    )
    assert reason(gate, newer) == "version"
    monkeypatch.setattr(envelope, "_require_version", lambda version: None)
    assert opened(gate, newer)


# ---- the form ----
@pytest.mark.parametrize(
    ("data", "word", "words"),
    [
        (b"", "format", "0 bytes, too short"),
        (MAGIC, "format", "too short"),
        (b"fedloomX" + answer()[8:], "format", "does not begin with 'fedloomE'"),
        (MAGIC + b"\0\2" + answer()[10:], "version", "version 2, this side uses 1"),
        (MAGIC + b"\0\1\xff\xff" + bytes(70_000), "format", "claims 65535 bytes"),
        (
            MAGIC + b"\0\1\x08\0" + bytes(100),
            "format",
            "cut off: header and signature need 2124 bytes, there are 112",
        ),
        (MAGIC + b"\0\1\0\0" + bytes(100), "format", "not canonical JSON"),
        (answer()[: PREFIX_BYTES + SIGNATURE_BYTES], "format", "cut off"),
    ],
)
def test_malformed_envelopes_are_refused(gate, data, word, words):
    assert reason(gate, data) == word
    with pytest.raises(MessageError, match=words):
        parse(data)


def test_the_size_is_checked_first():
    data = answer(bytes(1000))
    assert opened(Gate(PUBLIC, RUN, limit=len(data)), data)
    assert reason(Gate(PUBLIC, RUN, limit=len(data) - 1), data) == "size"
    assert reason(Gate(PUBLIC, RUN, limit=10), bytes(11)) == "size"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}x",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"\xff",
        b"[" * 2000,
        json.dumps(FIELDS).encode(),
        canonical(FIELDS) + b" ",
        canonical(FIELDS).replace(b"train", b"tr\\u0061in"),
        canonical(FIELDS).replace(b'"round":2', b'"round":2,"round":2'),
        canonical(FIELDS).replace(b":2,", b":2e0,"),
        canonical(FIELDS).replace(b":2,", b":NaN,"),
        canonical(FIELDS).replace(b":2,", b":-0,"),
        json.dumps(dict(reversed(FIELDS.items())), separators=(",", ":")).encode(),
        canonical(FIELDS).decode().encode("utf-16"),
    ],
)
def test_signed_headers_that_are_not_canonical_are_refused(gate, text):
    assert reason(gate, with_header(text)) == "format"
    with pytest.raises(EnvelopeError, match="canonical JSON"):
        parse(with_header(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({name: None}, f"no '{name}'") for name in FIELDS),
        ({"extra": 1}, "unknown 'extra'"),
        ({"version": 2}, "version 2, this side uses 1"),
        *(
            ({name: bad}, f"{name} is not")
            for name in ("round", "sequence")
            for bad in ("2", 2.0, True, [2], -1, 2**63, {})
        ),
        *(
            ({name: bad}, f"{name} is not a text")
            for name in ("run", "party", "phase", "kind")
            for bad in (1, True, ["train"], {})
        ),
        *(({"version": bad}, "version is not") for bad in ("1", True, 1.0)),
        *(
            ({"run": bad}, "run is not")
            for bad in ("", "0123", RUN.upper(), RUN[:-1], RUN * 5, "zz" * 8, RUN + "\n")
        ),
        *(({"party": bad}, "party is not") for bad in ("", "A", "../x", "a" * 65, "ä", "a\n")),
        *(
            ({"phase": bad}, "phase is not")
            for bad in ("", "a b", "1a", "a" * 65, "a/b", "\ud800", "a\n")
        ),
        *(({"kind": bad}, "valid: order, answer, error") for bad in ("", "Answer", "x" * 500)),
    ],
)
def test_signed_headers_with_invalid_content_are_refused(gate, change, words):
    data = with_header(canonical({k: v for k, v in {**FIELDS, **change}.items() if v is not None}))
    assert reason(gate, data) in ("format", "version")
    with pytest.raises(EnvelopeError, match=words):
        parse(data)


@pytest.mark.parametrize(
    "change",
    [{"run": "x"}, {"round": -1}, {"sequence": True}, {"party": "A"}, {"phase": ""}, {"kind": "x"}],
)
def test_the_sender_cannot_sign_an_invalid_header(change):
    with pytest.raises(EnvelopeError):
        answer(**{"key": "bank-a", **change})


def test_the_longest_header_is_below_the_limit():
    largest = {"round": 2**63 - 1, "sequence": 2**63 - 1, "run": "ab" * 32, "phase": "𝛼" * 64}
    assert len(parse(answer(**largest))[1]) < envelope.HEADER_LIMIT


def test_a_gate_needs_a_run_id():
    with pytest.raises(AssertionError, match="hex"):
        Gate(PUBLIC, "")
