"""Secure sums at the waist: how a run with `secure = true` asks for a phase of which the sum of the replies suffices.

    server                                    client
    advertise_keys  run, number, roster, t ►  ◄ keys       Member.advertise
    share_keys      keys, answered         ►  ◄ shares     Member.share
    the phase       its message, shared    ►  ◄ masked     the phase's reply, encoded and under pads: Member.mask
    unmask          survivors, shares      ►  ◄ revealed   Member.unmask

Everything a client adds up is in the one masked vector: tensors, counts, and in a mean also its weight, by which it multiplies its reply
itself. A client in a secure run answers nothing else, neither a phase that is not summed, nor one that is, without pads; but letters,
sealed for another client, or of a phase that says they are encrypted or public already (`sealed = False`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ConfigError, MessageError
from fedloom.faults import SILENT, too_few
from fedloom.ledger import MEASURING
from fedloom.message import DTYPES, Absent, Message, Schema, check, flatten, unflatten
from fedloom.method import expected_reply, weights_schema
from fedloom.privacy import sealed
from fedloom.privacy.secure_sum import (
    ADVERTISED_BYTES,
    CIPHERTEXT_BYTES,
    SHARE_BYTES,
    Collector,
    Member,
    Refusal,
    Terms,
    TooFew,
    decode,
    encode,
)

if TYPE_CHECKING:
    from fedloom.method import Method
    from fedloom.party import Client, Server

KEY_PHASES = ("advertise_keys", "share_keys", "unmask")
WEIGHT = "weight of the client"  # no phase can declare a tensor of this name


# ---- a client's side ----
def answer(method: Method, client: Client, phase: str, message: Message) -> Message:
    """What a client in a secure run answers to a phase; Refusal if that could lay its data open."""
    if phase == "advertise_keys":
        return _advertise(client, **message)
    if phase in KEY_PHASES:
        if client.member is None:
            raise Refusal(f"client {client.name!r} refuses to {phase}: no sum has begun")
        if phase == "share_keys":
            return {"shares": torch.from_numpy(client.member.share(message["keys"].numpy(), message["answered"].numpy()))}
        member, client.member = client.member, None
        return {"revealed": torch.from_numpy(member.unmask(message["survivors"].numpy(), message["shares"].numpy()))}
    if phase in sealed.KEY_PHASES:
        return sealed.meet(client, phase, message)
    function = getattr(method, phase)
    if hasattr(function, "aggregate"):
        return _masked(method, client, function, message)
    if hasattr(function, "read_by"):
        return sealed.write(method, client, function, message)
    if "letters" in message:
        message = {**message, "letters": sealed.read(method, client, phase, message["letters"])}
    if function.reply:
        raise Refusal(f"client {client.name!r} refuses to answer {phase!r} in the clear: this is a secure run")
    reply = function(client, **message)
    check(reply, (), f"client {client.name!r} in {phase!r}")  # what is not declared does not leave
    return reply


def _advertise(client: Client, run: Tensor, number: Tensor, roster: Tensor, threshold: Tensor) -> Message:
    known = client.state.setdefault("secure_sums", {"run": run, "number": torch.tensor(0)})
    if not torch.equal(known["run"], run):
        raise Refusal(f"client {client.name!r} refuses: the run's id changed")
    if number.is_floating_point() or number <= known["number"]:
        raise Refusal(f"client {client.name!r} refuses: sum {int(number)} was asked for before, the last one was {int(known['number'])}")
    known["number"] = number
    position, population = client.facts.clients.index(client.name), client.facts.num_clients
    client.member = Member(
        position, population, _terms(client), run.numpy().tobytes(), int(number), roster.numpy(), int(threshold)
    )  # fmt: skip
    return {"keys": _tensor(client.member.advertise())}


def _masked(method: Method, client: Client, phase: Any, message: Message) -> Message:
    if client.member is None or "shared" not in message.get("secure", {}):
        raise Refusal(f"client {client.name!r} refuses to answer {phase.__name__!r} in the clear: this is a secure run")
    client.member.require_due("mask")  # before the phase leaves its traces
    own, who = {name: content for name, content in message.items() if name != "secure"}, f"client {client.name!r} in {phase.__name__!r}"
    weight = _weight(method, client, phase) if phase.aggregate == "mean" else None
    reply = phase(client, **own)
    model = weights_schema(client.build()) if "weights" in phase.reply.values() else ()
    check(reply, expected_reply(method, phase, own, model, client.facts), who)  # nobody else can: the server sees sums
    tensors = flatten(reply)
    if weight is not None:
        tensors = {name: tensor.double() * weight for name, tensor in tensors.items()} | {WEIGHT: weight.double()}
    arrays = {name: (t.double() if t.is_floating_point() else t).detach().numpy() for name, t in tensors.items()}
    try:
        vector = encode(arrays, _terms(client, phase), client.member.parties)
    except MessageError as error:
        raise MessageError(f"{who}: {error}{'' if weight is None else ', times the weight of the client'}") from None
    return {"masked": _tensor(client.member.mask(vector, message["secure"]["shared"].numpy()))}


def _weight(method: Method, client: Client, phase: Any) -> Tensor:
    """The client's weight in a mean: worked out once, then kept, as the server of a plain run does."""
    if phase.by is None:
        return torch.ones(())
    known = client.state.setdefault("secure_weights", {})
    if phase.by not in known:
        (known[phase.by],) = getattr(method, phase.by)(client).values()
    if not 0 <= float(known[phase.by]) < float("inf"):
        raise MessageError(f"client {client.name!r}: its weight {phase.by!r} must be finite and not negative")
    return known[phase.by]


# ---- the server's side ----
def total(server: Server, phase: Any, messages: dict[str, Message], reply: Schema) -> Message:
    """Takes a phase, a message per client and the schema of what each would reply, gives the sum of the replies, or their mean.

    How many clients are enough is the sum's own threshold. No stage is asked for twice, since a second answer under the same pads would
    lay the first one open. If too few are there before anybody was asked for the phase itself, a new sum is begun, with a number and
    keys of its own (if the run's quorum is below 1); from then on clients have done the phase, and the round has failed.
    """
    lost: dict[str, Absent] = {}
    try:
        return _total(server, phase, messages, reply, lost)
    except TooFew as error:
        if not server.survives:
            raise
        raise server.failed(phase.__name__, str(error), lost) from error


def _total(server: Server, phase: Any, messages: dict[str, Message], reply: Schema, lost: dict[str, Absent]) -> Message:
    terms, name = _terms(server, phase), phase.__name__
    mean = phase.aggregate == "mean"
    like = {name: ("float64" if mean or DTYPES[dtype].is_floating_point else dtype, shape) for name, dtype, shape in reply}
    if mean:
        like[WEIGHT] = ("float64", ())
    size = sum(int(np.prod(shape)) for _, shape in like.values())
    collector, shared = _begin(server, name, messages, terms, size, lost, server.attempts)
    asked = {at: {**messages[server.clients[at]], "secure": {"shared": _tensor(s)}} for at, (s,) in shared.items()}
    words = _stage(server, name, asked, name, lost, masked=(f"int{terms.bits}", (size,)))  # the wire has signed words only
    vectors = ((at, signed.view(terms.word)) for at, signed in words)
    post = {at: {"survivors": _tensor(s), "shares": _tensor(c)} for at, (s, c) in collector.take_vectors(vectors).items()}
    survivors = {server.clients[at]: messages[server.clients[at]] for at in post}
    if server.survives and len(post) < (least := server.least(name, len(messages))):
        raise server.failed(name, too_few(survivors, len(messages), least), lost)
    reveals = _stage(server, "unmask", post, name, lost, revealed=("uint8", (collector.degree + 1, SHARE_BYTES)))
    added = decode(collector.take_reveals(reveals), like, terms, int(collector.roster.sum()))
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in added.items()}
    if mean:
        weight = tensors.pop(WEIGHT)
        if weight <= 0:
            raise MessageError(f"secure mean of {name!r}: all clients that answered have weight 0")
        tensors = {name: tensor / weight for name, tensor in tensors.items()}
    kinds = {name: DTYPES[dtype] for name, dtype, _ in reply}
    if mean:
        kinds = {name: kind if kind.is_floating_point else torch.float32 for name, kind in kinds.items()}  # a mean of integers is none
    shaped = {name: tensors[name].to(kind) for name, kind in kinds.items()}
    for tensor_name, tensor in shaped.items():
        if not tensor.is_floating_point() and not torch.equal(tensor.long(), tensors[tensor_name]):
            raise MessageError(f"secure sum of {name!r}: the sum of {tensor_name!r} does not fit into {tensor.dtype}; declare int64")
    # The masks are different every time; what was asked, who is in the sum, and the sum are not.
    _note_cohort(server, name, np.isin(server.clients, list(survivors)))
    server.remember(name, survivors, {"sum": unflatten(shaped)})
    server.conclude(name, messages, {c: lost.get(c, SILENT) for c in messages if c not in survivors}, None, repeatable=False)
    return unflatten(shaped)


def _begin(
    server: Server, phase: str, messages: dict[str, Message], terms: Terms, size: int, lost: dict[str, Absent], attempts: int
) -> tuple[Collector, dict[int, Any]]:  # fmt: skip
    """The first two stages: a sum with a number of its own, and who has shared its secrets, as `Collector.take_shares` gives it."""
    present, absent = server.present(messages, phase in MEASURING)
    lost |= absent
    roster = np.array([name in present for name in server.clients])
    run, number = _next_number(server)
    try:
        collector = Collector(terms, run.numpy().tobytes(), number, roster, size)
        threshold = torch.tensor(collector.threshold)
        proposal = {"run": run, "number": torch.tensor(number), "roster": torch.from_numpy(roster), "threshold": threshold}
        sent = dict.fromkeys(np.flatnonzero(roster).tolist(), proposal)
        arrived = _stage(server, "advertise_keys", sent, phase, lost, keys=("uint8", (ADVERTISED_BYTES,)))
        keys = {at: {"keys": _tensor(k), "answered": _tensor(a)} for at, (k, a) in collector.take_keys(arrived).items()}
        arrived = _stage(server, "share_keys", keys, phase, lost, shares=("uint8", (collector.degree, CIPHERTEXT_BYTES)))
        return collector, collector.take_shares(arrived)
    except TooFew:
        if attempts == 1:
            raise
    lost.clear()
    server.attendance.asked_again += len(present)
    return _begin(server, phase, messages, terms, size, lost, attempts - 1)


def _stage(
    server: Server, name: str, sent: dict[int, Message], phase: str, lost: dict[str, Absent], **declared: tuple[str, tuple[int, ...]]
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Sends each party its message, for the sake of a phase, gives (position, array) of what came back."""
    ((answer, (dtype, shape)),) = declared.items()
    book_as = phase if phase in MEASURING else None  # the keys of an evaluation are for measuring only
    place = {server.clients[at]: at for at in sent}
    named = {server.clients[at]: content for at, content in sent.items()}
    for client, reply in server.stage(name, named, lambda *_: ((answer, dtype, shape),), book_as, lost).items():
        yield place[client], reply[answer].numpy()


def _next_number(server: Server) -> tuple[Tensor, int]:
    fresh = {"run": torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8), "number": torch.tensor(0)}
    known = server.state.setdefault("secure_sums", fresh)
    known["number"] = known["number"] + 1
    return known["run"], int(known["number"])


def _note_cohort(server: Server, phase: str, cohort: np.ndarray) -> None:
    """Keeps over whom a phase was summed: two sums whose cohorts differ in one client give that client away."""
    known = server.state["secure_sums"]
    row, earlier = torch.from_numpy(cohort)[None], known.setdefault("cohorts", {}).get(phase)
    if earlier is None:
        known["cohorts"][phase] = row
    elif not (earlier == row).all(1).any():
        known["cohorts"][phase] = torch.cat([earlier, row])


def report(server: Server) -> dict[str, int] | None:
    """For a run's summary: sums taken, clients in the smallest, and pairs of cohorts of one phase that differ in one client."""
    if server.facts.secure is None:
        return None
    known = server.state.get("secure_sums", {})
    cohorts = [rows.int() for rows in known.get("cohorts", {}).values()]
    return {
        "sums": int(known.get("number", 0)),
        "fewest_clients": min((int(rows.sum(1).min()) for rows in cohorts), default=0),
        "cohorts_one_apart": sum(int((torch.cdist(rows.float(), rows.float(), p=1) == 1).sum()) // 2 for rows in cohorts),
    }


def require_cohort(clients: int, who: str) -> None:
    """Raises ConfigError if so few clients take part that a sum would give one of them away."""
    if clients < 3:
        raise ConfigError(f"run.secure needs at least 3 clients in every sum, {who} is {clients}")


def _terms(party: Client | Server, phase: Any = None) -> Terms:
    """The agreed terms; scores keep a width and a range of their own, since `bits` and `range` are chosen for the method's numbers."""
    assert party.facts.secure is not None
    return replace(party.facts.secure, bits=64, range=2.0**32) if getattr(phase, "__name__", "") in MEASURING else party.facts.secure


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.view(f"i{array.itemsize}")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
