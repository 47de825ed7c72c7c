"""Envelopes: each party's answer to the open exchange gets in once, and nothing else does, whoever carries it."""

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


def answer(body=b"numbers", party="bank-a", key=None, **said):
    header = Header(
        **{"run": RUN, "round": 2, "sequence": 5, "party": party, "phase": "train", **said}
    )
    return sign(body, header, KEYS[key or party])


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
    """An envelope with this header, well signed: what a party that breaks the rules can send."""
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


# ---- what gets in ----
@pytest.mark.parametrize("kind", ["answer", "error"])
@pytest.mark.parametrize("body", [b"", b"numbers", bytes(range(256)) * 999])
def test_an_answer_gets_in(gate, kind, body):
    assert opened(gate, answer(body, kind=kind)) == Opened(kind, body)
    assert not gate.refused


def test_the_layout_is_the_documented_one(gate):
    data = answer(b"numbers")
    assert data == with_header(
        canonical(FIELDS)
    )  # Ed25519 signatures are a function of key and content
    header, text, signature, body = parse(data)
    assert (header.sequence, text, len(signature), bytes(body)) == (
        5,
        canonical(FIELDS),
        SIGNATURE_BYTES,
        b"numbers",
    )


def test_a_run_from_its_first_exchange(gate):
    for sequence in range(300):
        for party in KEYS:
            data = answer(party=party, round=sequence // 3, sequence=sequence)
            assert (
                opened(gate, data, sender=party, round=sequence // 3, sequence=sequence).kind
                == "answer"
            )
    assert all(
        len(numbers) == REMEMBERED for numbers in gate._answered.values()
    )  # memory does not grow with the run
    assert not gate.refused


# ---- what does not ----
def test_forged(gate):
    assert reason(gate, answer(key="bank-b")) == "forged"
    data = answer()
    assert reason(gate, data[:-1] + b"X") == "forged"
    assert reason(gate, data + b"X") == "forged"
    assert reason(gate, data[:-1]) == "forged"
    assert reason(gate, data.replace(b'"round":2', b'"round":3'), round=3) == "forged"
    _, text, signature, _ = parse(data)
    assert reason(gate, data.replace(signature, bytes(64))) == "forged"
    assert (
        reason(gate, data.replace(signature, KEYS["bank-a"].signing.sign(text + b"numbers")))
        == "forged"
    )  # without the domain
    assert (
        opened(gate, data).body == b"numbers"
    )  # nobody is kept out by what others forge in its name


def test_foreign(gate):
    assert reason(gate, answer(), sender="bank-b") == "foreign"
    assert reason(gate, answer(party="bank-b", key="bank-a")) == "foreign"
    assert reason(gate, answer(), sender="stranger") == "foreign"
    assert reason(gate, answer(party="stranger", key="bank-a"), sender="stranger") == "foreign"
    assert reason(gate, answer(party="stranger", key="bank-a")) == "foreign"


def test_another_run_round_or_phase(gate):
    assert reason(gate, answer(run=OTHER_RUN)) == "run"
    assert reason(gate, answer(round=1)) == "round"
    assert reason(gate, answer(phase="evaluate")) == "phase"
    assert opened(gate, answer())


def test_duplicate_then_replay(gate):
    data = answer()
    assert opened(gate, data)
    assert reason(gate, data) == "duplicate"
    assert reason(gate, answer(b"other numbers")) == "duplicate"
    assert reason(gate, answer(b"went wrong", kind="error")) == "duplicate"
    assert reason(gate, data, sequence=6) == "replay"
    assert opened(gate, answer(sequence=6), sequence=6)
    assert reason(gate, data, sequence=6) == "replay"
    assert gate.refused == {"duplicate": 3, "replay": 2}


def test_late_is_not_replay(gate):
    assert opened(gate, answer(sequence=4), sequence=4)
    late = answer(sequence=5)
    assert reason(gate, late, sequence=6) == "late"
    assert reason(gate, late, sequence=6) == "late"  # still never answered
    assert opened(gate, answer(sequence=6), sequence=6)
    assert reason(gate, late, sequence=6) == "late"  # also after a later one was answered
    assert reason(gate, answer(sequence=4), sequence=6) == "replay"
    assert (
        reason(gate, answer(party="bank-b", sequence=4), sender="bank-b", sequence=6) == "late"
    )  # each party has its own memory


def test_what_is_too_old_to_remember_is_a_replay(gate):
    for sequence in range(1, REMEMBERED + 2):
        assert opened(gate, answer(sequence=sequence), sequence=sequence)
    now = {"sequence": REMEMBERED + 2}
    assert reason(gate, answer(sequence=0), **now) == "replay"
    assert reason(gate, answer(sequence=1), **now) == "replay"
    assert reason(gate, answer(sequence=REMEMBERED), **now) == "replay"


def test_early(gate):
    early = answer(sequence=6)
    assert reason(gate, early) == "early"
    assert reason(gate, answer(sequence=2**63 - 1)) == "early"
    assert opened(gate, early, sequence=6)  # its time has come


def test_exchanges_do_not_go_back(gate):
    opened(gate, answer())
    with pytest.raises(AssertionError, match="stays closed"):
        opened(gate, answer(sequence=4), sequence=4)


def test_10_000_replays_of_recorded_envelopes():
    gate, recorded = Gate(PUBLIC, RUN), []
    for sequence in range(250):
        for party in KEYS:
            if (sequence + len(party)) % 7:  # now and then somebody is too slow
                recorded.append(
                    (party, answer(party=party, round=sequence // 2, sequence=sequence))
                )
                opened(gate, recorded[-1][1], sender=party, round=sequence // 2, sequence=sequence)
    accepted = tried = 0
    while tried < 10_000:
        party, data = recorded[tried * 7919 % len(recorded)]
        sequence, tried = 249 + tried // 100, tried + 1
        try:
            opened(gate, data, sender=party, round=sequence // 2, sequence=sequence)
            accepted += 1
        except EnvelopeError:
            continue
    assert (accepted, gate.refused.total()) == (0, 10_000)
    assert gate.refused.keys() <= {"replay", "duplicate"}


@settings(max_examples=300)
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


def test_every_bit_of_one_envelope_and_every_truncation(gate):
    good = answer(b"12345678")
    for place in range(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        reason(gate, bytes(bad))
    for cut in range(len(good)):
        reason(gate, good[:cut])
    assert opened(gate, good)


@settings(max_examples=500)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda b: MAGIC + b"\0\1" + b))
def test_noise_is_refused_and_nothing_else_happens(noise):
    with pytest.raises(EnvelopeError):
        opened(Gate(PUBLIC, RUN), noise)


def test_the_signature_is_what_keeps_forgeries_out(gate, monkeypatch):
    forged = answer(b"poison", key="bank-b")
    assert reason(gate, forged) == "forged"
    monkeypatch.setattr(envelope, "_is_signed_by", lambda *_: True)
    assert opened(gate, forged).body == b"poison"


def test_the_order_of_exchanges_is_what_keeps_replays_out(gate, monkeypatch):
    earlier = answer(b"of round 1", round=1, sequence=3)
    assert reason(gate, earlier) == "late"
    assert reason(gate, answer(run=OTHER_RUN)) == "run"
    monkeypatch.setattr(Gate, "_require_current", lambda *_: None)
    for recorded in (earlier, earlier, answer(run=OTHER_RUN)):
        assert opened(gate, recorded)


def test_the_version_is_what_keeps_other_versions_out(gate, monkeypatch):
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
        (MAGIC + b"\0\2" + answer()[10:], "version", "version 2, this side speaks 1"),
        (MAGIC + b"\0\1\xff\xff" + bytes(70_000), "format", "claims 65535 bytes"),
        (
            MAGIC + b"\0\1\x08\0" + bytes(100),
            "format",
            "cut off: header and signature need 2124 bytes, 112 came",
        ),
        (MAGIC + b"\0\1\0\0" + bytes(100), "format", "not canonical JSON"),
        (answer()[: PREFIX_BYTES + SIGNATURE_BYTES], "format", "cut off"),
    ],
)
def test_not_an_envelope(gate, data, word, words):
    assert reason(gate, data) == word
    with pytest.raises(MessageError, match=words):
        parse(data)


def test_size_comes_first():
    data = answer(bytes(1000))
    assert opened(Gate(PUBLIC, RUN, limit=len(data)), data)
    assert reason(Gate(PUBLIC, RUN, limit=len(data) - 1), data) == "size"
    assert reason(Gate(PUBLIC, RUN, limit=10), bytes(11)) == "size"


@pytest.mark.parametrize(
    "text",
    [b"", b"{}x", b"[]", b"1", b"null", b'"x"', b"\xff", b"[" * 2000, json.dumps(FIELDS).encode(), canonical(FIELDS) + b" ",
     canonical(FIELDS).replace(b"train", b"tr\\u0061in"), canonical(FIELDS).replace(b'"round":2', b'"round":2,"round":2'),
     canonical(FIELDS).replace(b":2,", b":2e0,"), canonical(FIELDS).replace(b":2,", b":NaN,"), canonical(FIELDS).replace(b":2,", b":-0,"),
     json.dumps(dict(reversed(FIELDS.items())), separators=(",", ":")).encode(), canonical(FIELDS).decode().encode("utf-16")],
)  # fmt: skip
def test_headers_in_another_form_are_refused_though_signed(gate, text):
    assert reason(gate, with_header(text)) == "format"
    with pytest.raises(EnvelopeError, match="canonical JSON"):
        parse(with_header(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({name: None}, f"no '{name}'") for name in FIELDS),
        ({"extra": 1}, "unknown 'extra'"),
        ({"version": 2}, "version 2, this side speaks 1"),
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
def test_headers_with_other_content_are_refused_though_signed(gate, change, words):
    data = with_header(canonical({k: v for k, v in {**FIELDS, **change}.items() if v is not None}))
    assert reason(gate, data) in ("format", "version")
    with pytest.raises(EnvelopeError, match=words):
        parse(data)


def test_the_signing_side_has_the_same_rules():
    for change in (
        {"run": "x"},
        {"round": -1},
        {"sequence": True},
        {"party": "A"},
        {"phase": ""},
        {"kind": "x"},
    ):
        with pytest.raises(EnvelopeError):
            answer(**{"key": "bank-a", **change})
    assert (
        len(parse(answer(run="ab" * 32, phase="𝛼" * 64, round=2**63 - 1, sequence=2**63 - 1))[1])
        < envelope.HEADER_LIMIT
    )
    with pytest.raises(AssertionError, match="hex"):
        Gate(PUBLIC, "")
