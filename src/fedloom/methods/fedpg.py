"""FedPG: clients share, for each class, how its items look at 0 to H hops; never a weight; any architecture at each client.

Wu, Li, Zhu, Li, Wang, Zhou: "Federated Prototype Graph Learning". A topology-aware prototype P[c,h] is the mean, over the centres of class
c, of what surrounds them at distance h. The server learns a universal one, G[c,h], and mixes it with those of similar clients.

What travels, per client and round (C classes, H hops, p the embedding's width); nothing but this, and of absent entries no vector:
    up    prototypes, present   P^k[c,h], at most C (H + 1) p numbers, and where they are
          counts                m^k[c], the number of centres of class c, at least `floor`; 0 if nothing is told of it
    down  prototypes, present   B^k[c,h], for the entries that the client told of last time (nothing in its first round)

    P[c,0] = mean_{i in S_c} z_i                                                                                  `prototypes`
    P[c,h] = mean over i in S_c with neighbours of Σ_{j in N_h(i)} w_ij z_j                          (Eq. 1, 2)   `prototypes`
    w_ij   = softmax_j LeakyReLU(a_h · [z_i ‖ z_j ‖ mean_j' z_j']), a_h a client's own, 0 at first                `Attention`
    G[c,h] = MLP(u_ch) of length 1, u and the MLP trained, over rounds                                  (Eq. 3)   `learn_universal`
    L_ch   = −log Σ_{S⁺} e^{(cos(G_ch,P) − M_h)/T} / (Σ_{S⁺} e^{(cos(G_ch,P) − M_h)/T} + Σ_{S⁻} e^{cos(G_ch,P)/T})  (Eq. 4, 7)
                                                                                                                  `contrast_anchors`
    M_h    = min(max_{c≠c'} (1 − cos(Q_ch, Q_c'h)), ε), Q_ch the mean of the uploads                              `margin`
    S⁺     uploads P[c,h], and ⌈Δs of as many⌉ drawn from the class's other hops; S⁻ the same of other classes      `receptive_field`
    B^i    = α G + (1 − α) Σ_j (m^j[c] / Σ m[c]) P^j, over the peers j with cos(P^i, P^j) ≥ λ            (Eq. 5)   `personal`
    min CE + μ Σ_{c,h} ‖P[c,h] − B[c,h]‖                                                               (Eq. 6)   `alignment`

z has rows of length 1 (`unit`): architectures differ in scale. S_c: training items of class c (`annotate = "pseudo"`: and those that the
client's own model is sure of, found anew each round). N_h(i): items at distance exactly h, of which those annotated with i's class count.
In a graph task, where items have no edges, N_h(i) are the nearest graphs whose embeddings' cosine lies within a band: from t up for h = 1,
then bands that are `band` wide; in a training step, of the batch at hand.

Ablations as settings: no RF context `sampling = 0`, no margin `margin_cap = 0`, no personalisation `alpha = 1`, `hops = 0`,
`attention = false`. With hops = 0, alpha = 1, sampling = 0, geometry = "euclidean", direction = "query", align = "item" and unit = false
this is FedTGP; with universal = "mean" besides, FedProto, as long as everybody takes part (here who was away is pulled to the answer to
what it told last, there to what the last round gave) and floor = 1. With universal = "mean" sampling, margin and temperature do nothing;
with direction = "query" the temperature.

Privacy: the server sees every client's prototypes, since it compares them: no secure sums. `floor` keeps at home what fewer than so many
different items are behind (a prototype of one item is that item's embedding). It looks at each entry by itself, and is no guarantee: a
hub has most of its class's P[c,1], and who knows the edges can take P[c,0] and P[c,1] apart and solve for single items. `noise` disturbs a
share of the coordinates, other ones each round, so that rounds can be held against each other. Clients learn of each other by B: with
alpha = 0 and a single peer, that peer's prototype up to its count; without a peer, G itself.

Departures: as printed, Eq. 1's attention is of another kind (over layers) and divides twice; Eq. 4 and 7 disagree, and add the margin
where it makes the task easier: read as FedTGP's, whose margin stands against the true class. The authors' code differs from the paper
(1- and 2-hop means of nodes 0 and 1, validation labels in S_c, zero vectors for absent classes, a margin that is numerically 0, peers'
means shrunk to a third): the paper is followed. `align = "item"` pulls single items, as FedProto and the authors' code do, averaged over
items instead of within classes.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.methods._shared import structure
from fedloom.methods._shared.prototypes import class_means, table_of, told
from fedloom.methods.fedproto import nearness
from fedloom.methods.fedtgp import FedTGP
from fedloom.nn.training import make_optimizer, step

CHUNK = 1024  # rows of similarities between graphs that are looked at at once


class Attention(nn.Module):
    """a_1 ... a_H: how much each neighbour counts, by what it, its centre and the other neighbours are like."""

    def __init__(self, hops: int, width: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(hops, 3, width))

    def forward(self, hop: int, z: Tensor, around: "Around") -> Tensor:
        """w_ij of the pairs at a hop; they add up to 1 around each centre."""
        own, other, common = (z @ self.vectors[hop - 1].T).unbind(
            1
        )  # [items] each: a score is the sum of three numbers
        mean = around.over_members(common[around.member] / around.size)
        score = F.leaky_relu(own[around.centre] + other[around.member] + mean[around.centre], 0.2)
        highest = score.new_full((len(z),), -torch.inf).scatter_reduce(
            0, around.centre, score.detach(), "amax"
        )
        share = (score - highest[around.centre]).exp()
        return share / around.over_members(share)[around.centre]


class Around:
    """Who stands around whom at one hop: pairs of a centre, which has a class, and a member; and what follows from them once."""

    def __init__(self, centre: Tensor, member: Tensor, label: Tensor, classes: int):
        self.centre, self.member, self.items = centre, member, len(label)
        members = torch.bincount(centre, minlength=self.items)
        self.size = members[centre].float()  # how many members the pair's centre has, [pairs]
        self.centres = members.nonzero().flatten()
        self.of = label[centre]  # the centre's class, [pairs]
        self.cell = self.of * self.items + member  # the pair's place in a matrix [classes, items]
        # Of each class: how many centres have members, and how many different members they have.
        self.num_centres = torch.bincount(label[self.centres], minlength=classes)
        self.num_members = torch.bincount(
            torch.unique(self.cell) // max(self.items, 1), minlength=classes
        )

    def over_members(self, value: Tensor) -> Tensor:
        """Σ over each centre's pairs of a number [pairs] or a vector [pairs, p]: [items] or [items, p], 0 for who is no centre."""
        return value.new_zeros(self.items, *value.shape[1:]).index_add(0, self.centre, value)


@dataclass
class Surroundings:
    """What prototypes of some items are made of: every item's class (-1: none known), and who is around it at each hop."""

    label: Tensor
    hops: list[Around]


@dataclass(frozen=True)
class FedPG(FedTGP):
    """FedTGP with prototypes that know the topology, and an answer for each client."""

    hops: int = setting(
        2, "H, the farthest hop with prototypes of its own", at_least=0, tune="0..3"
    )
    pull: float = setting(0.5, "μ, weight of the alignment", at_least=0, tune="0.1..10")
    unit: bool = setting(True, "embeddings, and universal prototypes, are scaled to length 1")
    margin_cap: float = setting(
        0.5, "ε, the largest margin M (0 = without)", at_least=0, tune="0.1..1"
    )
    alpha: float = setting(
        0.5,
        "α, share of the universal prototype in what a client gets (1 = not personal)",
        at_least=0,
        at_most=1,
        tune="0..1",
    )
    similar: float = setting(
        0.8, "λ, cosine from which another client is a peer", at_least=-1, tune="0.5..0.95"
    )
    top_peers: int = setting(
        0, "instead of λ: so many most similar clients are peers (0 = λ decides)", at_least=0
    )
    sampling: float = setting(
        0.5,
        "Δs, prototypes from other hops for each of the own hop",
        at_least=0,
        at_most=1,
        tune="0,0.25,0.5,0.75,1",
    )
    temperature: float = setting(1.0, "T of the contrast", above=0, tune="0.1..1")
    attention: bool = setting(True, "neighbours are weighted by attention (false: all alike)")
    annotate: str = setting(
        "train",
        "whose class is known: training items; or also what the model is sure of",
        choices=("train", "pseudo"),
    )
    sure: float = setting(
        0.9, "pseudo: probability from which the model is sure", at_least=0, at_most=1
    )
    neighbours: str = setting(
        "same",
        "which neighbours count: those annotated with the centre's class, or any",
        choices=("same", "any"),
    )
    most: int = setting(
        64, "nodes at most around a node at a hop, drawn if there are more", at_least=1, task="node"
    )
    align: str = setting(
        "prototype",
        "what is pulled: the client's prototypes (Eq. 6), or every item",
        choices=("prototype", "item"),
    )
    direction: str = setting(
        "anchor",
        "contrast: each G against uploads (Eq. 7), or each upload against G",
        choices=("anchor", "query"),
    )
    geometry: str = setting("cosine", "distance at the server", choices=("cosine", "euclidean"))
    universal: str = setting(
        "trained",
        "G: trained, or the mean of the uploads weighted by counts",
        choices=("trained", "mean"),
    )
    noise: float = setting(
        0.0, "share of an uploaded prototype's coordinates that get noise", at_least=0, at_most=1
    )
    t: float = setting(
        0.9, "cosine of graphs that are one hop apart", at_least=-1, at_most=1, task="graph"
    )
    band: float = setting(
        0.1, "how much lower the cosine is with each further hop", above=0, task="graph"
    )
    nearest: int = setting(10, "graphs at most around a graph at a hop", at_least=1, task="graph")

    discloses_to_peers: ClassVar[str] = (
        "B, a mix of G and the prototypes of similar clients: of one alone, if there is one peer and alpha = 0"
    )

    @property
    def depth(self) -> int:
        """H + 1, prototypes of a class."""
        return self.hops + 1

    # ---- a client's side ----
    @phase()
    def setup(self, client: Client) -> Message:
        """As in FedProto; the attention is trained along with the model, and stays here."""
        super().setup(client)
        state, model = client.state, client.state["model"]
        state["attention"] = attend = Attention(self.hops if self.attention else 0, model.width)
        # What a centre adds to all its scores cancels, but for rounding errors, which Adam would scale up to full steps: hence its ε.
        groups: list[dict[str, Any]] = [
            {"params": list(model.parameters())},
            {"params": list(attend.parameters()), "eps": 1e-5},
        ]
        state["optimizer"] = make_optimizer(self.optimizer, groups, self.lr, self.weight_decay)
        state["annotation"] = client.graph.y.clone()  # -1 but for training items
        return {}

    @phase(prototypes="float32[*present,p]", present="bool[C,depth]", counts="int64[C]")
    def train(
        self, client: Client, prototypes: Tensor | None = None, present: Tensor | None = None
    ) -> Message:
        """E local epochs, towards B if any came; then P, of embeddings without noise."""
        self.follow(client, prototypes, present)
        z = self.embeddings(client)
        if self.annotate == "pseudo":
            client.state["annotation"] = self.pseudo_labels(client)
        around, classes = self.surroundings(client, client.graph, z), client.facts.num_classes
        with torch.no_grad():
            table, there, behind = self.prototypes(client, z, around)
        sent = told(self.disturbed(client, table), there, self.floor, behind)
        centres = torch.bincount(around.label[around.label >= 0], minlength=classes)
        # A class whose own mean stays at home may still be told of at other hops: then as if it had just enough items.
        return {**sent, "counts": centres.clamp(min=self.floor) * sent["present"].any(1)}

    @torch.no_grad()
    def pseudo_labels(self, client: Client) -> Tensor:
        """Training items' own classes, and for the others what the model is sure of, else -1."""
        graph = client.graph
        probability, guess = client.state["model"](graph).softmax(1).max(1)
        return torch.where(graph.train, graph.y, torch.where(probability >= self.sure, guess, -1))

    def disturbed(self, client: Client, table: Tensor) -> Tensor:
        """The table with noise, as large as the coordinates spread, on a share of each prototype's coordinates, drawn anew each time."""
        count = round(self.noise * table.shape[-1])
        if not count:
            return table
        rng = client.rng("noise")
        chosen = torch.rand(table.shape, generator=rng).argsort(-1) < count
        return table + chosen * torch.randn(table.shape, generator=rng) * table.std(
            -1, keepdim=True
        )

    def surroundings(self, client: Client, batch: Graph, z: Tensor) -> Surroundings:
        """Classes and neighbourhoods of a batch's items."""
        if batch.task == "graph":
            label = (
                client.state["annotation"]
                if batch is client.graph
                else torch.where(batch.train, batch.y, -1)
            )
            return Surroundings(
                label, self.by_similarity(label, z.detach(), client.facts.num_classes)
            )
        label, known = client.state["annotation"], client.memory.get("surroundings")
        if (
            known is None or known.label is not label
        ):  # with `annotate = "train"` once, else once a round
            client.memory["surroundings"] = known = Surroundings(
                label, self.by_edges(client, label)
            )
        return known

    def by_edges(self, client: Client, label: Tensor) -> list[Around]:
        """N_h around every item that has a class, h = 1 ... H, from the graph's edges."""
        if "at distance" not in client.memory:
            graph = client.graph
            starts = (
                graph.train.nonzero().flatten()
                if self.annotate == "train"
                else torch.arange(graph.num_nodes)
            )
            apart = structure.at_distance(_adjacency(graph), self.hops, starts)
            seed = stream_seed(client.facts.seed, "client", client.name, "members")
            client.memory["at distance"] = [_shuffled(starts, pairs, seed) for pairs in apart]
        found = []
        for centre, member in client.memory["at distance"]:
            counts = self.counting(label, centre, member)
            found.append(
                Around(
                    *_at_most(self.most, centre[counts], member[counts]),
                    label,
                    client.facts.num_classes,
                )
            )
        return found

    def counting(self, label: Tensor, centre: Tensor, member: Tensor) -> Tensor:
        """Which pairs count: the centre has a class, and the member, if only "same" ones do, has it too."""
        return (label[centre] >= 0) & (
            (label[centre] == label[member]) | (self.neighbours == "any")
        )

    def by_similarity(self, label: Tensor, z: Tensor, classes: int) -> list[Around]:
        """N_h for graphs: the nearest in each band of cosines."""
        unit, items = F.normalize(z), len(z)
        every = torch.arange(items)
        pairs: list[list[Tensor]] = [
            [torch.zeros(2, 0, dtype=torch.int64)] for _ in range(self.hops)
        ]
        for rows in (label >= 0).nonzero().flatten().split(CHUNK):
            cosine = unit[rows] @ unit.T
            cosine[
                ~self.counting(label, rows.unsqueeze(1), every) | (rows.unsqueeze(1) == every)
            ] = -torch.inf
            for hop in range(self.hops):
                low, high = (
                    self.t - hop * self.band,
                    torch.inf if hop == 0 else self.t - (hop - 1) * self.band,
                )
                inside = torch.where((cosine >= low) & (cosine < high), cosine, -torch.inf)
                value, place = inside.topk(min(self.nearest, items), 1)
                centre, which = value.isfinite().nonzero().unbind(1)
                pairs[hop].append(torch.stack([rows[centre], place[centre, which]]))
        joined = [torch.cat(found, 1) for found in pairs]
        return [Around(both[0], both[1], label, classes) for both in joined]

    def weights_around(self, client: Client, hop: int, z: Tensor, around: Around) -> Tensor:
        """w_ij of the pairs at a hop."""
        return client.state["attention"](hop, z, around) if self.attention else 1 / around.size

    def prototypes(
        self, client: Client, z: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor, Tensor]:
        """P [C, H+1, p] with a gradient, which entries there are, and how many different items are behind each."""
        label, classes = around.label, client.facts.num_classes
        means, counts = class_means(z, label, label >= 0, classes)
        tables, present, behind = [means], [counts > 0], [counts]
        for hop, at in enumerate(around.hops, 1):
            share = self.weights_around(client, hop, z, at) / at.num_centres[at.of]
            # How much each item has in each class's prototype, [C, items]: one product then serves all pairs.
            tables.append(
                z.new_zeros(classes * len(z)).index_add(0, at.cell, share).view(classes, -1) @ z
            )
            present.append(at.num_centres > 0)
            behind.append(at.num_members)
        return torch.stack(tables, 1), torch.stack(present, 1), torch.stack(behind, 1)

    def alignment(
        self, client: Client, batch: Graph, z: Tensor, table: Tensor, present: Tensor
    ) -> Tensor:
        """Σ ‖P − B‖ over the entries that are on both sides; or, item by item, the mean squares, added over hops."""
        around = self.surroundings(client, batch, z)
        if self.align == "prototype":
            own, there, _ = self.prototypes(client, z, around)
            both = there & present
            return ((own - table)[both].square().sum(-1) + 1e-12).sqrt().sum()
        centres = around.label >= 0
        total = nearness(z[centres], around.label[centres], table[:, 0], present[:, 0])
        for hop, at in enumerate(around.hops, 1):
            v = at.over_members(
                self.weights_around(client, hop, z, at).unsqueeze(1) * z[at.member]
            )[at.centres]
            total = total + nearness(v, around.label[at.centres], table[:, hop], present[:, hop])
        return total

    # ---- the server's side ----
    def far(self, a: Tensor, b: Tensor) -> Tensor:
        """1 − cosine, or Euclidean distance, of the rows of a and b."""
        return (
            super().far(a, b)
            if self.geometry == "euclidean"
            else 1 - F.normalize(a) @ F.normalize(b).T
        )

    def receptive_field(self, at: Tensor, lots: Tensor, classes: int) -> Tensor:
        """Which uploads speak for which (c,h): those told for it and, if there are any, ⌈Δs of as many⌉ of the class's other hops.

        at: [uploads, 2], class and hop of each. lots: [uploads, H+1], random: the lowest are drawn. Gives bool [C, H+1, uploads].
        """
        speaks = torch.zeros(classes, self.depth, len(at), dtype=torch.bool)
        speaks[at[:, 0], at[:, 1], torch.arange(len(at))] = True
        told_for = speaks.clone()
        for c, h in told_for.any(2).nonzero().tolist():
            others = ((at[:, 0] == c) & (at[:, 1] != h)).nonzero().flatten()
            wanted = math.ceil(self.sampling * int(told_for[c, h].sum()))
            speaks[c, h, others[lots[others, h].argsort()[:wanted]]] = True
        return speaks

    def contrast_anchors(
        self, anchors: Tensor, uploads: Tensor, speaks: Tensor, margin: Tensor
    ) -> Tensor:
        """Σ_{c,h} L_ch for anchors [C, H+1, p] under uploads [uploads, p]; speaks: [C, H+1, uploads], margin: [H+1]."""
        near = -self.far(anchors.flatten(0, 1), uploads).view_as(speaks)
        against = speaks.any(0) & ~speaks  # who speaks for another class at the same hop
        true = ((near - margin.view(1, -1, 1)) / self.temperature).masked_fill(~speaks, -torch.inf)
        false = (near / self.temperature).masked_fill(~against, -torch.inf)
        told_of = speaks.any(2)
        true, false = true[told_of].logsumexp(1), false[told_of].logsumexp(1)
        return (torch.logaddexp(true, false) - true).sum()

    def contrast_queries(
        self, anchors: Tensor, uploads: Tensor, speaks: Tensor, margin: Tensor
    ) -> Tensor:
        """FedTGP's contrast at each hop, added up."""
        total = anchors.new_zeros(())
        for hop in range(anchors.shape[1]):
            label, which = speaks[:, hop].nonzero().unbind(1)
            if len(label):
                total = total + self.contrast(anchors[:, hop], uploads[which], label, margin[hop])
        return total

    def anchors(self, server: Server) -> Tensor:
        """G as it stands, [C, H+1, p]."""
        return self.scaled(server.state["anchors"]()).view(server.facts.num_classes, self.depth, -1)

    def learn_universal(self, server: Server, replies: Replies) -> Tensor:
        """G [C, H+1, p] after this round's steps."""
        uploads, at, counts = _gathered(replies)
        classes, width = server.facts.num_classes, server.facts.width
        place = at[:, 0] * self.depth + at[:, 1]
        if self.universal == "mean":
            weight = torch.zeros(classes * self.depth).index_add(0, place, counts.float())
            sums = torch.zeros(classes * self.depth, width).index_add(
                0, place, counts.unsqueeze(1) * uploads
            )
            return (sums / weight.clamp(min=1).unsqueeze(1)).view(classes, self.depth, width)
        means, told_of = class_means(uploads, place, place >= 0, classes * self.depth)
        means, there = (
            means.view(classes, self.depth, width),
            (told_of > 0).view(classes, self.depth),
        )
        margin = torch.stack([self.margin(means[there[:, h], h]) for h in range(self.depth)])
        # A stream for each client: what is drawn does not depend on the order in which they are listed.
        shape = (classes, self.depth, self.depth)
        drawn = {
            client: torch.rand(shape, generator=server.rng(f"receptive field of {client}"))
            for client in replies
        }
        lots = torch.cat([drawn[client][reply["present"]] for client, reply in replies.items()])
        speaks = self.receptive_field(at, lots, classes)
        contrast = self.contrast_anchors if self.direction == "anchor" else self.contrast_queries
        for _ in range(self.server_steps if len(uploads) else 0):
            step(server.state["optimizer"], contrast(self.anchors(server), uploads, speaks, margin))
        return self.anchors(server).detach()

    def personal(self, universal: Tensor, replies: Replies) -> dict[str, Message]:
        """B^i for every client that answered, of the entries that it told of."""
        tables = torch.stack(
            [table_of(reply["prototypes"], reply["present"]) for reply in replies.values()]
        )  # [clients, C, H+1, p]
        present, counts = replies.stack("present"), replies.stack("counts")
        answers = self.alpha * universal.expand_as(tables).clone()
        for c, h in present.any(0).nonzero().tolist():
            who = present[:, c, h].nonzero().flatten()
            own, weight = tables[who, c, h], counts[who, c].float()
            cosine = (F.normalize(own) @ F.normalize(own).T).fill_diagonal_(
                torch.inf
            )  # everybody is its own peer
            peers = cosine >= self.similar
            if self.top_peers:
                nearest = cosine.topk(min(self.top_peers + 1, len(who)), 1).indices
                peers = torch.zeros_like(peers).scatter_(1, nearest, True)
            share = peers * weight
            answers[who, c, h] += (1 - self.alpha) * (share / share.sum(1, keepdim=True)) @ own
        return {
            client: {"prototypes": b[there], "present": there}
            for client, b, there in zip(replies, answers, present, strict=True)
        }

    def run(self, server: Server) -> None:
        """Algorithm 1. Who does not take part keeps the answer to what it told last."""
        server.ask(self.setup)
        state = server.state
        self.begin(server, server.facts.num_classes * self.depth)
        state["answers"] = {}
        for _ in server.rounds(self.rounds):
            replies = server.ask(
                self.train,
                each={client: state["answers"].get(client, {}) for client in server.participants},
            )
            if replies:
                state["answers"] |= self.personal(self.learn_universal(server, replies), replies)
            server.evaluate()


def _gathered(replies: Replies) -> tuple[Tensor, Tensor, Tensor]:
    """All prototypes that came [uploads, p], the class and hop of each [uploads, 2], and the number of centres behind it [uploads]."""
    places = [reply["present"].nonzero() for reply in replies.values()]
    counts = [
        reply["counts"][place[:, 0]] for reply, place in zip(replies.values(), places, strict=True)
    ]
    return (
        torch.cat([reply["prototypes"] for reply in replies.values()]),
        torch.cat(places),
        torch.cat(counts),
    )


def _adjacency(graph: Graph) -> csr_matrix:
    source, target = graph.edge_index.numpy()
    return csr_matrix(
        (torch.ones(graph.num_edges).numpy(), (target, source)),
        shape=(graph.num_nodes, graph.num_nodes),
    )


def _shuffled(starts: Tensor, apart: csr_matrix, seed: int) -> tuple[Tensor, Tensor]:
    """The pairs of a matrix [starts, nodes], centre by centre, each one's members in random order."""
    pairs = apart.tocoo()
    order = torch.randperm(apart.nnz, generator=torch.Generator().manual_seed(seed))
    row, column = (
        torch.from_numpy(pairs.row).long()[order],
        torch.from_numpy(pairs.col).long()[order],
    )
    order = row.argsort(stable=True)
    return starts[row[order]], column[order]


def _at_most(most: int, centre: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """The first pairs of each centre, `most` at most; pairs come centre by centre."""
    counts = torch.bincount(centre)
    kept = torch.arange(len(centre)) - (counts.cumsum(0) - counts)[centre] < most
    return centre[kept], member[kept]
