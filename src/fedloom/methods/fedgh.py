"""FedGH: clients send stand-ins of their graphs, the server embeds all of them alike, and each refines its graph; then any method trains.

Zhuang et al.: "Prior Refinement is Better: Diffusion-Driven Graph Harmonization for Federated Graph Learning", AAAI 2026, Algorithm 1.

What travels, per client, once, before the method `base` begins:
    up    features, edges        X̂ [n_k, d] and the pairs i < j of Â: a pseudo-graph with a row for each of the client's nodes
    down  embeddings             H̃ [n_k, d̃], to the client that the rows belong to

    μ, log σ = VGAE's encoder (X, A); H = μ + σ ⊙ η; X̂ = MLP(H); Â = sigmoid(H Hᵀ)               `VGAE`
    L_vgae = BCE over edges and as many other pairs + λ_x rec(X, X̂) + γ KL / n                   `fit_vgae`         Eq. 5-7
    h_t = √ᾱ_t h_0 + √(1 − ᾱ_t) ε, h_0 = μ standardised                                          `Schedule.noised`  Eq. 8
    L_diff = ‖ε − ε_θ(h_t, r, t)‖²,  r = F_ω(h_0 + η), η ~ N(0, σ_c²)                            `Denoiser`, `diffusion_loss`  Eq. 9, 10
    from h_T ~ N(0, I):  h ← (h − β_t ε_θ / √(1 − ᾱ_t)) / √α_t + √β_t z                          `reverse`
    h̃ = PReLU(S X̂ W + b), s_k = sigmoid(mean h̃^k), D(h, s) = sigmoid(hᵀ B s)                     `Contrast`         Eq. 11
    L_con = Σ_k −1/(2 n_k K) Σ_i Σ_j [log D(h̃_i^k, s_j) + log(1 − D(h̃'_i^k, s_j))]               `contrast_loss`    Eq. 12
    Ã = A and edges to each node's k most similar, and to those above τ; X̃ = [X ‖ H̃]            `refined`          Eq. 13-15

Row i of a pseudo-graph stands for node i only through r_i, and is as private as the noise in it: see `fedloom.privacy.leakage`.

Departures. Eq. 7 prints the ELBO, which is to be maximised; its negative is minimised here. Eq. 8-10 lose the bars of ᾱ. h_0 is μ, not a
draw. Alg. 1 samples in every step of the diffusion's training; once after it is enough. Encoders see features less their mean, in rows of
one length on average, and real-valued ones are decoded in units of their deviation: with Adam, whose steps are of one size, an encoder of
features as small as PubMed's, or as many as Photo's, learns nothing. A reverse step that aims beyond the range of the client's latents is
held there: else a few in a hundred rows drift far away. The VGAE does not stop early. Â keeps each node's links to the ⌈|E_k| / n_k⌉ others
with the largest cosine (so about |E_k|): by h_i · h_j, as the decoder has it, nodes with long h would take most of them. f and D are the
same for all clients: embeddings of encoders that each client has for itself do not fit one model (`encoder_per_client`). H̃' is made of
permuted rows of X̂, as in DGI: permuting H̃, as the text says, leaves the same vectors on both sides and nothing to learn. Rows of H̃ are
taken from their mean and have one length, a quarter of the features': longer, they drown features that matter more. A client whose
pseudo-graph is missing gets zeros and no edges. `embedding_width` = 0 leaves `base` alone.

`refine_by` and `diffused` hold the controls: what H̃ would be without this method. "pseudo-graph" is the paper's "w/o CL": it is
trained and evaluated on. VGAEs, and the control's DGI, start from the same weights at all clients, which costs no traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import DTYPES, Message
from fedloom.core.method import Plugin
from fedloom.core.phase import Computed, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.errors import ConfigError, MessageError
from fedloom.nn.build import build_model
from fedloom.nn.model import Model
from fedloom.nn.nearest import above, linked_to_nearest, other_pairs, pairs
from fedloom.nn.training import make_optimizer, seeded, step

HIDDEN = 128  # of the feature decoder
DENOISER, CONDITION, TIME = (
    256,
    64,
    64,
)  # widths of the denoiser's layers, of r, and of what it is told of t
LENGTH = 4.0  # of a row of features as encoders see it: Adam's steps are of one size, whatever the features
RAREST = 20.0  # weight of a one in bag-of-words features, at most
MOST_EDGES = 100  # a node, that similarity above τ may add on average
SHOWN_CLIENTS, SHOWN_NODES, SHOWN_LINKS = (
    4,
    300,
    4000,
)  # in pictures: whose graphs, and how much of each at most
NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)

Step = Callable[[], Tensor]


def bare(x: Tensor, edges: Tensor) -> Graph:
    """A graph without labels. edges: pairs i < j."""
    return Graph(
        x=x,
        edge_index=torch.cat([edges, edges.flip(0)], 1),
        y=torch.full((len(x),), -1),
        num_classes=1,
    )


def minimise(
    parameters: Sequence[Tensor], loss: Step, lr: float, epochs: int, patience: int = 0
) -> None:
    """Adam on `loss()`; stops after `patience` steps without a lower value (0 = never)."""
    optimizer, best, since = make_optimizer("adam", parameters, lr, 0.0), float("inf"), 0
    for _ in range(epochs):
        value = loss()
        step(optimizer, value)
        best, since = (value.item(), 0) if value < best else (best, since + 1)
        if patience and since >= patience:
            break


# ---- client: a variational autoencoder of the graph ----
class VGAE(nn.Module):
    """Encoder to the mean and the logarithm of the deviation of every node's latent, [n, q] each; decoder of features, in their units."""

    def __init__(self, encoder: Model, width: int, num_features: int):
        super().__init__()
        self.encoder = encoder
        self.decoder = nn.Sequential(
            nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_features)
        )

    def forward(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """μ and log σ."""
        mu, log_sigma = self.encoder(graph).chunk(2, 1)
        return mu, log_sigma.clamp(
            max=10.0
        )  # its exponential must stay finite, whatever the features


def levelled(xs: Sequence[Tensor]) -> list[Tensor]:
    """Features less their mean over all rows, scaled to rows that are `LENGTH` long on average."""
    centre = torch.cat(list(xs)).mean(0)
    xs = [x - centre for x in xs]
    length = torch.cat([x.norm(dim=1) for x in xs]).mean()
    return [x * (LENGTH / length if length > 1e-12 else 1.0) for x in xs]


def is_bag_of_words(x: Tensor) -> bool:
    """Whether all features are 0 or 1."""
    return bool(((x == 0) | (x == 1)).all())


def units(x: Tensor) -> tuple[Tensor, Tensor]:
    """What a decoder's output of real-valued features counts from, [d], and in: their means, and how far they are from these."""
    scale = (x - x.mean(0)).square().mean().sqrt()
    return x.mean(0), scale.where(scale > 1e-12, 1.0)


def reconstruction(x: Tensor) -> Callable[[Tensor], Tensor]:
    """How far a decoder's output [n, d] is from x: cross-entropy for 0/1 features, where a one weighs more; else squares in `units`."""
    if is_bag_of_words(x):
        ones = x.sum()
        weight = ((x.numel() - ones) / ones.clamp(min=1)).clamp(max=RAREST)
        return lambda out: F.binary_cross_entropy_with_logits(out, x, pos_weight=weight)
    centre, scale = units(x)
    return lambda out: F.mse_loss(out, (x - centre) / scale)


def edge_loss(H: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """BCE of sigmoid(h_i · h_j) over pairs that are edges and pairs that are not, each kind's mean counting half."""
    terms = [
        F.softplus(sign * (H[i] * H[j]).sum(1)).mean()
        for (i, j), sign in ((edges, -1), (others, 1))
        if len(i)
    ]
    return sum(terms, torch.zeros(())) / 2


def divergence(mu: Tensor, log_sigma: Tensor) -> Tensor:
    """KL of N(μ, σ²) to N(0, 1): summed over dimensions, mean over nodes, over n."""
    return -0.5 * (1 + 2 * log_sigma - mu**2 - (2 * log_sigma).exp()).sum(1).mean() / len(mu)


# ---- client: diffusion of the latents ----
class Schedule:
    """β_1 ... β_T in equal steps, α = 1 − β, ᾱ_t = Π α. Index t counts from 1."""

    def __init__(self, steps: int, first: float, last: float):
        # In double precision: 1 − ᾱ_1 may be very small.
        self.beta = torch.cat(
            [
                torch.zeros(1, dtype=torch.float64),
                torch.linspace(first, last, steps, dtype=torch.float64),
            ]
        )
        self.alpha = 1 - self.beta
        self.alpha_bar = self.alpha.cumprod(0)
        self.steps = steps

    def noised(self, h: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """h_t of the rows of h [n, q] at their own times t [n]."""
        kept = self.alpha_bar[t].unsqueeze(1)
        return kept.sqrt().float() * h + (1 - kept).sqrt().float() * noise


def reverse(
    h: Tensor, predict: Callable[[Tensor, int], Tensor], schedule: Schedule, rng: Generator | None, low: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """From h_T [n, q] back to h_0. predict(h, t): the noise in h. Without `rng` no noise is added on the way.

    low, high: what h_0 is known to lie between, [q]; a step that aims beyond is held there.
    """
    for t in range(schedule.steps, 0, -1):
        beta, kept = float(schedule.beta[t]), float(schedule.alpha_bar[t])
        noise = predict(h, t)
        if low is not None:
            aim = ((h - (1 - kept) ** 0.5 * noise) / kept**0.5).clamp(low, high)
            noise = (h - kept**0.5 * aim) / (1 - kept) ** 0.5
        h = (h - beta / (1 - kept) ** 0.5 * noise) / (1 - beta) ** 0.5
        if rng is not None and t > 1:
            h = h + beta**0.5 * torch.randn(h.shape, generator=rng)
    return h


def time_embedding(t: Tensor) -> Tensor:
    """Sines and cosines of t [n] at 32 frequencies, [n, TIME]."""
    frequency = torch.exp(torch.linspace(0, -9.2, TIME // 2))
    angle = t.unsqueeze(1) * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


class Denoiser(nn.Module):
    """ε_θ(h_t, r, t), and F_ω, which makes r. `condition` = False: r is 0, and nothing ties a row to its node."""

    def __init__(self, width: int, condition: bool, noise: float):
        super().__init__()
        self.condition, self.noise = condition, noise
        self.regulator = nn.Sequential(
            nn.Linear(width, CONDITION), nn.SiLU(), nn.Linear(CONDITION, CONDITION)
        )
        self.layers = nn.Sequential(
            nn.Linear(width + CONDITION + TIME, DENOISER), nn.SiLU(), nn.Linear(DENOISER, DENOISER), nn.SiLU(), nn.Linear(DENOISER, width)
        )  # fmt: skip

    def forward(self, h: Tensor, h_0: Tensor, t: Tensor, rng: Generator) -> Tensor:
        """The noise in h [n, q] at times t [n]; h_0 is seen through fresh noise alone."""
        r = h.new_zeros(len(h), CONDITION)
        if self.condition:
            r = self.regulator(h_0 + self.noise * torch.randn(h_0.shape, generator=rng))
        return self.layers(torch.cat([h, r, time_embedding(t)], 1))


def diffusion_loss(model: Denoiser, h_0: Tensor, schedule: Schedule, rng: Generator) -> Tensor:
    """The mean square of ε − ε_θ, every row at a random time."""
    t = torch.randint(1, schedule.steps + 1, (len(h_0),), generator=rng)
    noise = torch.randn(h_0.shape, generator=rng)
    return F.mse_loss(model(schedule.noised(h_0, t, noise), h_0, t, rng), noise)


# ---- server (and the control without one): contrast ----
class Contrast(nn.Module):
    """DGI's encoder, one or one for each client, and its bilinear discriminator."""

    def __init__(self, num_features: int, width: int, encoders: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(encoders, num_features, width))
        self.bias = nn.Parameter(torch.zeros(encoders, width))
        self.slope = nn.Parameter(torch.full((encoders,), 0.25))
        self.bilinear = nn.Parameter(torch.empty(width, width))
        for matrix in (*self.weight, self.bilinear):
            nn.init.xavier_uniform_(matrix)

    def project(self, graphs: Sequence[Graph]) -> list[Tensor]:
        """X̂ W of every graph; the one encoder's work on all of them, or each one's own."""
        return [graph.project(self.weight[k % len(self.weight)]) for k, graph in enumerate(graphs)]

    def encode(self, graphs: Sequence[Graph], projected: Sequence[Tensor]) -> list[Tensor]:
        """PReLU(S X̂ W + b)."""
        e = [k % len(self.bias) for k in range(len(graphs))]
        return [
            F.prelu(g.propagate(h) + self.bias[k], self.slope[k])
            for k, g, h in zip(e, graphs, projected, strict=True)
        ]


def summaries(embedded: Sequence[Tensor]) -> Tensor:
    """s_k [K, d̃]."""
    return torch.stack([h.mean(0) for h in embedded]).sigmoid()


def contrast_loss(
    bilinear: Tensor, embedded: Sequence[Tensor], corrupted: Sequence[Tensor]
) -> list[Tensor]:
    """Each client's L_con: how badly D tells its nodes from corrupted ones, beside the summaries of all clients."""
    sides = bilinear @ summaries(embedded).T
    return [
        (F.softplus(-(h @ sides)).mean() + F.softplus(c @ sides).mean()) / 2
        for h, c in zip(embedded, corrupted, strict=True)
    ]


def harmonise(
    graphs: Sequence[Graph],
    model: Contrast,
    rngs: Sequence[Generator],
    lr: float,
    epochs: int,
    patience: int,
) -> list[Tensor]:
    """Fits encoder and discriminator to graphs, gives the embeddings of each. rngs: of each graph, for corrupting it."""
    graphs = [
        replace(graph, x=x)
        for graph, x in zip(graphs, levelled([graph.x for graph in graphs]), strict=True)
    ]

    def loss() -> Tensor:
        projected = model.project(graphs)
        # Permuted rows of X̂ times W are permuted rows of X̂ W: the wide product is made once.
        mixed = [
            h[torch.randperm(len(h), generator=rng)] for h, rng in zip(projected, rngs, strict=True)
        ]
        return sum(
            contrast_loss(
                model.bilinear, model.encode(graphs, projected), model.encode(graphs, mixed)
            ),
            torch.zeros(()),
        )

    minimise(list(model.parameters()), loss, lr, epochs, patience)
    with torch.no_grad():
        return model.encode(graphs, model.project(graphs))


# ---- client: refinement ----
def directions(H: Tensor) -> Tensor:
    """Rows of H less their mean (what all nodes have in common says nothing of any), of unit length; 0 where only rounding is left."""
    apart = H - H.mean(0)
    length = apart.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-5 * H.norm(dim=1).max(), apart / length.clamp(min=1e-30), 0.0)


def refined(graph: Graph, H: Tensor, scale: float, count: int, threshold: float) -> Graph:
    """The graph with edges between similar rows of H [n, d̃], each node's `count` and all above `threshold`; H as further features.

    scale: how long a row of these is, in lengths of an average row of the graph's own features (1, if all of these are 0); 0 = none.
    """
    n, unit = graph.num_nodes, directions(H)
    some = (unit != 0).any(1).nonzero().flatten()  # a row of zeros is like nobody
    near = [linked_to_nearest(unit[some], count) if count else NO_EDGES]
    if threshold < 1:
        try:
            near.append(above(unit[some], threshold, MOST_EDGES * n))
        except ConfigError as error:
            raise ConfigError(f"method.add_above: {error}") from error
    found = pairs(some[torch.cat(near, 1)], n)
    old = pairs(graph.edge_index, n)
    found = found[:, ~torch.isin(found[0] * n + found[1], old[0] * n + old[1])]
    weight = graph.edge_weight
    if weight is not None:
        weight = torch.cat([weight, torch.ones(2 * found.shape[1])])
    edges = torch.cat([graph.edge_index, found, found.flip(0)], 1)
    length = graph.x.norm(dim=1).mean()
    x = torch.cat([graph.x, scale * length.where(length > 0, 1.0) * unit], 1) if scale else graph.x
    return replace(graph, x=x, edge_index=edges, edge_weight=weight)


# ---- pictures ----
def neighbourhood(links: Tensor, n: int, most: int) -> Tensor:
    """At most so many of n nodes, in an order of which every beginning is mostly connected: breadth-first from those with most links."""
    ends = torch.cat([links, links.flip(0)], 1).numpy()
    adjacency = csr_matrix((np.ones(ends.shape[1], np.int8), (ends[0], ends[1])), shape=(n, n))
    found, seen = [np.zeros(0, np.int64)], np.zeros(n, bool)
    for start in np.argsort(-np.diff(adjacency.indptr), kind="stable"):
        if seen.sum() >= most:
            break
        if not seen[start]:
            found.append(
                breadth_first_order(adjacency, start, directed=False, return_predecessors=False)
            )
            seen[found[-1]] = True
    return torch.from_numpy(np.concatenate(found)[:most].astype(np.int64))


def between(links: Tensor, nodes: Tensor, n: int) -> Tensor:
    """Those of the links [2, any] of n nodes that join two of the given ones, as pairs of places in `nodes`."""
    place = torch.full((n,), -1, dtype=torch.int32)
    place[nodes] = torch.arange(len(nodes), dtype=torch.int32)
    ends = place[links]
    return ends[:, (ends >= 0).all(0)]


def room(links: Sequence[Tensor], nodes: int, most: int) -> int:
    """Of so many nodes, how many of the first ones have at most so many links among them, in each of several graphs."""
    while any(int((ends.amax(0) < nodes).sum()) > most for ends in links):
        nodes = nodes * 3 // 4
    return nodes


@dataclass(frozen=True)
class FedGH(Plugin):
    """Refines every client's graph before the base method."""

    refine_by: str = setting(
        "server", "what H̃ is: the server's embeddings of pseudo-graphs, or a control: DGI on the client's own graph, its VGAE's latents, "
        "noise; or training on the pseudo-graphs themselves", choices=("server", "local", "latents", "noise", "pseudo-graph"),
    )  # fmt: skip
    vgae: str = setting("gcn-2x128", "architecture of the VGAE's encoder")
    latent_width: int = setting(64, "q, width of the latents", at_least=1)
    vgae_epochs: int = setting(200, "steps of the VGAE's training", at_least=1)
    vgae_lr: float = setting(0.01, "its learning rate", above=0, tune="0.001..0.1")
    feature_loss: float = setting(
        1.0, "λ_x, weight of the features' reconstruction", at_least=0, tune="0.1..10"
    )
    kl_weight: float = setting(
        1.0, "γ, weight of the KL term (0 = the paper's w/o KL)", at_least=0, tune="0.001..10"
    )
    diffused: bool = setting(
        True, "pseudo-graphs are decoded from diffused latents; false: from the latents themselves"
    )
    diffusion_steps: int = setting(100, "T", at_least=1)
    first_beta: float = setting(0.001, "β_1", above=0, below=1)
    last_beta: float = setting(0.2, "β_T", above=0, below=1)
    regulated: bool = setting(True, "the client-aware condition r (false = the paper's w/o C)")
    regulator_noise: float = setting(
        1.0, "σ_c, noise through which r sees a node's latent", at_least=0
    )
    diffusion_epochs: int = setting(500, "steps of the diffusion's training", at_least=1)
    diffusion_lr: float = setting(0.001, "its learning rate", above=0, tune="1e-4..0.01")
    diffusion_rows: int = setting(1024, "nodes in one of these steps", at_least=1)
    embedding_width: int = setting(64, "d̃, width of H̃ (0 = nothing is refined)", at_least=0)
    contrast_epochs: int = setting(300, "steps of the contrastive learning", at_least=1)
    contrast_lr: float = setting(0.001, "its learning rate", above=0, tune="1e-4..0.01")
    contrast_patience: int = setting(
        20, "it stops after so many steps without a lower loss (0 = never)", at_least=0
    )
    encoder_per_client: bool = setting(False, "an encoder for each client rather than one for all")
    append: float = setting(
        0.25,
        "H̃ is appended to the features, in rows of this length (theirs is 1 on average); 0 = it is not",
        at_least=0,
        tune="0..1",
    )
    add_edges: int = setting(
        0,
        "k, similar nodes that a node is linked to (0: chosen by validation, see docs/results.md)",
        at_least=0,
        tune="0,1,3,5,10",
    )
    add_above: float = setting(
        1.0,
        "τ, similarity (a cosine) above which nodes are linked (1 = none are)",
        at_least=-1,
        at_most=1,
    )
    precision: str = setting(
        "float32",
        "numbers of features and embeddings as they travel",
        choices=("float32", "float16"),
    )
    top_entries: int = setting(
        0, "entries of a row of X̂ that travel, the largest (0 = all)", at_least=0
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    transductive: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = (
        "a pseudo-graph with a row for every node of the client, in their order: how many nodes and edges it has, and of each node's "
        "features and neighbours what the noise of the diffusion leaves (measured: fedloom.privacy.leakage)"
    )

    def check(self, facts: Facts) -> None:
        """The encoder must exist, a row must have the entries that are to travel, and the base method must go with the wider features."""
        try:
            build_model(self.vgae, 1, 2, seed=0)
        except ConfigError as error:
            raise ConfigError(f"method.vgae: {error}") from error
        if self.first_beta > self.last_beta:
            raise ConfigError(
                f"method.first_beta is {self.first_beta:g}, must not exceed method.last_beta = {self.last_beta:g}"
            )
        if self.top_entries > facts.num_features:
            raise ConfigError(
                f"method.top_entries is {self.top_entries}, must be at most {facts.num_features}, the number of features"
            )
        super().check(self.widened(facts))  # type: ignore[misc]  # the base method's

    def widened(self, facts: Facts) -> Facts:
        """The facts once the clients' graphs are refined."""
        if self.refine_by == "pseudo-graph" or not self.append or not self.embedding_width:
            return facts
        width = self.latent_width if self.refine_by == "latents" else self.embedding_width
        return replace(facts, num_features=facts.num_features + width)

    # ---- a client's pseudo-graph ----
    def fit_vgae(self, client: Client) -> tuple[VGAE, Tensor]:
        """Trained on the client's whole graph, no labels read; and the latents' means μ [n, q]. All clients start from the same weights."""
        graph, rng, width, first = (
            client.full_graph,
            client.rng("vgae"),
            self.latent_width,
            stream_seed(client.facts.seed, "vgae"),
        )
        with seeded(torch.Generator().manual_seed(first)):
            model = VGAE(
                build_model(self.vgae, graph.num_features, 2 * width, dropout=0.0, seed=first),
                width,
                graph.num_features,
            )
        edges, missed = pairs(graph.edge_index, graph.num_nodes), reconstruction(graph.x)
        seen = replace(graph, x=levelled([graph.x])[0])

        def loss() -> Tensor:
            mu, log_sigma = model(seen)
            H = mu + log_sigma.exp() * torch.randn(mu.shape, generator=rng)
            links = edge_loss(H, edges, other_pairs(edges, graph.num_nodes, rng))
            return (
                links
                + self.feature_loss * missed(model.decoder(H))
                + self.kl_weight * divergence(mu, log_sigma)
            )

        minimise(list(model.parameters()), loss, self.vgae_lr, self.vgae_epochs)
        with torch.no_grad():
            return model, model(seen)[0]

    def diffuse(self, client: Client, mu: Tensor) -> Tensor:
        """Fits the diffusion to latents [n, q] and draws as many from it."""
        rng, schedule = (
            client.rng("diffusion"),
            Schedule(self.diffusion_steps, self.first_beta, self.last_beta),
        )
        centre, scale = mu.mean(0), (mu - mu.mean(0)).square().mean(0).sqrt()
        h_0 = (mu - centre) / scale.where(scale > 1e-6, 1.0)
        with seeded(rng):
            model = Denoiser(self.latent_width, self.regulated, self.regulator_noise)

        def loss() -> Tensor:
            rows = h_0
            if len(h_0) > self.diffusion_rows:
                rows = h_0[torch.randint(len(h_0), (self.diffusion_rows,), generator=rng)]
            return diffusion_loss(model, rows, schedule, rng)

        minimise(list(model.parameters()), loss, self.diffusion_lr, self.diffusion_epochs)
        with torch.no_grad():
            drawn = torch.randn(h_0.shape, generator=rng)
            limits = h_0.amin(0), h_0.amax(0)
            drawn = reverse(
                drawn,
                lambda h, t: model(h, h_0, torch.full((len(h),), t), rng),
                schedule,
                rng,
                *limits,
            )
        return drawn * scale + centre

    @torch.no_grad()
    def decode(self, client: Client, model: VGAE, H: Tensor) -> tuple[Tensor, Tensor]:
        """X̂ [n, d] and the pairs of Â [2, edges] from latents [n, q]."""
        centre, scale = units(client.full_graph.x)
        x = (
            model.decoder(H).sigmoid()
            if is_bag_of_words(client.full_graph.x)
            else centre + scale * model.decoder(H)
        )
        edges, n = pairs(client.full_graph.edge_index, len(H)).shape[1], len(H)
        return x, pairs(linked_to_nearest(F.normalize(H), -(-edges // n)), n)

    def pseudo_graph(self, client: Client) -> tuple[Tensor, Tensor]:
        """X̂ [n, d] and the pairs of Â [2, edges] of the client: row i stands for its node i."""
        model, mu = self.fit_vgae(client)
        return self.decode(client, model, self.diffuse(client, mu) if self.diffused else mu)

    # ---- what travels ----
    def rounded(self, x: Tensor) -> Tensor:
        """x as it travels."""
        told = x.to(DTYPES[self.precision])
        if not told.isfinite().all() and x.isfinite().all():
            raise ConfigError(
                f"method.precision is {self.precision!r}, which cannot hold {x.abs().max():g}; take 'float32'"
            )
        return told

    @phase(
        features=Computed(
            lambda method, facts, message, reply: (
                ("", method.precision, (-1, facts.num_features)),
            )
        ),
        edges="int32[2,n]",
    )
    def send_pseudo_graph(self, client: Client) -> Message:
        """The pseudo-graph."""
        x, edges = self.pseudo_graph(client)
        self._show(client, pseudo=edges)
        return {"features": self.rounded(x), "edges": edges.int()}

    @phase(
        values=Computed(
            lambda method, facts, message, reply: (
                ("", method.precision, (-1, method.top_entries)),
            )
        ),
        columns="int32[n,top_entries]",
        edges="int32[2,n]",
    )
    def send_top_entries(self, client: Client) -> Message:
        """The same with the largest entries of every row alone."""
        x, edges = self.pseudo_graph(client)
        self._show(client, pseudo=edges)
        columns = x.abs().topk(self.top_entries).indices.sort().values
        return {
            "values": self.rounded(x.gather(1, columns)),
            "columns": columns.int(),
            "edges": edges.int(),
        }

    @phase()
    def refine(self, client: Client, embeddings: Tensor | None = None) -> Message:
        """The client's graph becomes Ã, X̃: by the embeddings it is sent, or by those it makes itself."""
        graph, facts = client.full_graph, self.widened(client.facts)
        if self.refine_by == "pseudo-graph":
            x, edges = self.pseudo_graph(client)
            self._show(client, pseudo=edges)
            new = replace(
                graph, x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), edge_weight=None
            )
        else:
            H = self.own_embeddings(client) if embeddings is None else embeddings.float()
            if len(H) != graph.num_nodes:
                raise MessageError(
                    f"to client {client.name!r}: tensor 'embeddings' has {len(H)} rows for {graph.num_nodes} nodes"
                )
            new = refined(graph, H, self.append, self.add_edges, self.add_above)
            self._show(client, added=pairs(new.edge_index[:, graph.num_edges :], graph.num_nodes))
        client.full_graph, client.facts = new, facts
        client.graph = new.training_view(inductive=False)
        return {}

    def _show(self, client: Client, **links: Tensor) -> None:
        """Puts pairs aside that belong to the client's graph as it is now, for pictures; few clients do."""
        if client.name not in client.facts.clients[:SHOWN_CLIENTS]:
            return
        graph, n = client.full_graph, client.full_graph.num_nodes
        if "shown" not in client.memory:
            original = pairs(graph.edge_index, n)
            client.memory["shown"] = nodes = neighbourhood(original, n, SHOWN_NODES)
            client.memory["links"] = {"original": between(original, nodes, n)}
        client.memory["links"] |= {
            name: between(some, client.memory["shown"], n) for name, some in links.items()
        }

    def artifacts(self, client: Client) -> Message:
        """Of the first clients: their graph as it was, the pseudo-graph they sent, the edges added to their own; of each a part.

        Labels are those of all nodes, which colour the picture.
        """
        others: Message = super().artifacts(client)  # type: ignore[misc]  # the base method's
        if "links" not in client.memory:
            return others
        nodes, links = client.memory["shown"], client.memory["links"]
        nodes = nodes[: room(list(links.values()), len(nodes), SHOWN_LINKS)]
        few: Message = {name: ends[:, ends.amax(0) < len(nodes)] for name, ends in links.items()}
        return {
            **others,
            "graphs": {
                "nodes": torch.tensor(client.full_graph.num_nodes),
                "labels": client.full_graph.y[nodes],
                "links": few,
            },
        }

    def joint_artifacts(self, federation: Federation) -> Message:
        """The base method's, if the clients' edges stay what they were."""
        kept = not self.embedding_width or (
            self.refine_by != "pseudo-graph" and not self.add_edges and self.add_above == 1
        )
        return super().joint_artifacts(federation) if kept else {}  # type: ignore[misc]

    def own_embeddings(self, client: Client) -> Tensor:
        """H̃ without a server: of a control, or zeros in place of what did not come."""
        graph, width = client.full_graph, self.embedding_width
        if self.refine_by == "latents":
            return self.fit_vgae(client)[1]
        if self.refine_by == "local":
            first = torch.Generator().manual_seed(
                stream_seed(client.facts.seed, "contrast")
            )  # the same for all: no traffic is needed
            return self.contrasted([graph], first, [client.rng("corrupt")])[0]
        if self.refine_by == "noise":
            return torch.randn(graph.num_nodes, width, generator=client.rng("noise"))
        return torch.zeros(graph.num_nodes, width)

    # ---- server (and the control without one) ----
    def contrasted(
        self, graphs: Sequence[Graph], rng: Generator, corrupt: Sequence[Generator]
    ) -> list[Tensor]:
        """Embeddings of graphs by an encoder that learns to tell their nodes from corrupted ones."""
        with seeded(rng):
            model = Contrast(
                graphs[0].num_features,
                self.embedding_width,
                len(graphs) if self.encoder_per_client else 1,
            )
        return harmonise(
            graphs, model, corrupt, self.contrast_lr, self.contrast_epochs, self.contrast_patience
        )

    def embed(self, server: Server, sent: Mapping[str, Message]) -> dict[str, Message]:
        """Lines 12-19: H̃ for every client that sent a pseudo-graph."""
        graphs = [
            received(reply, server.facts.num_features, client) for client, reply in sent.items()
        ]
        made = self.contrasted(
            graphs, server.rng("contrast"), [server.rng(f"corrupt {client}") for client in sent]
        )
        return {
            client: {"embeddings": self.rounded(H)} for client, H in zip(sent, made, strict=True)
        }

    def prepare_clients(self, server: Server) -> None:
        """Algorithm 1 up to the federated training."""
        if not self.embedding_width:
            return
        made: dict[str, Message] = {}
        if self.refine_by == "server":
            sent = server.ask(self.send_top_entries if self.top_entries else self.send_pseudo_graph)
            made = self.embed(server, sent) if sent else {}
        server.ask(self.refine, each={client: made.get(client, {}) for client in server.clients})
        server.facts = self.widened(server.facts)


def received(reply: Message, num_features: int, client: str) -> Graph:
    """The pseudo-graph that a client sent. MessageError if its edges or columns name what is not there."""
    who, edges = f"client {client!r}", reply["edges"].long()
    if "features" in reply:
        x = reply["features"].float()
    else:
        columns = reply["columns"].long()
        if columns.numel() and (columns.min() < 0 or columns.max() >= num_features):
            raise MessageError(
                f"{who}: tensor 'columns' names one that is not among 0 to {num_features - 1}"
            )
        if len(columns) != len(reply["values"]):
            raise MessageError(
                f"{who}: tensor 'columns' has {len(columns)} rows, 'values' {len(reply['values'])}"
            )
        x = torch.zeros(len(columns), num_features).scatter_(1, columns, reply["values"].float())
    if len(x) == 0:
        raise MessageError(
            f"{who}: tensor {'features' if 'features' in reply else 'values'!r} has no rows"
        )
    if edges.numel() and (edges.min() < 0 or edges.max() >= len(x)):
        raise MessageError(
            f"{who}: tensor 'edges' names a node that is not among 0 to {len(x) - 1}"
        )
    return bare(x, edges)
