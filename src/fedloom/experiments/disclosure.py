"""Disclosure of a method: its first round is run, and every message is attacked.

`measure` records what the server of a run receives, applies the attacks of
`fedloom.privacy.disclosure`, and compares what they read with the clients' graphs. In a secure run
the server receives sums, so there the attacks get sums. `bench/disclosure.py` measures all methods.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor

from fedloom.core.aggregation import PlainAggregation, PlainResponder, Request
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.ledger import MEASURING
from fedloom.core.message import Absent, Message
from fedloom.core.method import Method
from fedloom.core.phase import Phase, phases_of
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine
from fedloom.experiments.run import agree_on_facts
from fedloom.experiments.settings import RunSettings
from fedloom.privacy import disclosure
from fedloom.privacy.leakage import edge_auc, reidentified

Numbers = dict[str, float]


@dataclass(frozen=True)
class Exchange:
    """A phase of a recorded run.

    Attributes:
        phase: Its name.
        sent: The server's message to each client.
        replies: Each client's reply.
        rows: The rows of each client's items when it answered, by the name of the tensor of the
            reply that holds such rows: embeddings or logits.
    """

    phase: str
    sent: Mapping[str, Message]
    replies: Mapping[str, Message]
    rows: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Recording:
    """What a server sent and received.

    Attributes:
        method: The method.
        facts: The facts of the run.
        graphs: The clients' graphs as they were before the run.
        exchanges: All exchanges, in order.
    """

    method: Method
    facts: Facts
    graphs: Mapping[str, Graph]
    exchanges: list[Exchange] = field(default_factory=list)


class Unmasked(PlainAggregation):
    """The aggregation of a secure run, without its masks."""

    def evaluate(self, server: Server, message: Message, stage: str) -> None:
        """Asks for the sum of the clients' scores."""
        request = Request(server.method.evaluate_sum, server.clients, None, message)
        server.observer.evaluated_in_sum(server, self.sum(server, request), stage)


class _FirstRoundIsOver(Exception):  # noqa: N818  (not an error)
    """Ends a method's `run`."""


class OneRound:
    """The observer of a run that ends after its first round."""

    def entered_rounds(self, server: Server, count: int) -> int:
        """The run is not a resumed one."""
        return 0

    def finished_round(self, server: Server) -> bool:
        """Ends the run, so that nothing that follows the rounds takes time."""
        raise _FirstRoundIsOver

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """The scores are among the recorded messages."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """As above."""


def record(
    method: Method, name: str, federation: Federation, model: str, seed: int, secure: bool = False
) -> Recording:
    """Runs the first round of a method, and returns what its server receives.

    Args:
        method: The method.
        name: Its name, for errors.
        federation: The clients' graphs.
        model: The clients' model.
        seed: The run's seed.
        secure: Whether the method runs as in a secure run. The replies are recorded as they are
            before they are masked.
    """
    settings = RunSettings(seed=seed, secure=secure)
    facts = agree_on_facts(method, name, federation.roster, model, 0.5, settings)
    graphs = dict(zip(federation.names, federation.graphs, strict=True))
    clients = {c: Client(c, g, facts, responder=PlainResponder()) for c, g in graphs.items()}
    engine = Engine(method, clients.values())
    kept = Recording(method, facts, graphs)

    def call(phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        replies = engine.call(phase, messages)
        answered = {c: reply for c, reply in replies.items() if not isinstance(reply, Absent)}
        declared = phases_of(type(method))[phase]
        rows = {c: _rows_of(clients[c], declared) for c in answered}
        kept.exchanges.append(Exchange(phase, messages, answered, rows))
        return replies

    policy = RoundPolicy(method.evaluations[0])
    aggregation = Unmasked() if secure else PlainAggregation()
    with suppress(_FirstRoundIsOver):
        method.run(Server(method, facts, call, policy, OneRound(), aggregation))
    return kept


def measure(
    method: Method, name: str, federation: Federation, model: str, seed: int, secure: bool = False
) -> dict[str, Numbers]:
    """Returns what attacks read in the messages of a method's first round, by kind of message.

    Takes the arguments of `record`. The result has these keys, each only if there are such
    messages:

        features      `pairs`: (client, feature) pairs that the attack names; `right`: the true ones
                      among them; `held`: all true ones; `auc`: membership of nodes, mean over
                      clients, chance is 0.5; from the message that tells most
        labels        `exact`: clients whose training labels are counted exactly; `off`: total
                      variation distance of the shares that are read, mean over clients; `guess`:
                      the same if the average client is guessed; `clients`: their number
        held_out      `exact`: clients whose validation and test labels are counted exactly
        prototypes    `single`: class means, or mean logits, of a single item; `sent`: all of them
        peers         `single`: rows in peer messages of a single node; `sent`: all of them
        pseudo_graph  `found`: share of the rows that are matched with the real node; `chance`: the
                      same by chance; `edge_auc`: edges told from other pairs, chance is 0.5
    """
    seen = record(method, name, federation, model, seed, secure)
    return _Attack(seen, secure).numbers()


class _Attack:
    """The attacks on one recording, and what they have read so far."""

    def __init__(self, seen: Recording, secure: bool):
        self.seen, self.secure = seen, secure
        self.told: list[dict[str, Tensor]] = []  # the features of each client, by exchange
        self.shares: dict[str, Tensor] = {}  # of each class at each client, estimated
        self.exact: set[str] = set()  # clients whose training labels are counted
        self.exact_held_out: set[str] = set()
        self.single: dict[str, list[bool]] = {"prototypes": [], "peers": []}
        self.pseudo: list[Numbers] = []
        self.scored = False

    def numbers(self) -> dict[str, Numbers]:
        """Runs all attacks and counts what they read."""
        seen = self.seen
        stand_ins = {
            c: Client(c, disclosure.stand_in(graph), seen.facts, responder=PlainResponder())
            for c, graph in seen.graphs.items()
        }
        for exchange in seen.exchanges:
            self.told.append({})
            blanks = exchange.replies
            if exchange.phase not in MEASURING:
                blanks = {
                    c: stand_ins[c].perform(seen.method, exchange.phase, message)
                    for c, message in exchange.sent.items()
                }
            declared = phases_of(type(seen.method))[exchange.phase]
            if not self.secure:
                self._attack_replies(declared, exchange, blanks)
            elif declared.aggregate:
                self._attack_sum(declared, exchange, blanks)
            elif declared.read_by and not declared.encrypted:
                self._attack_replies(declared, exchange, blanks)
            elif declared.read_by:  # the server cannot read them, the receivers can
                for c, reply in exchange.replies.items():
                    self._count_rows(c, declared, reply, {})
        return self._counted()

    def _attack_replies(
        self, declared: Phase, exchange: Exchange, blanks: Mapping[str, Message]
    ) -> None:
        for c, reply in exchange.replies.items():
            self._attack(c, declared, exchange.sent[c], reply, blanks[c])
            self._count_rows(c, declared, reply, exchange.rows[c])

    def _attack_sum(
        self, declared: Phase, exchange: Exchange, blanks: Mapping[str, Message]
    ) -> None:
        """The same attacks, with the sum in place of each client's reply."""
        total, blank = (_aggregated(self.seen, declared, r) for r in (exchange.replies, blanks))
        for c in exchange.replies:
            self._attack(c, declared, exchange.sent[c], total, blank)
        everybody = [exchange.rows[c] for c in exchange.replies]
        rows = {kind: torch.cat([each[kind] for each in everybody]) for kind in everybody[0]}
        self._count_rows("", declared, total, rows)

    def _attack(
        self, client: str, declared: Phase, sent: Message, reply: Message, blank: Message
    ) -> None:
        """The attacks on a reply, or on a sum in its place, that are about one client."""
        facts, graph = self.seen.facts, self.seen.graphs[client]
        classes = facts.num_classes
        if declared.name in MEASURING:
            self.scored = True
            read = disclosure.label_counts_told(reply, classes)
            if all(_counted_in(read, graph.y[part], classes) for part in (graph.val, graph.test)):
                self.exact_held_out.add(client)
            return
        told = disclosure.features_told(reply, blank, facts.num_features)
        if told is not None:
            self.told[-1][client] = told
        read = disclosure.label_counts_told(reply, classes)
        if _counted_in(read, graph.y[graph.train], classes):
            self.exact.add(client)
        share = disclosure.label_shares_told(reply, blank, sent, classes)
        if share is None and read:
            share = (read[0] / read[0].sum()).float()
        if share is not None:
            self.shares[client] = share

    def _count_rows(
        self, client: str, declared: Phase, reply: Message, rows: Mapping[str, Tensor]
    ) -> None:
        """The attacks on rows that stand for several items, or for one.

        Args:
            client: Who sent the reply; "" if it is a sum.
            declared: The phase.
            reply: The reply or the sum.
            rows: The rows of the client's items, or of all clients'.
        """
        if declared.read_by:
            for message in reply.values():
                self._count_peer_rows(self.seen.graphs[client], message)
        elif "edges" in reply and "features" in reply:
            self._attack_pseudo_graph(self.seen.graphs[client], reply)
        for name in _per_class(declared):
            sent = reply[name].reshape(-1, reply[name].shape[-1])
            sent = sent[(sent != 0).any(1)]
            self.single["prototypes"] += disclosure.single_items(sent, rows[name]).tolist()

    def _count_peer_rows(self, graph: Graph, message: Message) -> None:
        for tensor in message.values():
            if tensor.dim() != 2 or not tensor.is_floating_point():
                continue
            if tensor.shape[1] == graph.x.shape[1]:
                alone = disclosure.single_items(tensor, graph.x)
            elif "edges" in message:  # the number of neighbours that each row is the sum of
                alone = message["edges"] == 1
            else:  # weights, not rows of nodes
                continue
            self.single["peers"] += alone.tolist()

    def _attack_pseudo_graph(self, graph: Graph, reply: Message) -> None:
        rng = torch.Generator().manual_seed(0)
        sent, links = reply["features"].float(), reply["edges"].long()
        self.pseudo.append(
            {
                "found": reidentified(graph.x, sent),
                "chance": 1 / graph.num_nodes,
                "edge_auc": edge_auc(graph.edge_index, sent, links, rng),
            }
        )

    def _features(self, told: Mapping[str, Tensor]) -> Numbers:
        graphs = self.seen.graphs
        held = {c: (graph.x != 0).any(0) for c, graph in graphs.items()}
        return {
            "pairs": sum(int(t.sum()) for t in told.values()),
            "right": sum(int((t & held[c]).sum()) for c, t in told.items()),
            "held": sum(int(h.sum()) for h in held.values()),
            "auc": disclosure.feature_membership(told, graphs),
        }

    def _counted(self) -> dict[str, Numbers]:
        graphs, classes = self.seen.graphs, self.seen.facts.num_classes
        found: dict[str, Numbers] = {}
        read_all = [told for told in self.told if len(told) == len(graphs)]
        if read_all:  # the message that tells most
            found["features"] = max(map(self._features, read_all), key=lambda each: each["auc"])
        if self.exact or self.shares:
            counts = [torch.bincount(g.y[g.train], minlength=classes) for g in graphs.values()]
            true = torch.stack([n / n.sum().clamp(min=1) for n in counts])
            average = true.mean(0)
            read = torch.stack([self.shares.get(c, average) for c in graphs])
            exactly = torch.tensor([c in self.exact for c in graphs]).unsqueeze(1)
            found["labels"] = {
                "exact": len(self.exact),
                "off": _distance(torch.where(exactly, true, read), true),
                "guess": _distance(average.expand_as(true), true),
                "clients": len(graphs),
            }
        if self.scored:
            found["held_out"] = {"exact": len(self.exact_held_out), "clients": len(graphs)}
        for kind, alone in self.single.items():
            if alone:
                found[kind] = {"single": sum(alone), "sent": len(alone)}
        if self.pseudo:
            found["pseudo_graph"] = {
                key: mean(each[key] for each in self.pseudo) for key in self.pseudo[0]
            }
        return found


def _counted_in(read: list[Tensor], y: Tensor, classes: int) -> bool:
    """Returns whether one of the rows is the number of labels y of each class."""
    true = torch.bincount(y, minlength=classes).double()
    return any(torch.equal(row, true) for row in read)


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the total variation distance of rows of shares, the mean over rows."""
    return float((one - other).abs().sum(1).mean() / 2)


def _per_class(declared: Phase) -> dict[str, str]:
    """Returns the names in a reply that hold a row per class, and what it is: "p" or "C".

    p is a row of embeddings, C a row of logits.
    """
    texts = {n: d for n, d in declared.reply.items() if isinstance(d, str)}
    rows = {n: d.rpartition(",")[2][0] for n, d in texts.items() if re.match(r"float32\[.*,", d)}
    return {n: axis for n, axis in rows.items() if axis == "p" or texts[n] == "float32[C,C]"}


@torch.no_grad()
def _rows_of(client: Client, declared: Phase) -> dict[str, Tensor]:
    """Returns the embeddings or logits of a client's items, by the names of `_per_class`."""
    compute = {
        "p": lambda: client.state["model"].embed(client.graph),
        "C": lambda: client.state["model"](client.graph),
    }
    return {name: compute[axis]() for name, axis in _per_class(declared).items()}


def _aggregated(seen: Recording, declared: Phase, replies: Mapping[str, Message]) -> Message:
    """Returns the sum or the mean of replies that the server of a secure run receives."""
    given = Replies(dict(replies))
    if declared.aggregate == "sum":
        return given.sum()
    sizes = {c: torch.tensor(float(seen.graphs[c].num_items)) for c in replies}
    return given.mean(sizes if declared.weighted_by else None)
