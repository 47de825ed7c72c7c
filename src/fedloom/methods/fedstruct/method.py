"""FedStruct: adds structure embeddings, propagated over the whole graph, to local predictions.

Aliakbari, Östman, Graell i Amat: "Decoupled Subgraph Federated Learning", ICLR 2025. One graph is
cut over K clients. Both owners of an edge between clients know it (Algorithm 3), and clients that
own neither end can read it; see "What others can read" below. No feature, label or embedding of
features is ever sent.

    ŷ_v = softmax(h_v + z_v)                                              `predict`, `_objective`
    h_v    the run's model on the client's own graph (a decoupled GCN in the paper)
    z_v    Σ_u Ā_vu g(s_u), over all nodes u of the whole graph           `Rows.propagate`
    Ā      Σ_l β_l Â^l with Â = D̃^-1 (A + I) of the whole graph; Â^L_s unless β is given
    s_u    HOP2VEC: trained; DEG: one-hot degree; FED*: return probabilities and degree;
           NODE2VEC and GDV: if the server may know the graph (App. H)

Before training, each client i obtains its rows Ā^[i] (App. D). In hop l, client k sends to every
client i that has edges from k

    B_ik = Ã_k^[i] [Â^[k]]^(l-1)                                          `offer`
    [Â^[i]]^l = (D̃^[i])^-1 Σ_k B_ik, computed by client i                 `absorb`

`prune` keeps these matrices sparse.
    protocol   In each B, the ⌈p/K⌉ n_i largest entries in the columns of each client stay (App. D).
               Here that holds for the own block B_ii too, which does not travel. Otherwise a client
               with few edges to others would end with a dense matrix.
    global     The p n largest entries of the whole Â^l stay (Sec. 5.3). Clients find the threshold
               by counting, byte by byte. No client shows an entry.
    none       All entries stay (the paper's -F).
Then FedSGD trains: one summed gradient a round, of θ = (θ_f, θ_s), S and, if it is trained, β
(Eq. 14, 16).

What travels (c classes, n nodes, n_i of client i). `greet` and `offer` go from client to client;
the server relays them, and a secure run encrypts them:
    once     up    nodes         n_i                                                  `setup`
             to k  source, target,
                   position,     the edges shared with k, the positions of the own
                   incoming      ends, the directions                                 `greet`
    L_s - 1 times
             to k  count, column,
                   value         a block B, unless blocks = "none"                    `offer`
             up    counts        global pruning: how many entries have which byte     `tally`
             FED* repeats this for its return probabilities, `walk` - 1 times
    once     up    rows          DEG: degrees; FED*: also 50 return probabilities     `describe`
             up    edges         NODE2VEC, GDV: all edges                             `reveal`
             down  rows          the same of all n nodes                              `adopt`
    a round  down  model         θ and, for HOP2VEC, S [n, d_s]; with `absorbed`, S is [n, c] and
                                 there is no θ_s (Prop. 2)
             up    gradient      the same, of the loss summed over the client's training nodes,
                   labelled      and their number                                     `gradient`

`private` (App. G.1): a client keeps its rows of S to itself. Other clients tell it once which sums
over its nodes they need. In each round it answers with those sums, Σ_u Ā_vu g(s_u), c numbers for
each of their training nodes v. It gets back its own rows of the summed gradient. It refuses to
answer a peer for as many nodes v as it has nodes in the sums (`query_limit`). That bounds a number
and proves nothing: the only node in a sum is revealed by it, and peers can combine what they know.
The run's notes count what single peers can solve for. In a deployment a client draws its rows of
S from its operating system. A simulation plays all parties and draws them from the run's seed, so
that it can be repeated; who knows the seed knows the S of its start. The results of a simulation
equal those of the plain form, except for dropout in g, which the owner of u draws once for all
clients. Scores need the same sums for validation and test nodes, which count towards the limit too.

`encrypt`: the blocks go out dense, under the receiver's BFV key. The server adds ciphertexts, so
it reads no block, and the receiver learns only Σ_k B_ik. It costs 16 bytes for each of n_i n
numbers, for each pair of clients and hop: for small federations.

What others can read, measured on Cora with 10 clients at random (docs/results.md, `attacks`). A
secure run hides messages from the server. It does not change what the receiver of a block or of a
sum reads.

    edges    A row of the second hop whose target has one neighbour u at the sender is Â_u, all
             neighbours of u. A client so reads 2,096 of the 4,274 edges between other clients'
             nodes, none of them wrong, with 467 complete lists. By linear algebra and from the
             values of entries it reads 2,461. Every run's notes count the first two.
    labels   ∇S_u is a known multiple of Σ_v Ā_vu (ŷ_v - y_v). From the summed gradients the server
             reads 95 % of the training labels. Clients get S after every step, so they see the
             gradients up to Adam's scaling. `audit` has the notes count what the server reads.

The repairs:
    blocks           "withhold" and "merge": no row of one node travels or can be solved for. The
                     values of rows over `min_neighbours` nodes still tell some edges. "none": no
                     row travels, and a client computes with the graph that it knows. Others then
                     read no edge.
    encrypt          only sums over all senders arrive; "withhold" counts neighbours at all of them
    noise            on the summed gradient of S. Each client adds its share, from its operating
                     system in a deployment. Rounds average it out: noise 1 leaves the server half
                     of the labels and costs 9 points of accuracy.
    label_smoothing, local_steps   They hide next to nothing.
    safe             blocks = "none", in a secure run: clients read no edge of others

Departures: the server runs one Adam (the authors' code; the paper writes plain gradient descent).
Self-loops of the data are replaced by the one of A + I. In a directed graph a node receives from
the nodes that point at it; the authors do the opposite (`data.flow = "reversed"`). Cross edges have
weight 1. FED*'s return probabilities are those of the powers that the same protocol computes of
D^-1 A, pruned likewise. GDV counts graphlets of up to four nodes. Evaluation sends S again (the
ledger books it apart). In App. H the server computes the features; here the clients still compute
Ā.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message, flatten, unflatten
from fedloom.core.phase import peer_messages, phase, runs_once, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.federation import Federation
from fedloom.data.seeds import stream_seed
from fedloom.errors import ConfigError, MessageError
from fedloom.methods._shared.graphlets import ORBITS
from fedloom.methods.fedsgd import FedSGD
from fedloom.methods.fedstruct import powers
from fedloom.methods.fedstruct.artifacts import client_adjacency, exact_adjacency
from fedloom.methods.fedstruct.attacks import edges_shown, labels_guessed, pull_of, rows_of_one
from fedloom.methods.fedstruct.edges import adjacency_of, shared_edges
from fedloom.methods.fedstruct.encrypted import EncryptedBlocks
from fedloom.methods.fedstruct.features import FixedFeatures
from fedloom.methods.fedstruct.powers import Numbering, PartyAdjacency, Rows
from fedloom.methods.fedstruct.private import PrivateSums
from fedloom.methods.fedstruct.pruning import GlobalPruning
from fedloom.methods.fedstruct.sharing import (
    BLOCKS,
    among_all,
    rows_left_out,
    sums_that_travel,
)
from fedloom.methods.fedstruct.state import gradients_of, state_of
from fedloom.nn.encoder import Encoder, encode_rows
from fedloom.nn.model import forward_with
from fedloom.nn.training import backward, seeded
from fedloom.nn.weights import load_weights, weights

KINDS = ("hop2vec", "deg", "fed", "node2vec", "gdv")
OVERHEARD = "what the gradients of S show"  # in the server's state, with `audit`
SAFE = {"blocks": "none"}  # what `safe` sets


@dataclass(frozen=True)
class FedStruct(FedSGD, GlobalPruning, EncryptedBlocks, FixedFeatures, PrivateSums):
    """FedSGD with a second branch that knows the whole graph's structure."""

    structure: str = setting("hop2vec", "structure features s_u", choices=KINDS)
    hops: int = setting(10, "L_s, hops of the structure branch", at_least=1, tune="1..20")
    beta: str = setting(
        "", "β_0,β_1,...,β_L_s of the filter, separated by commas (empty = only the last hop)"
    )
    learn_beta: bool = setting(False, "whether β is trained")
    prune: str = setting(
        "protocol", "how the powers of Â are pruned", choices=("protocol", "global", "none")
    )
    p: int = setting(30, "entries per node, on average, that pruning keeps", at_least=1)
    d_s: int = setting(256, "width of the structure features", at_least=1)
    hidden: str = setting("256", "hidden widths of g, separated by commas")
    absorbed: bool = setting(False, "HOP2VEC without g: s_u is itself a vector of class scores")
    spread_of_s: float = setting(0.05, "standard deviation of S at the start", above=0)
    walk: int = setting(50, "return probabilities in FED*", at_least=1)
    double_softmax: bool = setting(
        False, "the authors' loss: cross-entropy of probabilities instead of scores"
    )
    inference: str = setting(
        "both",
        "what predicts: both branches, or only the structure branch",
        choices=("both", "structure"),
    )
    private: bool = setting(
        False, "each client keeps its rows of S and answers with sums over them (App. G.1)"
    )
    query_limit: int = setting(
        0,
        "private: the most nodes of a peer that a client answers for "
        "(0 = fewer than its own nodes in the sums)",
        at_least=0,
    )
    encrypt: bool = setting(
        False, "blocks travel under BFV and the server adds them unread (needs tenseal)"
    )
    blocks: str = setting(
        "all",
        "which rows of the blocks travel: all; withhold or merge those that sum over few nodes; "
        "none",
        choices=BLOCKS,
    )
    min_neighbours: int = setting(
        3,
        "withhold, merge: the fewest neighbours of the target that a row sums over (at the sender; "
        "with encrypt, at all senders)",
        at_least=2,
    )
    noise: float = setting(
        0.0, "standard deviation of the noise on the summed gradient of S", at_least=0
    )
    local_steps: int = setting(
        1, "gradient steps of a client in a round; it sends their sum", at_least=1
    )
    local_lr: float = setting(0.5, "the learning rate of these steps", above=0)
    label_smoothing: float = setting(
        0.0, "share of a label that is spread over all classes", at_least=0, below=1
    )
    audit: bool = setting(False, "count the training labels that the summed gradients of S show")
    safe: bool = setting(
        False,
        "blocks = none, whatever it is set to; clients read no edge of others; needs run.secure",
    )

    uses_cross_edges: ClassVar[bool] = True
    transductive: ClassVar[bool] = True
    predicts_unseen: ClassVar[bool] = False
    unseen_needs: ClassVar[str] = "structure embeddings, which only the nodes of training have"
    keeps_logits: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("node",)
    # Fixed features are computed once: nodes that are left out would never have any.
    requires_all: ClassVar[tuple[str, ...]] = ("describe", "reveal")
    discloses_to_server: ClassVar[str] = (
        "if the run is not secure, the edges between clients, relayed blocks of the powers of the "
        "adjacency, and every client's gradients; with structure = deg or fed every node's degree "
        "(fed: and return probabilities), with node2vec or gdv all edges, otherwise the structure "
        "embeddings S (private = true: not S) and their summed gradients, from which it reads "
        "95 % of the training labels on Cora, also in a secure run; method.audit counts them"
    )
    discloses_to_peers: ClassVar[str] = (
        "edges of clients that own neither end: a client read 2,096 of 4,274 on Cora with 10 "
        "clients at random, with 467 complete neighbour lists, and 2,461 by linear algebra and the "
        "values of entries, also in a secure run; none with method.blocks = none or method.safe; "
        "and S after every step, which shows its gradients"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value in SAFE.items() if self.safe else ():
            object.__setattr__(self, field, value)
        self.coefficients()
        self.widths(1)
        for field in ("absorbed", "private", "noise", "audit", "safe"):
            if getattr(self, field) and self.structure != "hop2vec":
                raise ConfigError(
                    f"method.{field} is for structure = 'hop2vec', got {self.structure!r}"
                )
        if self.private and self.learn_beta:
            raise ConfigError(
                "method.learn_beta: β cannot be trained with private = true, because the sums are "
                "computed with the β agreed on before training"
            )
        if self.private and self.local_steps > 1:
            raise ConfigError(
                "method.local_steps must be 1 with private = true: the sums of other clients do "
                "not change during a round"
            )
        if self.encrypt and self.blocks == "merge":
            raise ConfigError(
                "method.blocks is 'merge', must be all or withhold or none with encrypt = true: "
                "no client knows all neighbours of a target"
            )
        if self.structure == "fed" and self.d_s <= self.walk:
            raise ConfigError(
                f"method.d_s is {self.d_s}, must be more than the {self.walk} return probabilities "
                "(method.walk)"
            )
        if self.structure == "gdv" and self.d_s < ORBITS:
            raise ConfigError(
                f"method.d_s is {self.d_s}, must be at least {ORBITS}, the number of orbits"
            )

    # ---- settings, parsed ----
    def coefficients(self) -> list[float]:
        """Returns β_0 to β_L_s."""
        if not self.beta:
            return [0.0] * self.hops + [1.0]
        try:
            numbers = [float(text) for text in self.beta.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != self.hops + 1 or not all(map(np.isfinite, numbers)) or not any(numbers):
            raise ConfigError(
                f"method.beta is {self.beta!r}, must be {self.hops + 1} numbers separated by "
                f"commas, β_0 to β_{self.hops}, not all of them 0"
            )
        return numbers

    def widths(self, num_classes: int) -> list[int]:
        """Returns the widths of g: d_s, the hidden ones, c."""
        texts = [text.strip() for text in self.hidden.split(",")] if self.hidden else []
        if not all(text.isdecimal() and int(text) for text in texts):
            raise ConfigError(
                f"method.hidden is {self.hidden!r}, must be whole numbers separated by commas, "
                "each at least 1"
            )
        return [self.d_s, *map(int, texts), num_classes]

    @property
    def used(self) -> list[int]:
        """The hops that have a part in Ā."""
        return [hop for hop, b in enumerate(self.coefficients()) if b or self.learn_beta]

    # ---- before the powers: numbers for nodes, and edges that both ends know ----
    @summed
    @phase(nodes="int64[K] counts nodes")
    def setup(self, client: Client) -> Message:
        """Builds the model; answers n_i at the client's own position."""
        super().setup(client)
        nodes = torch.zeros(client.facts.num_clients, dtype=torch.int64)
        nodes[client.facts.clients.index(client.name)] = client.graph.num_nodes
        return {"nodes": nodes}

    @peer_messages(read_by="meet")
    @phase(source="int64[n]", target="int64[n]", position="int32[n]", incoming="bool[n]")
    def greet(self, client: Client, nodes: Tensor) -> Message:
        """Sends to each client the edges shared with it, and the positions of the own ends."""
        sizes = dict(zip(client.facts.clients, nodes.tolist(), strict=True))
        state_of(client).numbering = numbering = Numbering.of(sizes)
        counted = numbering.size(client.name)
        if counted != client.graph.num_nodes:  # the client was absent from the count, for example
            raise MessageError(
                f"client {client.name!r} in 'greet': tensor 'nodes' gives it {counted} nodes, "
                f"it has {client.graph.num_nodes}"
            )
        return dict(shared_edges(client))

    @phase()
    def meet(self, client: Client, inbox: Message | None = None) -> Message:
        """Checks the shared edges against the peers' lists; completes the own part of A."""
        state = state_of(client)
        state.adjacency = adjacency_of(client, state.numbering, inbox or {})
        return {}

    # ---- powers of Â, hop by hop (App. D, Algorithm 3) ----
    @phase()
    def start(self, client: Client, loops: Tensor) -> Message:
        """Computes the first power, which needs no peer: Â with self-loops, or D^-1 A without."""
        state = state_of(client)
        state.loops, state.hop = bool(loops), 1
        state.power = state.adjacency.first_power(state.loops)
        state.used_powers, state.return_probabilities, state.missed = {}, {}, 0
        state.single = []
        self._choose_rows(client)
        return {}

    def _choose_rows(self, client: Client) -> None:
        """Decides which rows of the blocks travel, and starts what stands in for the others."""
        state = state_of(client)
        adjacency = state.adjacency
        if self.encrypt:
            self._choose_encrypted_rows(client)
        else:
            state.sent = {
                peer: sums_that_travel(adjacency.links_to(peer), self.blocks, self.min_neighbours)
                for peer in adjacency.outgoing
            }
            state.arriving = {
                peer: sums_that_travel(adjacency.links_from(peer), self.blocks, self.min_neighbours)
                for peer in adjacency.incoming
            }
        state.left_out, state.known = {}, {}
        for peer, sums in state.arriving.items():
            left_out = rows_left_out(adjacency.links_from(peer), sums)
            if left_out.nnz:
                own = adjacency.inner.shape[0]
                rows = adjacency.rows_from(peer)
                state.left_out[peer] = powers.scatter_rows(left_out, rows, own)
                state.known[peer] = adjacency.next_known(
                    peer, adjacency.known_start(peer), adjacency.own_start(), state.loops
                )

    @peer_messages(read_by="absorb")
    @phase(count="int32[n]", column="int32[n]", value="float32[n]")
    def offer(self, client: Client) -> Message:
        """Sends B_ik = Ã_k^[i] [Â^[k]]^(l-1) to each client i with edges from here."""
        return {peer: powers.packed(block) for peer, block in self._blocks(client).items()}

    def _blocks(self, client: Client) -> dict[str, csr_matrix]:
        state = state_of(client)
        return {
            peer: self._pruned(csr_matrix(sums @ state.power), state.adjacency, peer)
            for peer, sums in state.sent.items()
        }

    def _pruned(self, block: csr_matrix, adjacency: PartyAdjacency, receiver: str) -> csr_matrix:
        """Returns a block with only its ⌈p/K⌉ n_i largest entries in the columns of each client."""
        if self.prune != "protocol":
            return block
        numbering = adjacency.numbering
        share = -(-self.p // len(numbering.names))
        return powers.strongest_by_owner(block, share * numbering.size(receiver), numbering)

    @runs_once
    @phase()
    def absorb(self, client: Client, inbox: Message | None = None) -> Message:
        """Computes [Â^[i]]^l = (D̃^[i])^-1 Σ_k B_ik, its own term included."""
        state, received = state_of(client), inbox or {}
        adjacency = state.adjacency
        arrived = []
        for peer, message in sorted(received.items()):
            who = f"client {client.name!r}: peer message from {peer!r}"
            if peer not in adjacency.incoming:
                raise MessageError(f"{who}: a block from a client without edges to this one")
            rows = adjacency.rows_from(peer)
            block = powers.unpacked(message, len(rows), adjacency.numbering.total, who)
            self._note_readable(client, {peer: state.arriving[peer]}, block)
            arrived.append(powers.scatter_rows(block, rows, adjacency.inner.shape[0]))
        expected = {peer for peer in adjacency.incoming if len(adjacency.rows_from(peer))}
        state.missed += len(expected - set(received))  # peers that are absent since `meet`
        self._advance(client, arrived)
        return {}

    @phase()
    def advance(self, client: Client) -> Message:
        """Computes the next power without blocks (`blocks = "none"`)."""
        self._advance(client, [])
        return {}

    def _advance(self, client: Client, arrived: list[csr_matrix]) -> None:
        state = state_of(client)
        adjacency, loops = state.adjacency, state.loops
        self._keep_power(client)
        own = self._pruned(adjacency.own_block(state.power, loops), adjacency, client.name)
        guessed = [csr_matrix(rows @ state.known[peer]) for peer, rows in state.left_out.items()]
        for peer, known in state.known.items():
            following = adjacency.next_known(peer, known, state.power, loops)
            state.known[peer] = self._pruned(following, adjacency, client.name)
        state.power = adjacency.next_power([own, *arrived, *guessed], loops)
        state.hop += 1

    def _note_readable(
        self, client: Client, sums: dict[str, csr_matrix], block: csr_matrix
    ) -> None:
        """Keeps the rows of the second hop that are one other node's own, for `finish`.

        Args:
            client: The client.
            sums: {peer: the weights of its nodes in each row}.
            block: The rows, [rows, n].
        """
        state = state_of(client)
        if state.hop > 1:
            return
        nodes, rows = rows_of_one(among_all(sums, state.numbering), block)
        state.single.append((nodes, rows))

    def _keep_power(self, client: Client) -> None:
        """Keeps what is needed of the current power before the next one replaces it."""
        state = state_of(client)
        if not state.loops:
            start = state.numbering.span(client.name).start
            state.return_probabilities[state.hop] = state.power.diagonal(start)
        elif state.hop in self.used:
            state.used_powers[state.hop] = state.power

    @runs_once
    @summed
    @phase(
        entries="int64[] in 0..",
        empty="int64[] in 0..nodes",
        missed="int64[] in 0..",
        lists="int64[] in 0..",
        pairs="int64[] in 0..",
    )
    def finish(self, client: Client) -> Message:
        """Assembles Ā^[i] for all own nodes and for training nodes; answers how full it is.

        It also answers what the client could read of others: `lists` of one node's neighbours, and
        `pairs` of linked nodes in them.
        """
        state = state_of(client)
        self._keep_power(client)
        size, identity = client.graph.num_nodes, state.adjacency.own_start()
        used = [state.used_powers[hop] if hop else identity for hop in self.used]
        if not self.learn_beta:
            beta = self.coefficients()
            terms = (beta[hop] * power for hop, power in zip(self.used, used, strict=True))
            used = [csr_matrix(sum(terms), dtype=np.float32)]
        state.rows = Rows.of(torch.arange(size), used)
        state.train_rows = Rows.of(client.graph.train.nonzero().flatten(), used)
        own = state.numbering.span(client.name)
        shown = [edges_shown(nodes, rows, own) for nodes, rows in state.single]
        pairs = np.unique(np.concatenate([np.zeros((2, 0), np.int64), *shown], 1), axis=1)
        filled = sum(np.diff(power.indptr) for power in used)
        counts = {
            "entries": filled.sum(),
            "empty": (filled == 0).sum(),
            "missed": state.missed,
            "lists": sum(len(nodes) for nodes, _ in state.single),
            "pairs": pairs.shape[1],
        }
        del state.power, state.used_powers, state.single, state.known
        return {name: torch.tensor(int(count)) for name, count in counts.items()}

    def _compute_powers(
        self, server: Server, count: int, loops: bool, numbering: Numbering
    ) -> None:
        """Algorithm 3: every client computes its rows of the first `count` powers.

        It keeps the last one and what is needed of those before.
        """
        server.ask(self.start, loops=torch.tensor(loops))
        travels = self.blocks != "none"
        keys = self._exchange_keys(server) if self.encrypt and travels and count > 1 else {}
        for _ in range(count - 1):
            if not travels:
                server.ask(self.advance)
            elif self.encrypt:
                self._relay_encrypted(server, keys, numbering)
            else:
                server.relay(self.offer)
            if self.prune == "global":
                self._prune_globally(server, self.p * numbering.total)

    # ---- training (Algorithms 1 and 2) ----
    @summed
    @phase(gradient="=model", labelled="int64[] in 0..train")
    def gradient(self, client: Client, model: Message) -> Message:
        """∇ of the summed loss with respect to θ_f, θ_s, S and β (Eq. 14, 16).

        With `local_steps`, the mean of the gradients along the client's own steps.
        """
        labelled = client.graph.train.sum()
        gradient = self._gradient(client, model)
        if self.local_steps > 1:
            rate = self.local_lr / labelled.clamp(min=1)
            at, step, total = flatten(model), flatten(gradient), flatten(gradient)
            for _ in range(self.local_steps - 1):
                at = {name: at[name].detach() - rate * step[name] for name in at}
                step = flatten(self._gradient(client, unflatten(at)))
                total = {name: total[name] + step[name] for name in total}
            gradient = unflatten({name: t / self.local_steps for name, t in total.items()})
        if self.noise:
            gradient["S"] = gradient["S"] + self._noise(client, tuple(gradient["S"].shape))
        return {"gradient": gradient, "labelled": labelled}

    def _noise(self, client: Client, shape: tuple[int, ...]) -> Tensor:
        """Returns the client's share of the noise on the sum over all clients."""
        scale = self.noise / client.facts.num_clients**0.5
        return client.secret_normal(shape, scale, client.rng("noise of S"))

    def _gradient(self, client: Client, model: Message) -> Message:
        """Returns the gradient of the client's summed loss at a model, in the model's layout."""
        state, local_model, g = state_of(client), client.state["model"], self._encoder(client)
        rows = state.train_rows
        load_weights(local_model, model["feature"])
        S = self._embeddings(client, model)
        S.requires_grad_(self.structure == "hop2vec")
        beta = model["beta"].requires_grad_() if self.learn_beta else None
        if self.absorbed:
            theta_s, q = {}, S[rows.reach]
        else:
            theta_s = {name: t.requires_grad_() for name, t in model["structure"].items()}
            q = encode_rows(g, theta_s, S, rows.reach, client.rng("structure dropout"))
        backward(local_model, self._objective(client, rows, rows.propagate(q, beta)))
        gradient: Message = {"feature": gradients_of(local_model)}
        if not self.absorbed:
            gradient["structure"] = gradients_of(theta_s)
        for name, leaf in (("S", S), ("beta", beta)):
            if leaf is not None and leaf.requires_grad:
                gradient[name] = leaf.grad
        return gradient

    def _objective(self, client: Client, rows: Rows, z: Tensor) -> Tensor:
        """Returns the cross-entropy of h + z, summed over the training nodes."""
        model = client.state["model"]
        model.zero_grad()
        logits = model(client.graph, client.rng("dropout")).index_add(0, rows.nodes, z)
        scores = logits.softmax(1) if self.double_softmax else logits
        loss = client.loss(scores, client.graph, reduction="sum")
        if not self.label_smoothing:
            return loss
        spread = -scores.log_softmax(1)[client.graph.train].mean(1).sum()
        return (1 - self.label_smoothing) * loss + self.label_smoothing * spread

    def _embeddings(self, client: Client, model: Message) -> Tensor:
        """Returns S: as downloaded if it is trained, else the fixed features."""
        return model["S"] if self.structure == "hop2vec" else state_of(client).fixed

    def _encoder(self, client: Client) -> Encoder:
        """Returns the client's g."""
        state = state_of(client)
        if state.encoder is None:
            with seeded(client.rng("structure")):
                state.encoder = Encoder(self.widths(client.facts.num_classes), client.facts.dropout)
        state.encoder.zero_grad()
        return state.encoder

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns h + z for the client's nodes, without dropout."""
        assert model is not None, "FedStruct evaluates the common model"
        state = state_of(client)
        if self.private:
            assert state.z is not None, "private: the sums of this round are missing"
            z = state.z
        else:
            S, reach = self._embeddings(client, model), state.rows.reach
            q = (
                S[reach]
                if self.absorbed
                else encode_rows(self._encoder(client), model["structure"], S, reach, None)
            )
            state.beta = model.get("beta")
            z = state.rows.propagate(q, state.beta)
        if self.inference == "structure":
            return z
        local_model, graph = client.state["model"], client.full_graph
        return forward_with(local_model, graph, model["feature"]) + z

    def shared_predictor(self, model: Message) -> Message:
        """Returns θ_f. The structure branch predicts for the nodes of training only."""
        return dict(model["feature"])

    def single_replies(self) -> tuple[str, ...]:
        """`reveal`, if the server computes the structure features (App. H)."""
        return ("reveal",) if self.structure in ("node2vec", "gdv") else ()

    # ---- the server ----
    def run(self, server: Server) -> None:
        """Algorithms 3, 1 and 2."""
        if self.safe and server.facts.secure is None:
            raise ConfigError(
                "method.safe needs run.secure = true: in a plain run the server reads every "
                "message between clients and every client's gradient"
            )
        sizes = server.sum(self.setup)["nodes"]
        numbering = Numbering.of(dict(zip(server.clients, sizes.tolist(), strict=True)))
        server.relay(self.greet, nodes=sizes)
        self._compute_powers(server, self.hops, loops=True, numbering=numbering)
        filled = server.sum(self.finish)
        server.notes |= {
            "entries of the structure matrix": int(filled["entries"]),
            "nodes without entries in it": int(filled["empty"]),
            "neighbour lists that clients can read": int(filled["lists"]),
            "edges of others that clients can read": int(filled["pairs"]),
        }
        if filled["missed"]:
            server.notes["blocks that did not arrive"] = int(filled["missed"])
        if self.structure != "hop2vec":
            server.ask(self.adopt, rows=self._fixed_features(server, numbering))
        if self.private:
            server.relay(self.request)
            exposed = int(server.sum(self.exposed)["nodes"])
            server.notes["embeddings that a peer can solve for"] = exposed
        model = self.begin(server, self._initial_model(server, numbering))
        for _ in server.rounds(self.rounds):
            if self.private:
                self._private_round(server, model, numbering)
            else:
                total = server.sum(self.gradient, model=model)
                if self.audit:
                    self._overhear(server, self._pull(server, model, total["gradient"]["S"]))
                self.follow(server, total)
                server.evaluate(model=model)
        if self.audit:
            self._audit(server)

    # ---- what the server can read ----
    @summed
    @phase(read="int64[]", labelled="int64[]")
    def compare(self, client: Client, guess: Tensor) -> Message:
        """Counts the training nodes whose label was guessed. guess: a class for all n nodes."""
        train, own = client.graph.train, state_of(client).numbering.span(client.name)
        right = (guess[own] == client.graph.y)[train]
        return {"read": right.sum(), "labelled": train.sum()}

    def _pull(self, server: Server, model: Message, gradient: Tensor) -> Tensor:
        """Returns what the server learns of Σ_v Ā_vu (ŷ_v - y_v) from the summed gradient of S."""
        if self.absorbed:
            return gradient
        g = Encoder(self.widths(server.facts.num_classes), 0.0)
        return pull_of(gradient, model["S"], g, model["structure"])

    def _overhear(self, server: Server, pull: Tensor) -> None:
        """Adds up what the rounds show. Fresh noise averages out, labels do not."""
        known = server.state.setdefault(OVERHEARD, torch.zeros_like(pull))
        known += pull

    def _audit(self, server: Server) -> None:
        """Notes how many training labels `labels_guessed` reads after all rounds."""
        found = server.sum(self.compare, guess=labels_guessed(server.state[OVERHEARD]))
        server.notes |= {
            "training labels that the server can read": int(found["read"]),
            "training labels": int(found["labelled"]),
        }

    def _initial_model(self, server: Server, numbering: Numbering) -> Message:
        """Returns θ_f, θ_s, S and β at the start, those that the settings need."""
        facts = server.facts
        model: Message = {"feature": server.model()}
        if not self.absorbed:
            with seeded(server.rng("structure")):
                model["structure"] = weights(Encoder(self.widths(facts.num_classes), facts.dropout))
        if self.structure == "hop2vec" and not self.private:
            width = facts.num_classes if self.absorbed else self.d_s
            rows = [
                self._initial_rows(facts.seed, client, numbering.size(client), width)
                for client in numbering.names
            ]
            model["S"] = torch.cat(rows)
        if self.learn_beta:
            model["beta"] = torch.tensor(self.coefficients())
        return model

    def _initial_rows(self, seed: int, client: str, nodes: int, width: int) -> Tensor:
        """Returns a client's rows of S at the start, from a seed that all parties know."""
        return self.spread_of_s * torch.randn(nodes, width, generator=_stream_of_s(seed, client))

    def _own_rows(self, client: Client, width: int) -> Tensor:
        """Returns the client's rows of S at the start (`private`).

        In a simulation they are those of the plain form. A deployed client draws its own.
        """
        shape = (client.graph.num_nodes, width)
        simulated = _stream_of_s(client.facts.seed, client.name)
        return client.secret_normal(shape, self.spread_of_s, simulated)

    # ---- pictures ----
    def artifacts(self, client: Client) -> Message:
        """Adds the client's rows of Ā, as the protocol left them, in cells."""
        others, state = super().artifacts(client), state_of(client)
        beta = state.beta if self.learn_beta else torch.ones(1)
        if not hasattr(state, "rows") or beta is None:
            return others
        shown = client_adjacency(client.name, state.numbering, state.rows, beta)
        return {**others, "adjacency": shown}

    def joint_artifacts(self, federation: Federation) -> Message:
        """Adds the exact Ā in cells, before pruning, unless the graph is too large for that."""
        beta = None if self.learn_beta else self.coefficients()
        shown = exact_adjacency(federation, self.hops, self.used, beta)
        return {**super().joint_artifacts(federation), "adjacency": shown}


def _stream_of_s(seed: int, client: str) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(seed, "hop2vec", client))
