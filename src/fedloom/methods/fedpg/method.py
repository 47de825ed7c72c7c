"""FedPG: clients share, for each class, how its items look at 0 to H hops. They share no weights.

Wu, Li, Zhu, Li, Wang, Zhou: "Federated Prototype Graph Learning". A topology-aware prototype P[c,h]
is the mean, over the centres of class c, of their neighbourhoods at distance h. The server learns a
universal prototype G[c,h] and mixes it with those of similar clients. Each client may have its own
architecture.

What travels, per client and round (C classes, H hops, p the embedding's width). Nothing else
travels, and absent entries have no vector:
    up    prototypes, present   P^k[c,h], at most C (H + 1) p numbers, and which entries they are
          counts                m^k[c], the number of centres of class c, at least `floor`; 0 if
                                nothing of the class is sent
    down  prototypes, present   B^k[c,h], for the entries that the client sent last time (nothing in
                                its first round)

    P[c,0] = mean_{i in S_c} z_i                                                  `prototypes`
    P[c,h] = mean over i in S_c with neighbours of
             Σ_{j in N_h(i)} w_ij z_j                                    Eq. 1, 2 `prototypes`
    w_ij   = softmax_j LeakyReLU(a_h · [z_i ‖ z_j ‖ mean_j' z_j']);
             a_h belongs to the client and is 0 at first                          `Attention`
    G[c,h] = MLP(u_ch) of length 1; u and the MLP are trained,
             over rounds                                                 Eq. 3    `learn_universal`
    L_ch   = −log E⁺ / (E⁺ + E⁻),  E⁺ = Σ_{S⁺} e^{(cos(G_ch,P) − M_h)/T},
                                   E⁻ = Σ_{S⁻} e^{cos(G_ch,P)/T}         Eq. 4, 7 `contrast_anchors`
    M_h    = min(max_{c≠c'} (1 − cos(Q_ch, Q_c'h)), ε),
             Q_ch the mean of the uploads                                         `margin`
    S⁺     = uploads P[c,h], and ⌈Δs of as many⌉ drawn from the
             class's other hops; S⁻ the same of other classes                     `receptive_field`
    B^i    = α G + (1 − α) Σ_j (m^j[c] / Σ m[c]) P^j,
             over the peers j with cos(P^i, P^j) ≥ λ                     Eq. 5    `personal`
    min CE + μ Σ_{c,h} ‖P[c,h] − B[c,h]‖                                 Eq. 6    `alignment`

Rows of z have length 1 (`unit`), because architectures differ in scale. S_c: training items of
class c (`annotate = "pseudo"`: also those of which the client's own model is sure, found anew each
round). N_h(i): items at distance exactly h; those annotated with i's class count. In a graph task,
items have no edges. There, N_h(i) are the nearest graphs whose embeddings' cosine lies within a
band: from t up for h = 1, then bands of width `band`. A training step looks only at its batch.

Ablations as settings: no RF context `sampling = 0`, no margin `margin_cap = 0`, no personalisation
`alpha = 1`, `hops = 0`, `attention = false`. With hops = 0, alpha = 1, sampling = 0, geometry =
"euclidean", direction = "query", align = "item" and unit = false it is FedTGP. With universal =
"mean" in addition it is FedProto, as long as all clients take part (here, a client that was absent
is pulled to the answer to its last upload; there, to the result of the last round) and floor = 1.
With universal = "mean", sampling, margin and temperature have no effect; with direction = "query",
the temperature has none.

Privacy: the server compares the clients' prototypes, so it sees all of them: no secure sums.
`floor` keeps prototypes at the client that fewer different items contribute to (a prototype of one
item is that item's embedding). It checks each entry by itself and guarantees nothing: a hub
dominates its class's P[c,1], and a party that knows the edges can separate P[c,0] and P[c,1] and
solve for single items. `noise` disturbs a share of the coordinates, other ones in each round, so
rounds can be compared with each other. Clients learn about each other through B: with alpha = 0 and
a single peer, that peer's prototype up to its count; without a peer, G itself.

Departures: as printed, Eq. 1's attention is of another kind (over layers) and divides twice. Eq. 4
and 7 disagree, and add the margin where it makes the task easier. They are read as FedTGP's, whose
margin counts against the true class. The authors' code differs from the paper (1- and 2-hop means
of nodes 0 and 1, validation labels in S_c, zero vectors for absent classes, a margin that is
numerically 0, peers' means shrunk to a third): the paper is followed. `align = "item"` pulls single
items, as FedProto and the authors' code do, averaged over items instead of within classes. The
paper sends all prototypes (floor = 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.methods._shared.prototypes import class_means, pack_table, table_of
from fedloom.methods.fedpg.neighbourhoods import first_of_each, pairs_by_distance
from fedloom.methods.fedproto import nearness
from fedloom.methods.fedtgp import FedTGP
from fedloom.nn.prototypes import (
    Attention,
    Neighbourhoods,
    Neighbours,
    neighbour_weights,
    neighbourhood_prototypes,
    table_distance,
)
from fedloom.nn.training import make_optimizer, step

CHUNK = 1024  # rows of similarities between graphs that are computed at once


@dataclass(frozen=True)
class FedPG(FedTGP):
    """FedTGP with topology-aware prototypes and a personal answer for each client."""

    hops: int = setting(2, "H, the farthest hop that has prototypes", at_least=0, tune="0..3")
    pull: float = setting(0.5, "μ, weight of the alignment", at_least=0, tune="0.1..10")
    unit: bool = setting(True, "scale embeddings and universal prototypes to length 1")
    margin_cap: float = setting(
        0.5, "ε, the largest margin M (0 = without)", at_least=0, tune="0.1..1"
    )
    alpha: float = setting(
        0.5,
        "α, share of the universal prototype in a client's answer (1 = not personal)",
        at_least=0,
        at_most=1,
        tune="0..1",
    )
    similar: float = setting(
        0.8, "λ, cosine from which another client is a peer", at_least=-1, tune="0.5..0.95"
    )
    top_peers: int = setting(
        0, "number of most similar clients that are peers, instead of λ (0 = λ decides)", at_least=0
    )
    sampling: float = setting(
        0.5,
        "Δs, prototypes from other hops per prototype of the own hop",
        at_least=0,
        at_most=1,
        tune="0,0.25,0.5,0.75,1",
    )
    temperature: float = setting(1.0, "T of the contrast", above=0, tune="0.1..1")
    attention: bool = setting(True, "weight neighbours by attention (false: equally)")
    annotate: str = setting(
        "train",
        "items with a class: training items, or also those of which the model is sure",
        choices=("train", "pseudo"),
    )
    sure: float = setting(
        0.9, "pseudo: probability from which the model is sure", at_least=0, at_most=1
    )
    neighbours: str = setting(
        "same",
        "neighbours that count: those annotated with the centre's class, or any",
        choices=("same", "any"),
    )
    most: int = setting(
        64,
        "the most neighbours of a node at a hop, drawn if there are more",
        at_least=1,
        task="node",
    )
    align: str = setting(
        "prototype",
        "what is pulled: the client's prototypes (Eq. 6), or each item",
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
        0.1, "decrease of the cosine with each further hop", above=0, task="graph"
    )
    nearest: int = setting(10, "the most neighbours of a graph at a hop", at_least=1, task="graph")

    discloses_to_peers: ClassVar[str] = (
        "B, a mix of G and the prototypes of similar clients; of a single client, if there is one "
        "peer and alpha = 0"
    )
    needs_of_model: ClassVar[str] = "embeddings"

    @property
    def depth(self) -> int:
        """H + 1, the number of prototypes of a class."""
        return self.hops + 1

    # ---- a client's side ----
    @phase()
    def setup(self, client: Client) -> Message:
        """As in FedProto. The attention is trained with the model and never sent."""
        super().setup(client)
        state, model = client.state, client.state["model"]
        attention = Attention(self.hops if self.attention else 0, model.width)
        # What a centre adds to all its scores cancels, up to rounding errors. Adam would scale them
        # up to full steps without this ε.
        groups: list[dict[str, Any]] = [
            {"params": list(model.parameters())},
            {"params": list(attention.parameters()), "eps": 1e-5},
        ]
        state["attention"] = attention
        state["optimizer"] = make_optimizer(self.optimizer, groups, self.lr, self.weight_decay)
        state["annotation"] = client.graph.y.clone()  # -1 except for training items
        return {}

    @phase(
        prototypes="float32[*present,p]",
        present="bool[C,depth]",
        counts="int64[C] in 0..nodes",
    )
    def train(
        self, client: Client, prototypes: Tensor | None = None, present: Tensor | None = None
    ) -> Message:
        """E local epochs, towards B if there is one. Answers P of embeddings without dropout."""
        self.follow(client, prototypes, present)
        z = self.embeddings(client)
        if self.annotate == "pseudo":
            client.state["annotation"] = self.pseudo_labels(client)
        around = self.neighbourhoods(client, client.graph, z)
        with torch.no_grad():
            table = self.prototypes(client, z, around)
        sent = pack_table(
            self.disturbed(client, table), around.present, self.floor, around.num_items
        )
        # A class whose own mean is not sent may still be sent at other hops. It then counts as if
        # it had just enough items.
        return {**sent, "counts": around.centres.clamp(min=self.floor) * sent["present"].any(1)}

    @torch.no_grad()
    def pseudo_labels(self, client: Client) -> Tensor:
        """Returns the classes of training items and those of which the model is sure, else -1."""
        graph = client.graph
        probability, guess = client.state["model"](graph).softmax(1).max(1)
        return torch.where(graph.train, graph.y, torch.where(probability >= self.sure, guess, -1))

    def disturbed(self, client: Client, table: Tensor) -> Tensor:
        """Returns the table with noise on a share of each prototype's coordinates.

        The noise has the standard deviation of the prototype's coordinates. The coordinates are
        drawn anew each time.
        """
        count = round(self.noise * table.shape[-1])
        if not count:
            return table
        rng = client.rng("noise")
        chosen = torch.rand(table.shape, generator=rng).argsort(-1) < count
        noise = torch.randn(table.shape, generator=rng)
        return table + chosen * noise * table.std(-1, keepdim=True)

    def neighbourhoods(self, client: Client, batch: Graph, z: Tensor) -> Neighbourhoods:
        """Returns the classes of a batch's items, and N_h of those that have one."""
        if batch.task == "graph":
            label = torch.where(batch.train, batch.y, -1)
            if batch is client.graph:
                label = client.state["annotation"]
            by_cosine = self.by_similarity(label, z.detach(), client.facts.num_classes)
            return Neighbourhoods(label, by_cosine, client.facts.num_classes)
        label, known = client.state["annotation"], client.memory.get("neighbourhoods")
        # They are computed once with `annotate = "train"`, else once per round.
        if known is None or known.label is not label:
            client.memory["neighbourhoods"] = known = Neighbourhoods(
                label, self.by_edges(client, label), client.facts.num_classes
            )
        return known

    def by_edges(self, client: Client, label: Tensor) -> list[Neighbours]:
        """Returns N_h of every item that has a class, h = 1 ... H, from the graph's edges."""
        if "at distance" not in client.memory:
            graph = client.graph
            starts = torch.arange(graph.num_nodes)
            if self.annotate == "train":
                starts = graph.train.nonzero().flatten()
            seed = stream_seed(client.facts.seed, "client", client.name, "members")
            client.memory["at distance"] = pairs_by_distance(graph, self.hops, starts, seed)
        found = []
        for centre, member in client.memory["at distance"]:
            counts = self.counting(label, centre, member)
            centre, member = first_of_each(self.most, centre[counts], member[counts])
            found.append(Neighbours(centre, member, label, client.facts.num_classes))
        return found

    def counting(self, label: Tensor, centre: Tensor, member: Tensor) -> Tensor:
        """Returns which pairs count.

        The centre must have a class. With `neighbours = "same"`, the member must have it too.
        """
        same = label[centre] == label[member]
        return (label[centre] >= 0) & (same | (self.neighbours == "any"))

    def by_similarity(self, label: Tensor, z: Tensor, classes: int) -> list[Neighbours]:
        """Returns N_h for graphs: the nearest in each band of cosines."""
        unit, items = F.normalize(z), len(z)
        every = torch.arange(items)
        pairs: list[list[Tensor]] = [
            [torch.zeros(2, 0, dtype=torch.int64)] for _ in range(self.hops)
        ]
        for rows in (label >= 0).nonzero().flatten().split(CHUNK):
            centres = rows.unsqueeze(1)
            cosine = unit[rows] @ unit.T
            cosine[~self.counting(label, centres, every) | (centres == every)] = -torch.inf
            for hop in range(self.hops):
                low = self.t - hop * self.band
                high = torch.inf if hop == 0 else self.t - (hop - 1) * self.band
                inside = torch.where((cosine >= low) & (cosine < high), cosine, -torch.inf)
                value, place = inside.topk(min(self.nearest, items), 1)
                centre, which = value.isfinite().nonzero().unbind(1)
                pairs[hop].append(torch.stack([rows[centre], place[centre, which]]))
        joined = [torch.cat(found, 1) for found in pairs]
        return [Neighbours(both[0], both[1], label, classes) for both in joined]

    def alignment(
        self, client: Client, batch: Graph, z: Tensor, table: Tensor, present: Tensor
    ) -> Tensor:
        """Returns Σ ‖P − B‖ over the entries that both have (Eq. 6).

        With `align = "item"`, it is the mean square distance of items, summed over hops.
        """
        around = self.neighbourhoods(client, batch, z)
        if self.align == "prototype":
            own = self.prototypes(client, z, around)
            return table_distance(own, table, around.present & present)
        centres = around.label >= 0
        total = nearness(z[centres], around.label[centres], table[:, 0], present[:, 0])
        for hop, at in enumerate(around.hops, 1):
            weight = neighbour_weights(self.attention_of(client), hop, z, at).unsqueeze(1)
            v = at.over_members(weight * z[at.member])[at.centres]
            total = total + nearness(v, around.label[at.centres], table[:, hop], present[:, hop])
        return total

    def prototypes(self, client: Client, z: Tensor, around: Neighbourhoods) -> Tensor:
        """Returns P with a gradient, [C, H+1, p]."""
        return neighbourhood_prototypes(z, around, self.attention_of(client))

    def attention_of(self, client: Client) -> Attention | None:
        """Returns the client's attention, if there is one."""
        return client.state["attention"] if self.attention else None

    # ---- the server's side ----
    def far(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns 1 − cosine, or the Euclidean distance, of the rows of a and b."""
        return self.far_from(b)(a)

    def far_from(self, b: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns the function a ↦ `far(a, b)`, which computes what depends on b once."""
        if self.geometry == "euclidean":
            return lambda a: super(FedPG, self).far(a, b)
        unit = F.normalize(b)
        return lambda a: 1 - F.normalize(a) @ unit.T

    def receptive_field(self, at: Tensor, lots: Tensor, classes: int) -> Tensor:
        """Returns S⁺ of every (c,h) as bool [C, H+1, uploads].

        These are the uploads P[c,h] and, if there are any, ⌈Δs of as many⌉ of the class's other
        hops.

        Args:
            at: The class and hop of each upload, [uploads, 2].
            lots: Random numbers, [uploads, H+1]. The uploads with the lowest are drawn.
            classes: C.
        """
        of_class, of_hop = at.unbind(1)
        same_class = of_class == torch.arange(classes).unsqueeze(1)
        same_hop = of_hop == torch.arange(self.depth).unsqueeze(1)
        own_hop = same_class.unsqueeze(1) & same_hop
        others = same_class.unsqueeze(1) & ~same_hop
        wanted = (self.sampling * own_hop.sum(2, keepdim=True).double()).ceil()
        place = lots.T.masked_fill(~others, torch.inf).argsort(2).argsort(2)
        return own_hop | (others & (place < wanted))

    def contrast_anchors(
        self, uploads: Tensor, positive: Tensor, margin: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Returns the function G ↦ Σ_{c,h} L_ch (Eq. 4, 7). G is [C, H+1, p].

        Args:
            uploads: The prototypes of all clients, [uploads, p].
            positive: S⁺, [C, H+1, uploads].
            margin: M, [H+1].
        """
        negative = positive.any(0) & ~positive  # S⁻: of another class at the same hop
        uploaded = positive.any(2).flatten().nonzero().flatten()
        not_positive, not_negative = ~positive, ~negative
        far, margin = self.far_from(uploads), margin.view(1, -1, 1)

        def loss(anchors: Tensor) -> Tensor:
            near = -far(anchors.flatten(0, 1)).view_as(positive)
            shifted = (near - margin) / self.temperature
            true = shifted.masked_fill(not_positive, -torch.inf)
            false = (near / self.temperature).masked_fill(not_negative, -torch.inf)
            true, false = (
                each.flatten(0, 1).index_select(0, uploaded).logsumexp(1) for each in (true, false)
            )
            return (torch.logaddexp(true, false) - true).sum()

        return loss

    def contrast_queries(
        self, uploads: Tensor, positive: Tensor, margin: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Returns FedTGP's contrast, summed over hops, as `contrast_anchors` does."""
        found = [positive[:, hop].nonzero().unbind(1) for hop in range(positive.shape[1])]

        def loss(anchors: Tensor) -> Tensor:
            total = anchors.new_zeros(())
            for hop, (label, which) in enumerate(found):
                if len(label):
                    own = self.contrast(anchors[:, hop], uploads[which], label, margin[hop])
                    total = total + own
            return total

        return loss

    def anchors(self, server: Server) -> Tensor:
        """Returns the current G, [C, H+1, p]."""
        return self.scaled(server.state["anchors"]()).view(server.facts.num_classes, self.depth, -1)

    def learn_universal(self, server: Server, replies: Replies) -> Tensor:
        """Trains G on this round's uploads and returns it, [C, H+1, p] (Eq. 3)."""
        uploads, at, counts = _gathered(replies)
        classes, width = server.facts.num_classes, server.facts.width
        place = at[:, 0] * self.depth + at[:, 1]
        if self.universal == "mean":
            weight = torch.zeros(classes * self.depth).index_add(0, place, counts.float())
            weighted = counts.unsqueeze(1) * uploads
            sums = torch.zeros(classes * self.depth, width).index_add(0, place, weighted)
            return (sums / weight.clamp(min=1).unsqueeze(1)).view(classes, self.depth, width)
        flat, number = class_means(uploads, place, place >= 0, classes * self.depth)
        means = flat.view(classes, self.depth, width)
        there = (number > 0).view(classes, self.depth)
        margin = torch.stack([self.margin(means[there[:, h], h]) for h in range(self.depth)])
        # With a stream for each client, draws do not depend on the order of the clients.
        shape = (classes, self.depth, self.depth)
        drawn = {
            client: torch.rand(shape, generator=server.rng(f"receptive field of {client}"))
            for client in replies
        }
        lots = torch.cat([drawn[client][reply["present"]] for client, reply in replies.items()])
        positive = self.receptive_field(at, lots, classes)
        contrast = self.contrast_anchors if self.direction == "anchor" else self.contrast_queries
        loss = contrast(uploads, positive, margin)
        for _ in range(self.server_steps if len(uploads) else 0):
            step(server.state["optimizer"], loss(self.anchors(server)))
        return self.anchors(server).detach()

    def personal(self, universal: Tensor, replies: Replies) -> dict[str, Message]:
        """Returns B^i for every client that answered, for the entries that it sent (Eq. 5)."""
        # [clients, C, H+1, p]
        tables = torch.stack(
            [table_of(reply["prototypes"], reply["present"]) for reply in replies.values()]
        )
        present, counts = replies.stack("present"), replies.stack("counts")
        answers = self.alpha * universal.expand_as(tables).clone()
        for c, h in present.any(0).nonzero().tolist():
            who = present[:, c, h].nonzero().flatten()
            own, weight = tables[who, c, h], counts[who, c].float()
            unit = F.normalize(own)
            cosine = unit @ unit.T
            cosine.fill_diagonal_(torch.inf)  # every client is its own peer
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
        """Algorithm 1. A client that does not take part keeps the answer to its last upload."""
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
    """Returns all uploads: prototypes [uploads, p], their class and hop [uploads, 2].

    The third value is the number of centres of each, [uploads].
    """
    places = [reply["present"].nonzero() for reply in replies.values()]
    counts = [
        reply["counts"][place[:, 0]] for reply, place in zip(replies.values(), places, strict=True)
    ]
    return (
        torch.cat([reply["prototypes"] for reply in replies.values()]),
        torch.cat(places),
        torch.cat(counts),
    )
