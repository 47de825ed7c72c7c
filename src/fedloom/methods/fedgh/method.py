"""FedGH: refines every client's graph with embeddings that the server learns; then a method trains.

Zhuang et al.: "Prior Refinement is Better: Diffusion-Driven Graph Harmonization for Federated Graph
Learning", AAAI 2026, Algorithm 1. It is a plug-in. Clients send pseudo-graphs, the server embeds
all of them in one space, and each client refines its graph. Then the method `base` trains on the
refined graphs, unchanged.

What travels, per client, once, before the method `base` begins:
    up    features, edges   X̂ [n_k, d] and the pairs i < j of Â: a pseudo-graph with a row for each
                            of the client's nodes
    down  embeddings        H̃ [n_k, d̃], to the client that the rows belong to

    μ, log σ = encoder of the VGAE (X, A)                                         `VGAE`
    H = μ + σ ⊙ η; X̂ = MLP(H); Â = sigmoid(H Hᵀ)
    L_vgae = BCE over edges and as many other pairs
             + λ_x rec(X, X̂) + γ KL / n                            Eq. 5-7        `fit_vgae`
    h_t = √ᾱ_t h_0 + √(1 − ᾱ_t) ε, h_0 = μ standardised            Eq. 8          `Schedule.noised`
    L_diff = ‖ε − ε_θ(h_t, r, t)‖², r = F_ω(h_0 + η),
             η ~ N(0, σ_c²)                                        Eq. 9, 10      `diffusion_loss`
    from h_T ~ N(0, I):
    h ← (h − β_t ε_θ / √(1 − ᾱ_t)) / √α_t + √β_t z                                `reverse`
    h̃ = PReLU(S X̂ W + b), s_k = sigmoid(mean h̃^k),
    D(h, s) = sigmoid(hᵀ B s)                                      Eq. 11         `Contrast`
    L_con = Σ_k −1/(2 n_k K) Σ_i Σ_j [log D(h̃_i^k, s_j)
            + log(1 − D(h̃'_i^k, s_j))]                             Eq. 12         `contrast_loss`
    Ã = A and edges to each node's k most similar nodes,
        and to those above τ; X̃ = [X ‖ H̃]                          Eq. 13-15      `refined`

Row i of a pseudo-graph stands for node i only through r_i. It is as private as the noise in r_i:
see `fedloom.privacy.leakage`.

Departures. Eq. 7 prints the ELBO, which is to be maximised; here its negative is minimised.
Eq. 8-10 lose the bars of ᾱ. h_0 is μ, not a draw. Alg. 1 samples in every step of the diffusion's
training; sampling once after it is enough. Encoders see features minus their mean, in rows of one
length on average, and real-valued features are decoded in units of their deviation. Adam's steps
have one size, so an encoder of features as small as PubMed's, or as many as Photo's, learns nothing
otherwise. A reverse step that aims beyond the range of the client's latents is held there;
otherwise a few in a hundred rows drift far away. The VGAE does not stop early. Â keeps each node's
links to the ⌈|E_k| / n_k⌉ others with the largest cosine (so about |E_k|). By h_i · h_j, as in the
decoder, nodes with long h would take most of them. All clients share f and D: embeddings of
encoders that belong to single clients do not fit one model (`encoder_per_client`). H̃' is computed
from permuted rows of X̂, as in DGI. The text permutes H̃, which leaves the same vectors on both sides
and nothing to learn. Rows of H̃ have their mean subtracted and one length, a quarter of the
features'. Longer rows drown features that matter more. A client whose pseudo-graph is missing gets
zeros and no edges. With `embedding_width` = 0, only `base` runs.

`refine_by` and `diffused` contain the controls: other sources of H̃, without this method.
"pseudo-graph" is the paper's "w/o CL": clients train and are evaluated on their pseudo-graphs.
VGAEs, and the control's DGI, start from the same weights at all clients, which costs no traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import DTYPES, Message
from fedloom.core.method import Plugin
from fedloom.core.phase import Computed, phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.errors import ConfigError, MessageError
from fedloom.methods.fedgh.artifacts import graph_artifacts, remember_links
from fedloom.methods.fedgh.contrast import Contrast, harmonise
from fedloom.methods.fedgh.diffusion import Denoiser, Schedule, diffusion_loss, reverse
from fedloom.methods.fedgh.refinement import received_graph, refined
from fedloom.methods.fedgh.vgae import (
    VGAE,
    divergence,
    edge_loss,
    is_bag_of_words,
    levelled,
    minimise,
    reconstruction,
    units,
)
from fedloom.nn.build import build_model
from fedloom.nn.nearest import nearest_edges, pairs, random_non_edges
from fedloom.nn.training import seeded


@dataclass(frozen=True)
class FedGH(Plugin):
    """Refines every client's graph before the base method."""

    refine_by: str = setting(
        "server",
        "what H̃ is: the server's embeddings of pseudo-graphs, or a control: DGI on the client's "
        "own graph, its VGAE's latents, noise; or training on the pseudo-graphs themselves",
        choices=("server", "local", "latents", "noise", "pseudo-graph"),
    )
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
        20, "it stops after this many steps without a lower loss (0 = never)", at_least=0
    )
    encoder_per_client: bool = setting(False, "an encoder for each client instead of one for all")
    append: float = setting(
        0.25,
        "H̃ is appended to the features, in rows of this length (theirs is 1 on average); "
        "0 = it is not",
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
        "number format in which features and embeddings travel",
        choices=("float32", "float16"),
    )
    top_entries: int = setting(
        0, "entries of a row of X̂ that travel, the largest (0 = all)", at_least=0
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    transductive: ClassVar[bool] = True
    predicts_unseen: ClassVar[bool] = False
    unseen_needs: ClassVar[str] = (
        "refined features, which the server computes before training for the nodes of training"
    )
    keeps_logits: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = (
        "a pseudo-graph with a row for every node of the client, in their order: how many nodes "
        "and edges it has, and of each node's features and neighbours what the noise of the "
        "diffusion leaves (measured: fedloom.privacy.leakage)"
    )

    def check(self, facts: Facts) -> None:
        """Checks the encoder, β and top_entries, and the base method with the wider features."""
        try:
            build_model(self.vgae, 1, 2, seed=0)
        except ConfigError as error:
            raise ConfigError(f"method.vgae: {error}") from error
        if self.first_beta > self.last_beta:
            raise ConfigError(
                f"method.first_beta is {self.first_beta:g}, must not exceed "
                f"method.last_beta = {self.last_beta:g}"
            )
        if self.top_entries > facts.num_features:
            raise ConfigError(
                f"method.top_entries is {self.top_entries}, must be at most {facts.num_features}, "
                "the number of features"
            )
        super().check(self.widened(facts))  # type: ignore[misc]  # the base method's

    def widened(self, facts: Facts) -> Facts:
        """Returns the facts after refinement, when the clients' features are wider."""
        if self.refine_by == "pseudo-graph" or not self.append or not self.embedding_width:
            return facts
        width = self.latent_width if self.refine_by == "latents" else self.embedding_width
        return replace(facts, num_features=facts.num_features + width)

    # ---- a client's pseudo-graph ----
    def fit_vgae(self, client: Client) -> tuple[VGAE, Tensor]:
        """Trains a VGAE on the client's whole graph, without labels (Eq. 5-7).

        All clients start from the same weights. Returns it and the means μ of the latents, [n, q].
        """
        graph, rng, width = client.full_graph, client.rng("vgae"), self.latent_width
        seed = stream_seed(client.facts.seed, "vgae")
        with seeded(torch.Generator().manual_seed(seed)):
            encoder = build_model(self.vgae, graph.num_features, 2 * width, dropout=0.0, seed=seed)
            model = VGAE(encoder, width, graph.num_features)
        edges, feature_loss = pairs(graph.edge_index, graph.num_nodes), reconstruction(graph.x)
        seen = replace(graph, x=levelled([graph.x])[0])

        def loss() -> Tensor:
            mu, log_sigma = model(seen)
            H = mu + log_sigma.exp() * torch.randn(mu.shape, generator=rng)
            return (
                edge_loss(H, edges, random_non_edges(edges, graph.num_nodes, rng))
                + self.feature_loss * feature_loss(model.decoder(H))
                + self.kl_weight * divergence(mu, log_sigma)
            )

        minimise(list(model.parameters()), loss, self.vgae_lr, self.vgae_epochs)
        with torch.no_grad():
            return model, model(seen)[0]

    def diffuse(self, client: Client, mu: Tensor) -> Tensor:
        """Fits the diffusion to latents [n, q] and draws as many from it (Eq. 8-10)."""
        rng = client.rng("diffusion")
        schedule = Schedule(self.diffusion_steps, self.first_beta, self.last_beta)
        centre, scale = mu.mean(0), (mu - mu.mean(0)).square().mean(0).sqrt()
        h_0 = (mu - centre) / scale.where(scale > 1e-6, 1.0)
        with seeded(rng):
            model = Denoiser(self.latent_width, self.regulated, self.regulator_noise)

        def loss() -> Tensor:
            rows = h_0
            if len(h_0) > self.diffusion_rows:
                rows = h_0[torch.randint(len(h_0), (self.diffusion_rows,), generator=rng)]
            return diffusion_loss(model, rows, schedule, rng)

        def noise_in(h: Tensor, t: int) -> Tensor:
            return model(h, h_0, torch.full((len(h),), t), rng)

        minimise(list(model.parameters()), loss, self.diffusion_lr, self.diffusion_epochs)
        with torch.no_grad():
            h_T = torch.randn(h_0.shape, generator=rng)
            drawn = reverse(h_T, noise_in, schedule, rng, h_0.amin(0), h_0.amax(0))
        return drawn * scale + centre

    @torch.no_grad()
    def decode(self, client: Client, model: VGAE, H: Tensor) -> tuple[Tensor, Tensor]:
        """Returns X̂ [n, d] and the pairs of Â [2, edges] from latents [n, q]."""
        graph, n = client.full_graph, len(H)
        if is_bag_of_words(graph.x):
            x = model.decoder(H).sigmoid()
        else:
            centre, scale = units(graph.x)
            x = centre + scale * model.decoder(H)
        edges = pairs(graph.edge_index, n).shape[1]
        return x, pairs(nearest_edges(F.normalize(H), -(-edges // n)), n)

    def pseudo_graph(self, client: Client) -> tuple[Tensor, Tensor]:
        """Returns X̂ [n, d] and the pairs of Â [2, edges]. Row i stands for the client's node i."""
        model, mu = self.fit_vgae(client)
        return self.decode(client, model, self.diffuse(client, mu) if self.diffused else mu)

    # ---- what travels ----
    def rounded(self, x: Tensor) -> Tensor:
        """Returns x in the number format in which it travels."""
        sent = x.to(DTYPES[self.precision])
        if not sent.isfinite().all() and x.isfinite().all():
            raise ConfigError(
                f"method.precision is {self.precision!r}, which cannot hold {x.abs().max():g}; "
                "take 'float32'"
            )
        return sent

    @runs_once
    @phase(
        features=Computed(
            lambda method, facts, message, reply: (
                ("", method.precision, (-1, facts.num_features)),
            )
        ),
        edges="int32[2,n]",
    )
    def send_pseudo_graph(self, client: Client) -> Message:
        """Answers the pseudo-graph."""
        x, edges = self.pseudo_graph(client)
        remember_links(client, pseudo=edges)
        return {"features": self.rounded(x), "edges": edges.int()}

    @runs_once
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
        """Answers the pseudo-graph with only the largest entries of every row."""
        x, edges = self.pseudo_graph(client)
        remember_links(client, pseudo=edges)
        columns = x.abs().topk(self.top_entries).indices.sort().values
        return {
            "values": self.rounded(x.gather(1, columns)),
            "columns": columns.int(),
            "edges": edges.int(),
        }

    @runs_once
    @phase()
    def refine(self, client: Client, embeddings: Tensor | None = None) -> Message:
        """Replaces the client's graph by Ã, X̃ (Eq. 13-15).

        embeddings: H̃. None: the client computes it itself (`own_embeddings`).
        """
        graph, facts = client.full_graph, self.widened(client.facts)
        if self.refine_by == "pseudo-graph":
            x, edges = self.pseudo_graph(client)
            remember_links(client, pseudo=edges)
            both = torch.cat([edges, edges.flip(0)], 1)
            new = replace(graph, x=x, edge_index=both, edge_weight=None)
        else:
            H = self.own_embeddings(client) if embeddings is None else embeddings.float()
            if len(H) != graph.num_nodes:
                raise MessageError(
                    f"to client {client.name!r}: tensor 'embeddings' has {len(H)} rows "
                    f"for {graph.num_nodes} nodes"
                )
            new = refined(graph, H, self.append, self.add_edges, self.add_above)
            added = new.edge_index[:, graph.num_edges :]
            remember_links(client, added=pairs(added, graph.num_nodes))
        client.full_graph, client.facts = new, facts
        client.graph = new.training_view(inductive=False)
        return {}

    def own_embeddings(self, client: Client) -> Tensor:
        """Returns H̃ without a server: that of a control, or zeros if no embeddings arrived."""
        graph, width = client.full_graph, self.embedding_width
        if self.refine_by == "latents":
            return self.fit_vgae(client)[1]
        if self.refine_by == "local":
            # The same start at all clients needs no traffic.
            first = torch.Generator().manual_seed(stream_seed(client.facts.seed, "contrast"))
            return self.contrasted([graph], first, [client.rng("corrupt")])[0]
        if self.refine_by == "noise":
            return torch.randn(graph.num_nodes, width, generator=client.rng("noise"))
        return torch.zeros(graph.num_nodes, width)

    # ---- server (and the control without one) ----
    def contrasted(
        self, graphs: Sequence[Graph], rng: Generator, corrupt: Sequence[Generator]
    ) -> list[Tensor]:
        """Returns embeddings of graphs by contrastive learning (Eq. 11, 12).

        The encoder learns to distinguish the graphs' nodes from corrupted ones.
        """
        encoders = len(graphs) if self.encoder_per_client else 1
        with seeded(rng):
            model = Contrast(graphs[0].num_features, self.embedding_width, encoders)
        return harmonise(
            graphs, model, corrupt, self.contrast_lr, self.contrast_epochs, self.contrast_patience
        )

    def embed(self, server: Server, sent: Mapping[str, Message]) -> dict[str, Message]:
        """Lines 12-19: returns H̃ for every client that sent a pseudo-graph."""
        features = server.facts.num_features
        graphs = [received_graph(reply, features, client) for client, reply in sent.items()]
        corrupt = [server.rng(f"corrupt {client}") for client in sent]
        embedded = self.contrasted(graphs, server.rng("contrast"), corrupt)
        return {
            client: {"embeddings": self.rounded(H)}
            for client, H in zip(sent, embedded, strict=True)
        }

    def prepare_clients(self, server: Server) -> None:
        """Algorithm 1 up to the federated training."""
        if not self.embedding_width:
            return
        answers: dict[str, Message] = {}
        if self.refine_by == "server":
            sent = server.ask(self.send_top_entries if self.top_entries else self.send_pseudo_graph)
            answers = self.embed(server, sent) if sent else {}
        server.ask(self.refine, each={client: answers.get(client, {}) for client in server.clients})
        server.facts = self.widened(server.facts)

    # ---- pictures ----
    def artifacts(self, client: Client) -> Message:
        """Adds parts of the first clients' graphs: original, pseudo-graph, added edges."""
        others: Message = super().artifacts(client)  # type: ignore[misc]  # the base method's
        return {**others, **graph_artifacts(client)}

    def joint_artifacts(self, federation: Federation) -> Message:
        """Returns those of the base method, if refinement leaves the clients' edges unchanged."""
        adds_edges = self.refine_by == "pseudo-graph" or self.add_edges or self.add_above != 1
        if self.embedding_width and adds_edges:
            return {}
        return super().joint_artifacts(federation)  # type: ignore[misc]  # the base method's
