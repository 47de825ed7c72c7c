"""Secure aggregation: the server of a run with `secure = true` learns sums and nothing else.

    server                                           client
    advertise_keys   the sum, roster, threshold  ►  ◄ keys        Member.advertise
    draw_graph       commitments, answered       ►  ◄ nonce       Member.draw, if a graph is drawn
    share_keys       keys, answered, nonces      ►  ◄ shares      Member.share
    the phase        its message, shared         ►  ◄ masked      its reply, encoded: Member.mask
    confirm          survivors                   ►  ◄ signature   Member.confirm
    unmask           shares, signatures          ►  ◄ revealed    Member.unmask

One masked vector holds everything that a client adds: tensors, counts and, in a mean, its weight,
by which it multiplies its reply itself. A client in a secure run answers nothing else: no phase
that is not summed, and no sum without masks. Peer messages are encrypted for their reader, unless
their phase says that they are encrypted or public already (`encrypted = False`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom._system import open_private
from fedloom.core.absence import SILENT, too_few
from fedloom.core.adversary import Adversary
from fedloom.core.aggregation import (
    Refuse,
    Request,
    addresses_of,
)
from fedloom.core.client import Client
from fedloom.core.facts import SecureTerms, model_schema
from fedloom.core.ledger import MEASURING
from fedloom.core.message import (
    DTYPES,
    Absent,
    Message,
    Schema,
    check,
    decode,
    encode,
    flatten,
    largest_size,
    tree_map,
    unflatten,
)
from fedloom.core.method import Method
from fedloom.core.phase import BoundPhase, Phase, phases_of
from fedloom.core.privacy_terms import Spending
from fedloom.core.replies import Replies
from fedloom.core.robust import clip
from fedloom.core.server import Server
from fedloom.core.updates import Updates
from fedloom.errors import ConfigError, MessageError, Refusal
from fedloom.privacy import secure_sum
from fedloom.privacy.identity import SIGNATURE_BYTES, Identity
from fedloom.privacy.peer_channel import ANNOUNCED_BYTES, PeerChannel
from fedloom.privacy.secure_sum import (
    CIPHERTEXT_BYTES,
    NONCE_BYTES,
    SHARE_BYTES,
    Collector,
    Member,
    TooFew,
)
from fedloom.privacy.sum_record import SumId, SumRecord

SUM_PHASES = ("advertise_keys", "draw_graph", "share_keys", "confirm", "unmask")
CHANNEL_PHASES = ("greet_peers", "meet_peers")
RUN_BYTES = 16  # of the id of a session
LOG = "secure-sums.jsonl"  # in a run folder: the cohorts of all sums, through every resume
WEIGHT = "weight of the client"  # no phase can declare a tensor of this name

Layout = dict[str, tuple[str, tuple[int, ...]]]  # {name: (dtype, shape)}


# ---- a client's side ----
class SecureResponder:
    """Answers requests under masks, and refuses those that could expose the client's data.

    Its secrets live as long as the process and are never saved.

    Args:
        terms: The terms that the client agreed to.
        identity: The client's signing key and the public keys of all clients.
        record: The sums that the client took part in.
    """

    def __init__(self, terms: SecureTerms, identity: Identity, record: SumRecord):
        self.terms, self.identity, self.record = terms, identity, record
        self.member: Member | None = None  # the client's side of the current sum
        self.about: SumId | None = None  # that sum
        self.channel: PeerChannel | None = None
        self.noisy_sums = 0  # that this process has taken part in, with differential privacy

    def answer(self, method: Method, client: Client, phase: str, message: Message) -> Message:
        """Returns what may leave the client; raises Refusal if nothing may."""
        if phase == "advertise_keys":
            return self._advertise(method, client, **message)
        if phase in SUM_PHASES:
            return self._stage(method, client, phase, message)
        if phase in CHANNEL_PHASES:
            return self._exchange_keys(client, phase, message)
        bound: BoundPhase = getattr(method, phase)
        if bound.phase.aggregate:
            return self._masked(method, client, bound, message)
        if bound.phase.read_by:
            return self._write(method, client, bound, message)
        if "inbox" in message:
            message = {**message, "inbox": self._read(method, client, phase, message["inbox"])}
        if bound.phase.reply:
            raise Refusal(
                f"client {client.name!r} refuses to answer {phase!r} in the clear: "
                "this is a secure run"
            )
        reply = bound(client, **message)
        check(reply, (), f"client {client.name!r} in {phase!r}")  # nothing undeclared leaves
        return reply

    # ---- sums ----
    def _advertise(
        self,
        method: Method,
        client: Client,
        run: Tensor,
        number: Tensor,
        round: Tensor,
        phase: Tensor,
        roster: Tensor,
        threshold: Tensor,
    ) -> Message:
        name = _bytes(phase).decode("utf-8", "replace")
        about = SumId(_bytes(run), _count(number), _count(round), name)
        if len(about.run) != RUN_BYTES or about.number < 0 or about.round < 0:
            raise Refusal(f"client {client.name!r} refuses: what identifies the sum is not valid")
        self.member = None  # the sum before, if it did not end
        declared = phases_of(type(method)).get(name)
        terms = _terms_of(self.terms, name, declared, len(client.facts.clients))
        member = Member(
            self.identity, client.facts.clients, terms, about, roster.numpy(), int(threshold)
        )
        with _named(client):
            self.record.begin(about, member.drawn)
        self.member, self.about = member, about
        return {"keys": _tensor(member.advertise())}

    def _stage(self, method: Method, client: Client, phase: str, message: Message) -> Message:
        member, about = self.member, self.about
        if member is None or about is None:
            raise Refusal(f"client {client.name!r} refuses to {phase}: no sum has begun")
        arrays = {name: tensor.numpy() for name, tensor in message.items()}
        if phase == "draw_graph":
            return {"nonce": _tensor(member.draw(**arrays))}
        if phase == "share_keys":
            return {"shares": torch.from_numpy(member.share(**arrays))}
        if phase == "confirm":
            signature = member.confirm(**arrays)
            self.member = None
            cohort = np.asarray(client.facts.clients)[arrays["survivors"]]
            with _named(client):  # a refused sum has no signature
                declared = phases_of(type(method)).get(about.phase)
                one = in_buckets(self.terms, declared)
                self.record.release(about, cohort.tolist(), one_cohort=one)
            self.member = member
            return {"signature": _tensor(signature)}
        self.member = None
        return {"revealed": torch.from_numpy(member.unmask(**arrays))}

    def _masked(
        self, method: Method, client: Client, bound: BoundPhase, message: Message
    ) -> Message:
        phase, sender = bound.phase, f"client {client.name!r} in {bound.name!r}"
        if self.member is None or "shared" not in message.get("secure", {}):
            raise Refusal(
                f"client {client.name!r} refuses to answer {bound.name!r} in the clear: "
                "this is a secure run"
            )
        self.member.require_due("mask")  # before the phase changes the client's state
        if self.about is None or self.about.phase != bound.name:
            raise Refusal(
                f"client {client.name!r} refuses to answer {bound.name!r}: the sum that has begun "
                f"is of {self.about and self.about.phase!r}"
            )
        own = {name: content for name, content in message.items() if name != "secure"}
        weighted = phase.aggregate == "mean" and client.facts.privacy is None
        weight = _weight(method, client, phase.weighted_by) if weighted else None
        reply = _clipped(phase, bound(client, **own), own, self.terms.clip)
        lies = _Lies.of(client)
        if lies is not None:
            reply, weight = lies.told(phase, reply, own, weight)
        model: Schema = ()
        if "weights" in phase.reply.values():
            model = model_schema(client.facts.model_of[client.name], client.facts)
        # The server sees sums, so only the client can check its reply.
        check(reply, phase.reply_schema(method, client.facts, own, model), sender)
        if lies is None:  # a liar does not check itself
            phase.require_ranges(method, reply, client.said(), sender)
        if client.facts.privacy is not None and bound.name not in MEASURING:
            return self._noisy(client, bound, reply, message)
        tensors = flatten(reply)
        if weight is not None:
            tensors = {name: tensor.double() * weight for name, tensor in tensors.items()}
            tensors[WEIGHT] = weight.double()
        arrays = {
            name: (t.double() if t.is_floating_point() else t).detach().numpy()
            for name, t in tensors.items()
        }
        terms = _terms_of(self.terms, bound.name, phase, len(client.facts.clients))
        try:
            vector = secure_sum.encode(arrays, terms, self.member.parties)
        except MessageError as error:
            scaled = "" if weight is None else ", times the weight of the client"
            raise MessageError(f"{sender}: {error}{scaled}") from None
        return {"masked": _tensor(self.member.mask(vector, message["secure"]["shared"].numpy()))}

    def _noisy(
        self, client: Client, bound: BoundPhase, reply: Message, message: Message
    ) -> Message:
        """Returns the masked reply with the client's share of the noise."""
        from fedloom.privacy.dp_secure import private_vector  # imports this module

        assert self.member is not None
        assert client.facts.privacy is not None
        most = client.facts.privacy.releases
        if most and self.noisy_sums >= most:
            raise Refusal(
                f"client {client.name!r} refuses to answer {bound.name!r}: it has taken part in "
                f"{self.noisy_sums} noisy sums, as many as run.dp_epsilon allows"
            )
        self.noisy_sums += 1
        sent = {name: content for name, content in message.items() if name != "secure"}
        vector = private_vector(client, bound, reply, sent, self.member.parties)
        return {"masked": _tensor(self.member.mask(vector, message["secure"]["shared"].numpy()))}

    # ---- peer messages ----
    def _exchange_keys(self, client: Client, phase: str, message: Message) -> Message:
        if phase == "greet_peers":
            if self.channel is not None:
                raise Refusal(
                    f"client {client.name!r} refuses to greet its peers again: "
                    "a server that changes keys may want to read"
                )
            self.channel = PeerChannel(self.identity)
            return {"key": _bytes_tensor(self.channel.announced)}
        keys = {name: _bytes(key) for name, key in message["keys"].items()}
        self._channel(client).meet(keys)
        return {}

    def _write(
        self, method: Method, client: Client, bound: BoundPhase, message: Message
    ) -> Message:
        """Runs a phase that writes to peers; checks and encrypts its messages."""
        phase, reply = bound.phase, bound(client, **message)
        expected = phase.peer_schema(method, client.facts, message, reply, client.name)
        check(reply, expected, f"client {client.name!r} in {bound.name!r}")
        if not phase.encrypted:
            return reply
        channel = self._channel(client)
        known = {to: content for to, content in reply.items() if channel.knows(to)}
        return {
            to: _bytes_tensor(channel.seal(to, encode(content, bound.name)))
            for to, content in known.items()
        }

    def _read(self, method: Method, client: Client, reader: str, inbox: Message) -> Message:
        """Decrypts the messages for a phase and checks them against their writer's declaration."""
        phases = phases_of(type(method)).values()
        writers = [phase for phase in phases if phase.read_by == reader]
        if len(writers) != 1:
            raise Refusal(
                f"client {client.name!r} refuses peer messages in {reader!r}: "
                f"{len(writers)} phases write to it, must be one"
            )
        (writer,) = writers
        opened = inbox
        if writer.encrypted:
            channel = self._channel(client)
            longest = largest_size(writer.longest_schema(method, client.facts, {}), writer.name)
            opened = {
                sender: decode(channel.open(sender, _bytes(blob)), writer.name, longest)
                for sender, blob in inbox.items()
            }
        expected = writer.peer_schema(method, client.facts, {}, opened, client.name)
        where = f"client {client.name!r} in {reader!r}, the peer messages"
        check(opened, expected, where)
        writer.require_ranges(method, opened, {}, where)
        return opened

    def _channel(self, client: Client) -> PeerChannel:
        if self.channel is None:
            raise Refusal(f"client {client.name!r} refuses: no keys for peer messages exist")
        return self.channel


def _weight(method: Method, client: Client, by: str) -> Tensor:
    """A client's weight in a mean: computed once, then kept, as the server of a plain run does."""
    if not by:
        return torch.ones(())
    known: dict[str, Tensor] = client.state.setdefault("secure_weights", {})
    if by not in known:
        (known[by],) = getattr(method, by)(client).values()
    if not 0 <= float(known[by]) < float("inf"):
        raise MessageError(
            f"client {client.name!r}: its weight {by!r} must be finite and not negative"
        )
    return known[by]


# ---- the server's side ----
class SecureAggregation:
    """The server learns the sum, or the mean, of the replies.

    Args:
        terms: The terms of the sums.
        folder: The run folder, in which the cohorts are logged; None keeps them in memory.
    """

    budget: Spending | None = None

    def __init__(self, terms: SecureTerms, folder: Path | None = None):
        self.terms, self.log = terms, CohortLog(folder)
        self.keys_exchanged = False  # whether the clients have each other's public keys
        # Each session has its own id, so that numbers never repeat, also after a resume.
        self.run, self.number = os.urandom(RUN_BYTES), 0
        # The groups of this round, and the round and clients that they are of.
        self._drawn: tuple[tuple[int, tuple[str, ...]], list[list[str]]] | None = None

    def replies(
        self,
        server: Server,
        request: Request,
        needed: int | None = None,
        refuse: Refuse | None = None,
    ) -> Replies:
        """Asks for a phase without a reply; refuses any other."""
        phase = request.phase
        if phase.phase.reply:
            raise ConfigError(
                f"run.secure: this method asks for every client's own answer to {phase.name!r}; "
                "a secure run gives sums only (phases marked @summed or @averaged, as in fedavg "
                "and fedsgd)"
            )
        return server.ask_phase(phase, server.address(request), needed, refuse)

    def sum(self, server: Server, request: Request) -> Message:
        """Runs a secure sum, or one for each group of clients."""
        if not in_buckets(self.terms, request.phase.phase):
            return self._total(server, request)[0]
        return self._by_group(server, request)[0].sum()

    def mean(self, server: Server, request: Request) -> Message:
        """Runs a secure sum of weighted replies and weights, or one for each group of clients."""
        if not in_buckets(self.terms, request.phase.phase):
            return self._total(server, request)[0]
        means, weights = self._by_group(server, request)
        return means.mean(weights)

    def _by_group(self, server: Server, request: Request) -> tuple[Replies, dict[str, Tensor]]:
        """Returns the mean or sum of each group of clients, and the weight of each.

        The groups are disjoint. They are drawn once in a round, so that no client is in two sums of
        the same numbers.
        """
        messages = server.address(request)
        found: dict[str, Message] = {}
        sent: dict[str, Message] = {}
        weights: dict[str, Tensor] = {}
        for group in self._groups(server, list(messages)):
            name = " + ".join(group)
            each = {client: messages[client] for client in group}
            found[name], weights[name] = self._total(server, Request(request.phase, None, each, {}))
            sent[name] = request.message if request.each is None else each[group[0]]
        return server.combinable(request.phase, Replies(found), sent), weights

    def _groups(self, server: Server, clients: list[str]) -> list[list[str]]:
        """Divides clients at random into groups of `bucket` or more."""
        if len(clients) < self.terms.bucket:
            raise ConfigError(
                f"run.bucketing is {self.terms.bucket}, but only {len(clients)} clients take part"
            )
        key = (server.round, tuple(clients))
        if self._drawn is None or self._drawn[0] != key:
            rng = server.rng("groups of secure sums")
            order = torch.randperm(len(clients), generator=rng).tolist()
            many = len(clients) // self.terms.bucket
            groups = [sorted(order[k::many]) for k in range(many)]
            self._drawn = key, [[clients[k] for k in group] for group in sorted(groups)]
        return self._drawn[1]

    def peer_messages(self, server: Server, request: Request, book_as: str | None) -> Replies:
        """Relays messages that the server cannot read."""
        bound = request.phase
        encrypted = bound.phase.encrypted
        if encrypted:
            self._exchange_keys(server)
        messages = server.address(request)

        def expected(client: str, reply: Message | None) -> Schema:
            schema = bound.phase.peer_schema(
                bound.method, server.facts, messages[client], reply, client
            )
            if not encrypted:
                return schema
            receivers = {*server.clients} - {client} if reply is None else reply
            return tuple((receiver, "uint8", (-1,)) for receiver in sorted(receivers))

        written = server.exchange(bound.name, messages, expected, book_as)
        server.remember(bound.name, messages, addresses_of(written))
        return written

    def evaluate(self, server: Server, message: Message, stage: str) -> None:
        """Asks for the sum of the clients' scores."""
        request = Request(server.method.evaluate_sum, server.clients, None, message)
        server.observer.evaluated_in_sum(server, self.sum(server, request), stage)

    def summary(self, server: Server) -> dict[str, int]:
        """Returns the number of sums, the size of the smallest, and how many pairs differ in one.

        Two sums over cohorts that differ in one client reveal that client's reply.
        """
        return self.log.summary()

    def _exchange_keys(self, server: Server) -> None:
        """Gives every client the others' public keys, once in a run."""
        if self.keys_exchanged:
            return
        schema: Schema = (("key", "uint8", (ANNOUNCED_BYTES,)),)
        greeted = server.exchange("greet_peers", {c: {} for c in server.clients}, lambda *_: schema)
        keys = greeted.column("key")
        server.exchange("meet_peers", {c: {"keys": keys} for c in greeted}, lambda *_: ())
        self.keys_exchanged = True

    def _total(self, server: Server, request: Request) -> tuple[Message, Tensor]:
        """Returns the sum of the replies, or their mean and the sum of their weights.

        The sum's own threshold says how many clients are enough. No stage is asked twice: a second
        reply under the same masks would expose the first. If too few clients are there before the
        phase itself, and the quorum is below 1, a new sum begins with a number and keys of its own.
        After that clients have run the phase, and the round fails.
        """
        phase, messages = request.phase, server.address(request)
        if not messages:
            raise MessageError(f"nobody is asked for {phase.name!r}: there is nothing to add up")
        items = messages.items()
        schemas = {server.reply_schema(phase, content, client) for client, content in items}
        if any(-1 in shape for schema in schemas for _, _, shape in schema):
            raise ConfigError(
                f"run.secure: what clients answer to {phase.name!r} may have any length (n), "
                "it cannot be added up"
            )
        if len(schemas) != 1:
            raise ConfigError(
                f"run.secure: the clients' answers to {phase.name!r} differ in shape, "
                "they cannot be added up"
            )
        (schema,) = schemas
        lost: dict[str, Absent] = {}
        try:
            return self._sum(server, phase, messages, schema, lost)
        except TooFew as error:
            if not server.tolerates_absence:
                raise
            raise server.failed(phase.name, str(error), lost) from error

    def _sum(
        self,
        server: Server,
        phase: BoundPhase,
        messages: dict[str, Message],
        reply: Schema,
        lost: dict[str, Absent],
    ) -> tuple[Message, Tensor]:
        name = phase.name
        terms = _terms_of(self.terms, name, phase.phase, len(server.clients))
        layout = self.layout(phase, reply)
        size = sum(int(np.prod(shape)) for _, shape in layout.values())
        collector, shared = self._begin(server, name, messages, terms, size, lost, server.attempts)
        asked = {
            at: {**messages[server.clients[at]], "secure": {"shared": _tensor(s)}}
            for at, (s,) in shared.items()
        }
        # The wire has signed integers only.
        signed = _stage(server, name, asked, name, lost, masked=(f"int{terms.bits}", (size,)))
        vectors = ((at, vector.view(terms.word)) for at, vector in signed)
        due = {
            at: {"survivors": _tensor(s)} for at, (s,) in collector.take_vectors(vectors).items()
        }
        survivors = {server.clients[at]: messages[server.clients[at]] for at in due}
        least = server.least(name, len(messages))
        if server.tolerates_absence and len(due) < least:
            raise server.failed(name, too_few(survivors, len(messages), least), lost)
        declared = ("uint8", (SIGNATURE_BYTES,))
        confirmed = _stage(server, "confirm", due, name, lost, signature=declared)
        post = _messages(("ciphertexts", "signatures"), collector.take_confirmations(confirmed))
        revealed = ("uint8", (collector.degree + 1, SHARE_BYTES))
        reveals = _stage(server, "unmask", post, name, lost, revealed=revealed)
        added = secure_sum.decode(
            collector.take_reveals(reveals), layout, terms, int(collector.roster.sum())
        )
        weight = torch.as_tensor(added.get(WEIGHT, 1.0))
        total = self.opened(server, phase, added, reply, survivors)
        # Masks differ in every run. What was asked, who is in the sum, and the sum do not.
        self.log.add(server.round, name, [c for c in server.clients if c in survivors])
        server.remember(name, survivors, {"sum": total})
        missing = {c: lost.get(c, SILENT) for c in messages if c not in survivors}
        server.conclude(name, messages, missing, None, repeatable=False)
        return total, weight

    def layout(self, phase: BoundPhase, reply: Schema) -> Layout:
        """Returns the dtypes and shapes of what is added up.

        Args:
            phase: The phase.
            reply: The schema of its reply.
        """
        mean = phase.phase.aggregate == "mean"
        found: Layout = {
            key: ("float64" if mean or DTYPES[dtype].is_floating_point else dtype, shape)
            for key, dtype, shape in reply
        }
        return {**found, WEIGHT: ("float64", ())} if mean else found

    def opened(
        self,
        server: Server,
        phase: BoundPhase,
        added: dict[str, Any],
        reply: Schema,
        messages: Mapping[str, Message],
    ) -> Message:
        """Returns a decoded sum as what `sum` or `mean` returns.

        Args:
            server: The server.
            phase: The phase.
            added: The sums by name.
            reply: The schema of its reply.
            messages: What the clients in the sum were sent.
        """
        return _as_declared(phase.name, added, reply, phase.phase.aggregate == "mean")

    def _begin(
        self,
        server: Server,
        phase: str,
        messages: dict[str, Message],
        terms: SecureTerms,
        size: int,
        lost: dict[str, Absent],
        attempts: int,
    ) -> tuple[Collector, dict[int, Any]]:
        """Runs the first two stages of a new sum. Returns what `Collector.take_shares` returns."""
        present, absent = server.present(messages, phase in MEASURING)
        lost |= absent
        roster = np.array([name in present for name in server.clients])
        self.number += 1
        about = SumId(self.run, self.number, server.round, phase)
        try:
            collector = Collector(terms, about, roster, size)
            proposal = {
                "run": _bytes_tensor(about.run),
                "number": torch.tensor(about.number),
                "round": torch.tensor(about.round),
                "phase": _bytes_tensor(phase.encode()),
                "roster": torch.from_numpy(roster),
                "threshold": torch.tensor(collector.threshold),
            }
            sent = dict.fromkeys(np.flatnonzero(roster).tolist(), proposal)
            declared = ("uint8", (collector.advertised,))
            arrived = _stage(server, "advertise_keys", sent, phase, lost, keys=declared)
            due = collector.take_keys(arrived)
            if collector.drawn:
                sent = _messages(("commitments", "answered"), due)
                declared = ("uint8", (NONCE_BYTES,))
                due = collector.take_nonces(
                    _stage(server, "draw_graph", sent, phase, lost, nonce=declared)
                )
            keys = _messages(("keys", "answered", "nonces"), due)
            declared_shares = ("uint8", (collector.degree, CIPHERTEXT_BYTES))
            arrived = _stage(server, "share_keys", keys, phase, lost, shares=declared_shares)
            return collector, collector.take_shares(arrived)
        except TooFew:
            if attempts == 1:
                raise
        lost.clear()
        server.absences.retried += len(present)
        return self._begin(server, phase, messages, terms, size, lost, attempts - 1)


def _as_declared(name: str, added: dict[str, Any], reply: Schema, mean: bool) -> Message:
    """A decoded sum in the dtypes that the phase declared; divided by the weights for a mean."""
    tensors = {key: torch.from_numpy(np.asarray(array)) for key, array in added.items()}
    kinds = {key: DTYPES[dtype] for key, dtype, _ in reply}
    if mean:
        weight = tensors.pop(WEIGHT)
        if weight <= 0:
            raise MessageError(f"secure mean of {name!r}: all clients that answered have weight 0")
        tensors = {key: tensor / weight for key, tensor in tensors.items()}
        # A mean of integers is not an integer.
        kinds = {k: kind if kind.is_floating_point else torch.float32 for k, kind in kinds.items()}
    shaped = {key: tensors[key].to(kind) for key, kind in kinds.items()}
    for key, tensor in shaped.items():
        if not tensor.is_floating_point() and not torch.equal(tensor.long(), tensors[key]):
            raise MessageError(
                f"secure sum of {name!r}: the sum of {key!r} does not fit into {tensor.dtype}; "
                "declare int64"
            )
    return unflatten(shaped)


def _stage(
    server: Server,
    name: str,
    sent: dict[int, Message],
    phase: str,
    lost: dict[str, Absent],
    **declared: tuple[str, tuple[int, ...]],
) -> Iterator[tuple[int, Any]]:
    """Runs one stage of a sum for a phase. Yields (position, array) for each reply."""
    ((answer, (dtype, shape)),) = declared.items()
    book_as = phase if phase in MEASURING else None  # an evaluation's keys are booked as such
    position = {server.clients[at]: at for at in sent}
    named = {server.clients[at]: content for at, content in sent.items()}
    schema: Schema = ((answer, dtype, shape),)
    for client, reply in server.stage(name, named, lambda *_: schema, book_as, lost).items():
        yield position[client], reply[answer].numpy()


class CohortLog:
    """Over whom each phase was summed: two cohorts that differ in one client expose it.

    Checkpoints do not take it back: a resumed run continues the file.

    folder: the run folder; None keeps the log in memory.
    """

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / LOG
        self._sums, self._fewest = 0, 0
        self._cohorts: dict[str, set[frozenset[str]]] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                row = json.loads(line)
                self._take(str(row["phase"]), row["clients"])

    def add(self, round: int, phase: str, clients: Sequence[str]) -> None:
        """Adds a sum.

        Args:
            round: Its round.
            phase: The phase whose replies were added.
            clients: Whose replies were added.
        """
        if self._path is not None:
            row = {"round": round, "phase": phase, "clients": list(clients)}
            with open(self._path, "a", encoding="utf-8", opener=open_private) as file:
                file.write(json.dumps(row) + "\n")
        self._take(phase, clients)

    def _take(self, phase: str, clients: Sequence[str]) -> None:
        self._sums += 1
        self._fewest = min(self._fewest or len(clients), len(clients))
        self._cohorts.setdefault(phase, set()).add(frozenset(clients))

    def summary(self) -> dict[str, int]:
        """Returns the number of sums, the size of the smallest, and how many pairs differ in one.

        Two sums over cohorts that differ in one client reveal that client's reply.
        """
        one_apart = sum(
            len(one ^ other) == 1
            for cohorts in self._cohorts.values()
            for one, other in combinations(cohorts, 2)
        )
        return {
            "sums": self._sums,
            "fewest_clients": self._fewest,
            "cohorts_one_apart": one_apart,
        }


def _messages(names: Sequence[str], due: Mapping[int, Sequence[np.ndarray]]) -> dict[int, Message]:
    """Returns the message of each party: its arrays by name. An array for all is made once."""
    made: dict[int, Tensor] = {}
    return {
        at: {
            name: made.setdefault(id(array), _tensor(array))
            for name, array in zip(names, arrays, strict=False)
        }
        for at, arrays in due.items()
    }


def _terms_of(terms: SecureTerms, name: str, phase: Phase | None, population: int) -> SecureTerms:
    """The terms of one sum: `bits` and `range` are chosen for the method, not for its scores."""
    if name in MEASURING:
        return replace(terms, bits=64, range=2.0**32)
    return terms.for_bucket(population) if in_buckets(terms, phase) else terms


def in_buckets(terms: SecureTerms, phase: Phase | None) -> bool:
    """Returns whether a phase is summed over groups of clients: one that answers with weights."""
    return bool(terms.bucket and phase is not None and phase.aggregate and phase.updates_sent)


def _clipped(phase: Phase, reply: Message, sent: Message, limit: float) -> Message:
    """Returns a client's reply with its updates shortened to a norm of at most `limit`."""
    if not limit:
        return reply
    updates, replies = Updates(phase, {"": sent}), Replies({"": reply})
    for name in phase.updates_sent:
        X = updates.matrix(replies, name)
        if torch.linalg.vector_norm(X) > limit:
            replies = updates.replaced(replies, name, {0: clip(X, limit)[0]})
    return replies[""]


@dataclass(frozen=True)
class _Lies:
    """What a liar of a simulation does before it masks its reply; see `core.adversary`."""

    adversary: Adversary
    client: Client

    @classmethod
    def of(cls, client: Client) -> _Lies | None:
        """Returns None if the client is honest."""
        adversary = client.facts.adversary
        lies = adversary is not None and client.name in adversary.clients
        return cls(adversary, client) if adversary is not None and lies else None

    def told(
        self, phase: Phase, reply: Message, sent: Message, weight: Tensor | None
    ) -> tuple[Message, Tensor | None]:
        """Returns the reply that is masked, and the weight in a mean.

        The scores of a liar are 0, so that sums of scores are those of the honest clients.
        """
        adversary = self.adversary
        if phase.name in MEASURING:
            return tree_map(torch.zeros_like, reply), weight
        if adversary.attack == "size":
            reply = reply | {name: adversary.claim(reply[name]) for name in phase.claims}
            return reply, None if weight is None else self._largest(reply)
        if not adversary.changes_updates:
            return reply, weight
        updates, replies = Updates(phase, {"": sent}), Replies({"": reply})
        for name in phase.updates_sent:
            X = updates.matrix(replies, name)
            told = adversary.lies(X, X, self.client.rng("adversary"))
            replies = updates.replaced(replies, name, {0: told[0]})
        return replies[""], weight

    def _largest(self, reply: Message) -> Tensor:
        """Returns the largest weight with which the reply still is in the range of a sum."""
        terms = self.client.facts.secure
        assert terms is not None
        largest = max(float(t.abs().max()) for t in flatten(reply).values() if t.numel())
        return torch.tensor(min(self.adversary.factor, 0.99 * terms.range / max(largest, 1.0)))


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.view(f"i{array.itemsize}")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def _named(client: Client) -> Iterator[None]:
    """Adds the client's name to a refusal."""
    try:
        yield
    except Refusal as error:
        raise Refusal(f"client {client.name!r} refuses: {error}") from None


def _count(tensor: Tensor) -> int:
    """Returns a whole number; -1 if it is none."""
    return -1 if tensor.is_floating_point() or tensor.numel() != 1 else int(tensor)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
