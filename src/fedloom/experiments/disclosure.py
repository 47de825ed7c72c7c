"""Disclosure of a method: its first round is run, and every message is attacked.

`read` applies the attacks of `fedloom.privacy.disclosure` to what the server of a recorded run
receives (`fedloom.experiments.overhearing`), and compares what they read with the clients' graphs.
In a secure run the server receives sums, so there the attacks get sums. `measure` returns the
figures of a method that `bench/disclosure.py` keeps; `fedloom.experiments.audit` adds further
attacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from fedloom.core.aggregation import PlainResponder
from fedloom.core.client import Client
from fedloom.core.ledger import MEASURING
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.phase import Phase
from fedloom.core.replies import Replies
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.experiments.overhearing import Exchange, Recording, per_class, record
from fedloom.experiments.settings import RunSettings
from fedloom.privacy import disclosure
from fedloom.privacy.leakage import edge_auc, reidentified

Numbers = dict[str, float]


def measure(
    method: Method, name: str, federation: Federation, model: str, seed: int, secure: bool = False
) -> dict[str, Numbers]:
    """Returns what attacks read in the messages of a method's first round, by kind of message.

    The result has these keys, each only if there are such messages:

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

    Args:
        method: The method.
        name: Its name, for errors.
        federation: The clients' graphs.
        model: The clients' model.
        seed: The run's seed.
        secure: Whether the run is secure.
    """
    settings = RunSettings(seed=seed, secure=secure)
    return read(record(method, name, federation, model, settings)).counted()


def read(seen: Recording) -> Reading:
    """Runs all attacks on the messages of a recording, up to the first round."""
    reading = Reading(seen)
    reading.attack()
    return reading


def replayed(seen: Recording) -> Iterator[tuple[Exchange, Mapping[str, Message]]]:
    """Yields the exchanges up to the first round, each with the replies of stand-ins to it.

    A stand-in has the client's name, settings and messages, but no features. In an evaluation its
    reply is the client's.
    """
    plain = replace(seen.facts, upload="", download="")  # the messages are decoded
    stand_ins = {
        c: Client(c, disclosure.stand_in(graph), plain, seen.inductive, PlainResponder())
        for c, graph in seen.graphs.items()
    }
    for exchange in seen.first_round():
        blanks: Mapping[str, Message] = exchange.answers
        if exchange.phase not in MEASURING:
            blanks = {
                c: stand_ins[c].perform(seen.method, exchange.phase, message)
                for c, message in exchange.received.items()
            }
        yield exchange, blanks


class Reading:
    """What the attacks have read in one recording.

    Attributes:
        seen: The recording.
        told: The features that occur at each client, by exchange.
        shares: The share of each class at each client, estimated.
        exact: The clients whose training labels are counted.
        exact_held_out: The clients whose validation and test labels are counted.
        single: Of class means ("prototypes") and rows in peer messages ("peers"): which are a
            single item's.
        pseudo: What is read in each client's pseudo-graph.
        scored: Whether there was an evaluation.
    """

    def __init__(self, seen: Recording):
        self.seen, self.secure = seen, seen.secure
        self.told: list[dict[str, Tensor]] = []
        self.shares: dict[str, Tensor] = {}
        self.exact: set[str] = set()
        self.exact_held_out: set[str] = set()
        self.single: dict[str, list[bool]] = {"prototypes": [], "peers": []}
        self.pseudo: list[Numbers] = []
        self.scored = False

    def attack(self) -> None:
        """Runs all attacks."""
        seen = self.seen
        for exchange, blanks in replayed(seen):
            self.told.append({})
            declared = seen.declared(exchange)
            if exchange.total is not None:
                self._attack_sum(declared, exchange, blanks)
            elif exchange.replies:
                self._attack_replies(declared, exchange, blanks)
            elif declared.read_by:  # the server cannot read them, the receivers can
                for c, answer in exchange.answers.items():
                    self._count_rows(c, declared, answer, {})

    def _attack_replies(
        self, declared: Phase, exchange: Exchange, blanks: Mapping[str, Message]
    ) -> None:
        for c, reply in exchange.replies.items():
            self._attack(c, declared, exchange.received[c], reply, blanks[c])
            self._count_rows(c, declared, reply, exchange.rows[c])

    def _attack_sum(
        self, declared: Phase, exchange: Exchange, blanks: Mapping[str, Message]
    ) -> None:
        """The same attacks, with the sum in place of each client's reply."""
        assert exchange.total is not None
        blank = aggregated(self.seen, declared, blanks)
        for c in exchange.answers:
            self._attack(c, declared, exchange.received[c], exchange.total, blank)
        everybody = [exchange.rows[c] for c in exchange.answers]
        rows = {kind: torch.cat([each[kind] for each in everybody]) for kind in everybody[0]}
        self._count_rows("", declared, exchange.total, rows)

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
                self._count_peer_rows(self.seen.graphs[client], declared, message)
        elif "edges" in reply and "features" in reply:
            self._attack_pseudo_graph(self.seen.graphs[client], reply)
        for name in per_class(declared):
            sent = reply[name].reshape(-1, reply[name].shape[-1])
            sent = sent[(sent != 0).any(1)]
            self.single["prototypes"] += disclosure.single_items(sent, rows[name]).tolist()

    def _count_peer_rows(self, graph: Graph, declared: Phase, message: Message) -> None:
        """Counts the rows of nodes in a peer message: tensors whose first axis may be any length.

        A tensor of a fixed length holds weights.
        """
        for name, tensor in message.items():
            text = declared.reply.get(name)
            if not isinstance(text, str) or not text.startswith("float32[n,"):
                continue
            if tensor.shape[1] == graph.x.shape[1]:
                alone = disclosure.single_items(tensor, graph.x)
            elif "edges" in message:  # the number of neighbours that each row is the sum of
                alone = message["edges"] == 1
            else:  # rows of something else than features, such as noisy embeddings
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
            "auc": mean(disclosure.feature_membership(told, graphs).values()),
        }

    def features(self) -> Mapping[str, Tensor] | None:
        """Returns the features of each client from the message that tells most; None if none."""
        read_all = [told for told in self.told if len(told) == len(self.seen.graphs)]
        return max(read_all, key=lambda told: self._features(told)["auc"], default=None)

    def label_shares(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns shares of labels, [clients, classes]: read, true, and guessed.

        The guess is the average client. None if no message tells about labels.
        """
        if not self.exact and not self.shares:
            return None
        graphs, classes = self.seen.graphs, self.seen.facts.num_classes
        counts = [torch.bincount(g.y[g.train], minlength=classes) for g in graphs.values()]
        true = torch.stack([n / n.sum().clamp(min=1) for n in counts])
        average = true.mean(0)
        read = torch.stack([self.shares.get(c, average) for c in graphs])
        exactly = torch.tensor([c in self.exact for c in graphs]).unsqueeze(1)
        return torch.where(exactly, true, read), true, average.expand_as(true)

    def counted(self) -> dict[str, Numbers]:
        """Returns the figures; see `measure`."""
        found: dict[str, Numbers] = {}
        if (told := self.features()) is not None:
            found["features"] = self._features(told)
        if (labels := self.label_shares()) is not None:
            read, true, guess = labels
            found["labels"] = {
                "exact": len(self.exact),
                "off": float(distance(read, true).mean()),
                "guess": float(distance(guess, true).mean()),
                "clients": len(true),
            }
        if self.scored:
            found["held_out"] = {
                "exact": len(self.exact_held_out),
                "clients": len(self.seen.graphs),
            }
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


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Returns the total variation distance of rows of shares, [rows]."""
    return (one - other).abs().sum(1) / 2


def aggregated(seen: Recording, declared: Phase, replies: Mapping[str, Message]) -> Message:
    """Returns the sum or the mean of replies that the server of a secure run receives."""
    given = Replies(dict(replies))
    if declared.aggregate == "sum":
        return given.sum()
    sizes = {c: torch.tensor(float(seen.graphs[c].num_items)) for c in replies}
    return given.mean(sizes if declared.weighted_by else None)
