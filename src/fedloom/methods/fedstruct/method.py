"""FedStruct: predictions from local features plus structure embeddings spread over the whole graph, whose edges no party holds together.

Aliakbari, Östman, Graell i Amat: "Decoupled Subgraph Federated Learning", ICLR 2025. One graph is cut over K clients; both owners of an
edge between clients know it (Algorithm 3), in a secure run nobody else does, and no feature, label or embedding of features is ever sent.
Gradients are, and they tell of labels: with `absorbed`, ∇S of a node that one training node v reaches is a multiple of ŷ_v - y_v.

    ŷ_v = softmax(h_v + z_v)                                                              `logits`
    h_v    the run's model on the client's own graph (a decoupled GCN in the paper)
    z_v    Σ_u Ā_vu g(s_u), over all nodes u of the whole graph                           `spread`
    Ā      Σ_l β_l Â^l with Â = D̃^-1 (A + I) of the whole graph; here Â^L_s unless β is given
    s_u    HOP2VEC: trained; DEG: one-hot degree; FED*: return probabilities and degree;
           NODE2VEC and GDV: if the server may know the graph (App. H)

Before training, each client obtains its rows Ā^[i] (App. D): in hop l client k sends every client i that has edges to it

    B_ik = Ã_k^[i] [Â^[k]]^(l-1)           `offer`, and i forms [Â^[i]]^l = (D̃^[i])^-1 Σ_k B_ik          `absorb`

`prune` keeps what travels sparse. protocol: of each B, the ⌈p/K⌉ n_i largest entries in the columns of each client stay (App. D; here of
the own block B_ii too, which does not travel, or a client with few edges to others would end with a dense matrix). global:
the p n largest entries of the whole Â^l stay (Sec. 5.3); clients find that threshold by counting, byte by byte, nobody shows an entry.
none: all entries (the paper's -F). Then FedSGD: one summed gradient a round, of θ = (θ_f, θ_s), S and, if it is learned, β (Eq. 14, 16).

What travels (c classes, n nodes, n_i of client i; `offer` is client to client, relayed by the server, sealed in a secure run):
    once     up    nodes      n_i
             to k  source, target, position,
                   incoming                   the edges shared with k, the own ends' numbers, the direction   `greet`
    L_s - 1 times
             to k  count, column, value       a block B                                                      `offer`
             up    counts                     global pruning only: how many entries have which byte          `tally`, `ties`
             FED* has the same done for its return probabilities, `walk` - 1 times more
    once     up    rows       DEG: degrees; FED*: also 50 return probabilities; NODE2VEC, GDV: the edges      `describe`, `reveal`
             down  rows       the same of all n nodes                                                        `adopt`
    a round  down  model      θ and, HOP2VEC, S [n, d_s]; with `absorbed` S is [n, c] and there is no θ_s (Prop. 2)
             up    gradient   the same, of the loss summed over the client's training nodes; their number

`private` (App. G.1): a client keeps its rows of S to itself. Others tell it once which sums over its nodes they need; each round it answers
with those sums, Σ_u Ā_vu g(s_u), c numbers for each of their training nodes v, and gets back its own rows of the summed gradient. It
refuses to answer a peer for as many nodes v as it has nodes in the sums (`query_limit`). That is a bound on a number, not a proof: a node
that is alone in a sum is told by it, and peers can join what they know; the run's notes count what single peers can solve for. S starts
from a seed that all know, and the server sees the summed gradients, by which it can follow S. The numbers are those of the plain form,
but for dropout in g, which the owner of u draws once for all. Scores take the same sums for validation and test nodes, which count too.

`encrypt`: the blocks go out dense, under the receiver's CKKS key; the server adds up ciphertexts, so that it reads none of them and the
receiver learns Σ_k B_ik only. 32 bytes for each of n_i n numbers, for each pair of clients and hop: for small federations.

Departures: one Adam at the server (the authors' code; the paper writes plain gradient descent). Self-loops of the data are replaced by the
one of A + I. In a directed graph a node gathers from those that point at it; the authors' way is the other (`data.flow = "reversed"`).
Cross edges count 1. FED*'s return probabilities are of the powers that the same protocol makes of D^-1 A, pruned likewise. GDV counts
graphlets of up to four nodes. Evaluation sends S again (the ledger books it apart). The server's part in App. H is to make the features;
Ā is still made by the clients.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csr_matrix, diags_array
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import Computed, peer_messages, phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.federation import Federation
from fedloom.data.seeds import stream_seed
from fedloom.data.sparse import Sparse
from fedloom.errors import ConfigError, MessageError, Refusal
from fedloom.methods._shared import cells as binned
from fedloom.methods._shared import structure
from fedloom.methods.fedsgd import FedSGD
from fedloom.methods.fedstruct import powers as hops
from fedloom.methods.fedstruct.powers import Numbering, Part
from fedloom.nn.layers import dropout
from fedloom.nn.training import backward, make_optimizer, seeded
from fedloom.nn.weights import load_weights, weights
from fedloom.privacy import ckks

KINDS = ("hop2vec", "deg", "fed", "node2vec", "gdv")
GRID = (
    2.0**-22
)  # what is encrypted is rounded to multiples of it, and again when it is decrypted: CKKS's noise cannot be seen


class Encoder(nn.Module):
    """g: LayerNorm, then linear layers with ReLU and dropout between them."""

    def __init__(self, widths: list[int], share_dropped: float):
        super().__init__()
        self.share_dropped = share_dropped
        self.norm = nn.LayerNorm(widths[0])
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise(widths))

    def forward(self, s: Tensor, rng: torch.Generator | None) -> Tensor:
        """Takes [nodes, d_s], gives [nodes, classes]; dropout only with a generator."""
        first, *others = self.layers
        h = first(self.norm(s))
        for layer in others:
            h = layer(dropout(torch.relu(h), self.share_dropped, rng))
        return h


@dataclass
class Rows:
    """Rows of Â^l, for each l that has a part in Ā: which nodes, and over which columns of S they reach."""

    nodes: Tensor  # own positions, [rows]
    reach: Tensor  # numbers of the nodes whose s_u matter, [columns]
    powers: list[Sparse]  # [rows, columns] each

    @classmethod
    def of(cls, nodes: Tensor, powers: list[csr_matrix]) -> "Rows":
        """Takes the powers' own rows [own nodes, n]."""
        own, total = powers[0].shape
        taken = (
            powers if len(nodes) == own else [csr_matrix(power[nodes.numpy()]) for power in powers]
        )  # no copy of what is large
        reached = np.zeros(total, bool)
        for power in taken:
            reached[power.indices] = True
        reach = np.flatnonzero(reached)
        narrow = taken if len(reach) == total else [csr_matrix(power[:, reach]) for power in taken]
        return cls(nodes, torch.from_numpy(reach), [hops.as_sparse(power) for power in narrow])

    def spread(self, q: Tensor, beta: Tensor | None) -> Tensor:
        """z = Σ_l β_l Â^l q for q [columns, classes]; without β the powers are one matrix, Ā itself."""
        if beta is None:
            return self.powers[0] @ q
        return torch.stack(
            [b * (power @ q) for b, power in zip(beta, self.powers, strict=True)]
        ).sum(0)


@dataclass(frozen=True)
class FedStruct(FedSGD):
    """FedSGD with a second branch that knows the whole graph's structure."""

    structure: str = setting("hop2vec", "structure features s_u", choices=KINDS)
    hops: int = setting(10, "L_s, hops of the structure branch", at_least=1, tune="1..20")
    beta: str = setting(
        "", "β_0,β_1,...,β_L_s of the filter, separated by commas (empty = the last hop alone)"
    )
    learn_beta: bool = setting(False, "whether β is trained")
    prune: str = setting(
        "protocol", "what is left out of the powers of Â", choices=("protocol", "global", "none")
    )
    p: int = setting(30, "entries a node, on average, that pruning keeps", at_least=1)
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
        "what predictions are made of: both branches, or structure alone",
        choices=("both", "structure"),
    )
    private: bool = setting(
        False, "each client keeps its rows of S and answers with sums over them (App. G.1)"
    )
    query_limit: int = setting(
        0,
        "private: a peer's nodes that a client answers for (0 = fewer than its own that are in the sums)",
        at_least=0,
    )
    encrypt: bool = setting(
        False, "blocks travel under CKKS and are added up unseen (needs tenseal)"
    )

    uses_cross_edges: ClassVar[bool] = True
    transductive: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("node",)
    requires_all: ClassVar[tuple[str, ...]] = (
        "describe",
        "reveal",
    )  # fixed features are made once: nodes left out would have none for good
    discloses_to_server: ClassVar[str] = (
        "if the run is not secure, the edges between clients, relayed blocks of the powers of the adjacency, and every client's gradients; "
        "with structure = deg or fed every node's degree (fed: and return probabilities), with node2vec or gdv all edges, otherwise the "
        "structure embeddings S and their summed gradients, from which labels can be guessed"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coefficients()
        self.widths(1)
        trained = self.structure == "hop2vec"
        for field in ("absorbed", "private"):
            if getattr(self, field) and not trained:
                raise ConfigError(
                    f"method.{field} is for structure = 'hop2vec', got {self.structure!r}"
                )
        if self.private and self.learn_beta:
            raise ConfigError(
                "method.learn_beta: β cannot be trained with private = true, the sums are of the β agreed on beforehand"
            )
        if self.structure == "fed" and self.d_s <= self.walk:
            raise ConfigError(
                f"method.d_s is {self.d_s}, must be more than the {self.walk} return probabilities (method.walk)"
            )
        if self.structure == "gdv" and self.d_s < structure.ORBITS:
            raise ConfigError(
                f"method.d_s is {self.d_s}, must be at least {structure.ORBITS}, the number of orbits"
            )

    # ---- settings, worked out ----
    def coefficients(self) -> list[float]:
        """β_0 to β_L_s."""
        if not self.beta:
            return [0.0] * self.hops + [1.0]
        try:
            found = [float(text) for text in self.beta.split(",")]
        except ValueError:
            found = []
        if len(found) != self.hops + 1 or not all(map(np.isfinite, found)) or not any(found):
            raise ConfigError(
                f"method.beta is {self.beta!r}, must be {self.hops + 1} numbers separated by commas, β_0 to β_{self.hops}"
            )
        return found

    def widths(self, num_classes: int) -> list[int]:
        """Of g: d_s, the hidden ones, c."""
        texts = [text.strip() for text in self.hidden.split(",")] if self.hidden else []
        if not all(text.isdecimal() and int(text) for text in texts):
            raise ConfigError(
                f"method.hidden is {self.hidden!r}, must be whole numbers separated by commas, each at least 1"
            )
        return [self.d_s, *map(int, texts), num_classes]

    @property
    def described(self) -> int:
        """How many numbers of each node make its fixed structure features."""
        return self.walk + 1 if self.structure == "fed" else 1

    @property
    def used(self) -> list[int]:
        """The hops that have a part in Ā."""
        return [hop for hop, b in enumerate(self.coefficients()) if b or self.learn_beta]

    # ---- who is there: numbers for nodes, and edges that both ends know ----
    @summed
    @phase(nodes="int64[K]")
    def setup(self, client: Client) -> Message:
        """A model to compute gradients with; how many nodes there are here."""
        super().setup(client)
        nodes = torch.zeros(client.facts.num_clients, dtype=torch.int64)
        nodes[client.facts.clients.index(client.name)] = client.graph.num_nodes
        return {"nodes": nodes}

    @peer_messages(read_by="meet")
    @phase(source="int64[n]", target="int64[n]", position="int32[n]", incoming="bool[n]")
    def greet(self, client: Client, nodes: Tensor) -> Message:
        """To each client that shares edges: which, by the ids that both know, and the own ends' places in the own list of nodes."""
        client.memory["numbering"] = numbering = Numbering.of(
            dict(zip(client.facts.clients, nodes.tolist(), strict=True))
        )
        if (
            told := numbering.size(client.name)
        ) != client.graph.num_nodes:  # it was not there when nodes were counted, for example
            raise MessageError(
                f"client {client.name!r} in 'greet': tensor 'nodes' gives it {told} nodes, it has {client.graph.num_nodes}"
            )
        return _shared_edges(client)

    @phase()
    def meet(self, client: Client, inbox: Message | None = None) -> Message:
        """Holds what peers know of the shared edges against what is known here; then the own part of A is complete."""
        graph, numbering, mine = client.graph, client.memory["numbering"], _shared_edges(client)
        gathered, spread = {}, {}
        for peer in sorted({*mine, *(inbox or {})}):
            if inbox is None or peer not in inbox:
                continue  # it is not there: what leads to its nodes is left out
            here, there = mine.get(peer, _NO_EDGES), inbox[peer]
            _require_same_edges(client.name, peer, here, there)
            own, remote = here["position"].numpy(), there["position"].numpy()
            size = numbering.size(peer)
            if len(remote) and (remote.min() < 0 or remote.max() >= size):
                raise MessageError(
                    f"client {client.name!r}: letter of {peer!r}: tensor 'position' holds a number outside 0 to {size - 1}"
                )
            incoming = here["incoming"].numpy()
            shape = (graph.num_nodes, size)
            gathered[peer] = _ones(own[incoming], remote[incoming], shape)
            spread[peer] = _ones(remote[~incoming], own[~incoming], shape[::-1])
        source, target = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]].numpy()
        weight = (
            None
            if graph.edge_weight is None
            else graph.edge_weight[graph.edge_index[0] != graph.edge_index[1]].numpy()
        )
        inner = _ones(target, source, (graph.num_nodes, graph.num_nodes), weight)
        client.memory["part"] = Part(client.name, numbering, inner, gathered, spread)
        return {}

    # ---- powers of Â, hop by hop (App. D, Algorithm 3) ----
    @phase()
    def start(self, client: Client, loops: Tensor) -> Message:
        """The first power, which each client knows: Â with self-loops, or D^-1 A without."""
        memory = client.memory
        memory["loops"], memory["power"], memory["hop"] = (
            bool(loops),
            memory["part"].first_power(bool(loops)),
            1,
        )
        memory["kept"], memory["missed"] = {}, 0
        return {}

    @peer_messages(read_by="absorb")
    @phase(count="int32[n]", column="int32[n]", value="float32[n]")
    def offer(self, client: Client) -> Message:
        """B_ik = Ã_k^[i] [Â^[k]]^(l-1) to each client i that gathers from here."""
        return {peer: hops.packed(block) for peer, block in self._blocks(client).items()}

    def _blocks(self, client: Client) -> dict[str, csr_matrix]:
        part: Part = client.memory["part"]
        return {
            peer: self._pruned(part.block_for(peer, client.memory["power"]), part, peer)
            for peer in part.spread
        }

    def _pruned(self, block: csr_matrix, part: Part, receiver: str) -> csr_matrix:
        if self.prune != "protocol":
            return block
        share = -(-self.p // len(part.numbering.names))
        return hops.strongest_by_owner(block, share * part.numbering.size(receiver), part.numbering)

    @phase()
    def absorb(self, client: Client, inbox: Message | None = None) -> Message:
        """[Â^[i]]^l = (D̃^[i])^-1 Σ_k B_ik, its own term included."""
        part: Part = client.memory["part"]
        arrived = []
        for peer, letter in sorted((inbox or {}).items()):
            who = f"client {client.name!r}: letter of {peer!r}"
            if peer not in part.gathered:
                raise MessageError(f"{who}: a block from a client that no own node gathers from")
            rows = part.rows_from(peer)
            block = hops.unpacked(letter, len(rows), part.numbering.total, who)
            arrived.append(hops.placed(block, rows, part.inner.shape[0]))
        expected = {peer for peer in part.gathered if len(part.rows_from(peer))}
        client.memory["missed"] += len(
            expected - set(inbox or {})
        )  # who met, and then was not there: the power lacks its part
        self._advance(client, arrived)
        return {}

    def _advance(self, client: Client, arrived: list[csr_matrix]) -> None:
        memory, part = client.memory, client.memory["part"]
        self._keep(client)
        own = self._pruned(part.own_block(memory["power"], memory["loops"]), part, client.name)
        memory["power"] = part.next_power([own, *arrived], memory["loops"])
        memory["hop"] += 1

    def _keep(self, client: Client) -> None:
        """Puts aside, before the next power takes its place, what is needed of this one."""
        memory, part = client.memory, client.memory["part"]
        if not memory["loops"]:
            memory["kept"][memory["hop"]] = memory["power"].diagonal(
                part.numbering.span(client.name).start
            )
        elif memory["hop"] in self.used:
            memory["kept"][memory["hop"]] = memory["power"]

    # ---- the p·n largest entries of the whole matrix, found by counting ----
    @summed
    @phase(counts="int64[256]")
    def tally(self, client: Client, prefix: Tensor, depth: Tensor) -> Message:
        """Of the own entries whose leading bytes are `prefix`, how many have which next byte."""
        return {
            "counts": torch.from_numpy(hops.tally(client.memory["power"], int(prefix), int(depth)))
        }

    @summed
    @phase(counts="int64[K]")
    def ties(self, client: Client, bits: Tensor) -> Message:
        """How many own entries are equal to the threshold, in the own place."""
        counts = torch.zeros(client.facts.num_clients, dtype=torch.int64)
        equal = int((hops.ranks(client.memory["power"]) == int(bits)).sum())
        counts[client.facts.clients.index(client.name)] = equal
        return {"counts": counts}

    @phase()
    def cut(self, client: Client, bits: Tensor, ties: Tensor) -> Message:
        """Drops what is below the threshold, and what is equal to it beyond the client's share of such entries."""
        client.memory["power"] = hops.cut_below(client.memory["power"], int(bits), int(ties))
        return {}

    def _cut_globally(self, server: Server, most: int) -> None:
        bits, above = (
            0,
            0,
        )  # the threshold's bytes found so far; how many entries are surely above it
        for depth in range(4):
            counts = server.sum(self.tally, prefix=torch.tensor(bits), depth=torch.tensor(depth))[
                "counts"
            ]
            if depth == 0 and int(counts.sum()) <= most:
                return
            from_top = counts.flip(0).cumsum(0)
            place = int((above + from_top < most).sum())
            above += int(from_top[place - 1]) if place else 0
            bits = bits * 256 + 255 - place
        equal = dict(
            zip(
                server.clients,
                server.sum(self.ties, bits=torch.tensor(bits))["counts"].tolist(),
                strict=True,
            )
        )
        room, share = most - above, {}
        for client in sorted(equal):
            share[client] = min(equal[client], room)
            room -= share[client]
        server.ask(
            self.cut,
            each={
                c: {"bits": torch.tensor(bits), "ties": torch.tensor(share[c])}
                for c in server.clients
            },
        )

    # ---- the same under encryption ----
    @peer_messages(read_by="trust", encrypted=False)
    @phase(key="uint8[n]")
    def publish(self, client: Client) -> Message:
        """The public part of fresh CKKS keys, to each client that will send a block."""
        client.memory["keys"] = keys = ckks.Keys.generate()
        return {
            peer: {"key": torch.from_numpy(keys.public)} for peer in client.memory["part"].gathered
        }

    @phase()
    def trust(self, client: Client, inbox: Message | None = None) -> Message:
        """Keeps the peers' public keys."""
        client.memory["peers"] = {
            peer: letter["key"].numpy() for peer, letter in (inbox or {}).items()
        }
        return {}

    @peer_messages(read_by="absorb_encrypted", encrypted=False)
    @phase(cipher="uint8[n]")
    def offer_encrypted(self, client: Client) -> Message:
        """B_ik, all n_i n entries of it, under the receiver's key: where they are not 0 would tell as much as they do."""
        part: Part = client.memory["part"]
        sent = {}
        for peer, block in self._blocks(client).items():
            full = hops.placed(block, part.rows_of(peer), part.numbering.size(peer)).toarray()
            cipher = ckks.encrypt(
                client.memory["peers"][peer], np.rint(full.ravel().astype(np.float64) / GRID) * GRID
            )
            sent[peer] = {"cipher": torch.from_numpy(cipher)}
        return sent

    @phase()
    def absorb_encrypted(self, client: Client, inbox: Message | None = None) -> Message:
        """As `absorb`, from the sum of all blocks, which the server added up."""
        part: Part = client.memory["part"]
        arrived = []
        for letter in (inbox or {}).values():
            size = part.inner.shape[0] * part.numbering.total
            values = client.memory["keys"].decrypt(letter["cipher"].numpy(), size)
            total = np.rint(values / GRID) * GRID
            if total.size and total.min() < 0:
                raise MessageError(
                    f"client {client.name!r}: the sum of its peers' blocks, tensor 'cipher', holds a negative number"
                )
            arrived.append(csr_matrix(total.astype(np.float32).reshape(part.inner.shape[0], -1)))
        self._advance(client, arrived)
        return {}

    def _add_encrypted(
        self, server: Server, keys: dict[str, Tensor], numbering: Numbering
    ) -> dict[str, Message]:
        """One letter to each client, its sender the first who wrote: the sum of all, added up unseen."""
        written: dict[str, dict[str, Any]] = {}
        for sender, sent in server.collect(self.offer_encrypted).items():
            for receiver, letter in sent.items():
                written.setdefault(receiver, {})[sender] = letter["cipher"].numpy()
        added: dict[str, Message] = {}
        for receiver, ciphers in written.items():
            entries = numbering.size(receiver) * numbering.total
            for sender, cipher in ciphers.items():
                try:
                    ckks.require_size(keys[receiver].numpy(), cipher, entries)
                except MessageError as error:
                    raise MessageError(
                        f"client {sender!r} in 'offer_encrypted': tensor '{receiver}/cipher': {error}"
                    ) from None
            total = ckks.add(keys[receiver].numpy(), list(ciphers.values()))
            added.setdefault(min(ciphers), {})[receiver] = {"cipher": torch.from_numpy(total)}
        return added

    def _powers(self, server: Server, count: int, loops: bool, numbering: Numbering) -> None:
        """Algorithm 3: has every client end up with its rows of the last power, and with what it needs of those before."""
        server.ask(self.start, loops=torch.tensor(loops))
        keys = {}
        if self.encrypt and count > 1:
            published = server.collect(self.publish)
            keys = {
                owner: next(iter(sent.values()))["key"] for owner, sent in published.items() if sent
            }
            server.deliver(self.publish, published)
        for _ in range(count - 1):
            if self.encrypt:
                server.deliver(self.offer_encrypted, self._add_encrypted(server, keys, numbering))
            else:
                server.relay(self.offer)
            if self.prune == "global":
                self._cut_globally(server, self.p * numbering.total)

    # ---- Ā and S ----
    @summed
    @phase(entries="int64[]", empty="int64[]", missed="int64[]")
    def finish(self, client: Client) -> Message:
        """Puts Ā^[i] together, for all own nodes and for those with a training label; how full it is."""
        memory, part = client.memory, client.memory["part"]
        self._keep(client)
        place, size = part.numbering.span(client.name).start, part.inner.shape[0]
        every = np.arange(size)
        itself = csr_matrix(
            (np.ones(size, np.float32), (every, every + place)), shape=(size, part.numbering.total)
        )
        powers = [itself if hop == 0 else memory["kept"][hop] for hop in self.used]
        if not self.learn_beta:
            beta = self.coefficients()
            powers = [
                csr_matrix(
                    sum(beta[hop] * power for hop, power in zip(self.used, powers, strict=True)),
                    dtype=np.float32,
                )
            ]
        memory["all"] = Rows.of(torch.arange(size), powers)
        memory["train"] = Rows.of(client.graph.train.nonzero().flatten(), powers)
        for finished in ("power", "kept"):
            del memory[finished]
        filled = sum(np.diff(power.indptr) for power in powers)
        counts = {"entries": filled.sum(), "empty": (filled == 0).sum(), "missed": memory["missed"]}
        return {name: torch.tensor(int(count)) for name, count in counts.items()}

    @summed
    @phase(
        rows=Computed(
            lambda method, facts, message, reply: (
                ("", "float32", (int(message["nodes"]), method.described)),
            )
        )
    )
    def describe(self, client: Client, nodes: Tensor) -> Message:
        """What DEG and FED* are made of: the own nodes' return probabilities (FED*) and degrees, in the own places."""
        memory, part = client.memory, client.memory["part"]
        columns = [part.mean_degrees()]
        if self.structure == "fed":
            self._keep(client)
            columns = [*(memory["kept"][step] for step in range(1, self.walk + 1)), *columns]
            del memory["power"], memory["kept"]
        rows = torch.zeros(int(nodes), self.described)
        rows[part.numbering.span(client.name)] = torch.from_numpy(np.stack(columns, 1))
        return {"rows": rows}

    @phase(edges="int64[2,n]")
    def reveal(self, client: Client) -> Message:
        """All edges that lead to own nodes, by numbers, for a server that may know the graph (App. H)."""
        rows, columns = client.memory["part"].first_power(loops=False).nonzero()
        start = client.memory["numbering"].span(client.name).start
        return {"edges": torch.from_numpy(np.stack([columns, rows + start]).astype(np.int64))}

    @phase()
    def adopt(self, client: Client, rows: Tensor) -> Message:
        """Takes the fixed structure features of all nodes."""
        client.memory["S"] = self.features(rows)
        return {}

    def features(self, rows: Tensor) -> Tensor:
        """S [n, d_s] from what travels of it."""
        if self.structure == "deg":
            return structure.degree_features(rows[:, 0], self.d_s)
        if self.structure == "fed":
            return torch.cat(
                [rows[:, :-1], structure.degree_features(rows[:, -1], self.d_s - self.walk)], 1
            )
        return rows

    def _fixed_features(self, server: Server, numbering: Numbering) -> Tensor:
        nodes = numbering.total
        if self.structure in ("deg", "fed"):
            if self.structure == "fed":
                self._powers(server, self.walk, loops=False, numbering=numbering)
            return server.sum(self.describe, nodes=torch.tensor(nodes))["rows"]
        edges = torch.cat(list(server.ask(self.reveal).column("edges").values()), 1).numpy()
        adjacency = _ones(edges[1], edges[0], (nodes, nodes))
        if self.structure == "node2vec":
            return structure.node2vec(adjacency, self.d_s, server.rng("node2vec"))
        found = structure.graphlet_features(adjacency)
        return torch.cat([found, torch.zeros(nodes, self.d_s - found.shape[1])], 1)

    # ---- training ----
    @summed
    @phase(gradient="=model", labelled="int64[]")
    def gradient(self, client: Client, model: Message) -> Message:
        """∇ of the summed loss w.r.t. θ_f, θ_s, S and β."""
        rows: Rows = client.memory["train"]
        local_model, g = client.state["model"], self._encoder(client)
        load_weights(local_model, model["feature"])
        S = model["S"].requires_grad_() if "S" in model else client.memory["S"]
        beta = model["beta"].requires_grad_() if self.learn_beta else None
        q = S[rows.reach]
        if not self.absorbed:
            load_weights(g, model["structure"])
            q = g(q, client.rng("structure dropout"))
        backward(local_model, self._objective(client, rows, rows.spread(q, beta)))
        trained = (
            {"feature": local_model} if self.absorbed else {"feature": local_model, "structure": g}
        )
        gradient: Message = {name: _gradients(module) for name, module in trained.items()}
        gradient |= {
            name: leaf.grad
            for name, leaf in (("S", S), ("beta", beta))
            if leaf is not None and leaf.requires_grad
        }
        return {"gradient": gradient, "labelled": client.graph.train.sum()}

    def _objective(self, client: Client, rows: Rows, z: Tensor) -> Tensor:
        """Cross-entropy of h + z, summed over the training nodes."""
        model = client.state["model"]
        model.zero_grad()
        logits = model(client.graph, client.rng("dropout")).index_add(0, rows.nodes, z)
        return client.loss(
            logits.softmax(1) if self.double_softmax else logits, client.graph, reduction="sum"
        )

    def _encoder(self, client: Client) -> Encoder:
        """The client's g; its weights are whatever was loaded last."""
        if "g" not in client.memory:
            with seeded(client.rng("structure")):
                client.memory["g"] = Encoder(
                    self.widths(client.facts.num_classes), client.facts.dropout
                )
        g: Encoder = client.memory["g"]
        g.zero_grad()
        return g

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """h + z for the client's nodes, noise off."""
        assert model is not None, "FedStruct evaluates the common model"
        if self.private:
            z: Tensor = client.memory["z"]
        else:
            rows: Rows = client.memory["all"]
            q = (model["S"] if "S" in model else client.memory["S"])[rows.reach]
            if not self.absorbed:
                q = torch.func.functional_call(self._encoder(client), model["structure"], (q, None))
            z = rows.spread(q, model.get("beta"))
            client.memory["beta"] = model.get("beta")
        if self.inference == "structure":
            return z
        return (
            torch.func.functional_call(
                client.state["model"], model["feature"], (client.full_graph,)
            )
            + z
        )

    # ---- pictures ----
    def artifacts(self, client: Client) -> Message:
        """The client's rows of Ā as the protocol left them, in cells: sums of entries, and how many there are."""
        others, memory = super().artifacts(client), client.memory
        beta = memory.get("beta") if self.learn_beta else torch.ones(1)
        if "all" not in memory or beta is None:
            return others
        rows: Rows = memory["all"]
        powers = (
            csr_matrix((p.values.numpy(), p.indices.numpy(), p.offsets.numpy()), shape=p.shape)
            for p in rows.powers
        )
        combined = csr_matrix(sum(float(b) * power for b, power in zip(beta, powers, strict=True)))
        numbering: Numbering = memory["numbering"]
        first = numbering.span(client.name).start
        weight, entries = binned.of_rows(combined, rows.reach.numpy(), first, numbering.total)
        shown: Message = {
            "nodes": torch.tensor(numbering.total), "first": torch.tensor(binned.cell(first, numbering.total)), "beta": beta,
            "weight": torch.from_numpy(weight).float(), "entries": torch.from_numpy(entries).int(),
        }  # fmt: skip
        return {**others, "adjacency": shown}

    def joint_artifacts(self, federation: Federation) -> Message:
        """The exact Ā in cells, before anything is pruned, unless the graph is too large for that; and where clients begin in it.

        If β is learned, it is of each power that has a part in Ā apart.
        """
        numbering = Numbering.of(
            dict(
                zip(federation.names, (graph.num_nodes for graph in federation.graphs), strict=True)
            )
        )
        shown: Message = {"starts": torch.from_numpy(numbering.starts)}
        whole = whole_first_power(federation, numbering)
        if binned.is_affordable(whole, self.hops):
            powers, beta = binned.of_powers(whole, self.hops), np.array(self.coefficients())
            weight = powers[self.used] if self.learn_beta else np.tensordot(beta, powers, 1)[None]
            shown["weight"] = torch.from_numpy(weight).float()
        if binned.reach_is_affordable(whole, self.hops):
            # With self-loops, who is reached in fewer hops is reached in more.
            shown["entries"] = torch.from_numpy(binned.of_reach(whole, max(self.used))).int()
        return {**super().joint_artifacts(federation), "adjacency": shown}

    # ---- private: sums instead of embeddings (App. G.1) ----
    @peer_messages(read_by="register")
    @phase(train="int64[]", count="int32[n]", column="int32[n]", value="float32[n]")
    def request(self, client: Client) -> Message:
        """To each client: over which of its nodes, with which weights Ā_vu, sums are needed; training nodes v come first."""
        graph, numbering, memory = client.full_graph, client.memory["numbering"], client.memory
        train = memory["train"].nodes
        held_out = (~graph.train & (graph.val | graph.test)).nonzero().flatten()
        memory["asked"] = asked = torch.cat([train, held_out])
        every: Rows = memory["all"]
        matrix = every.powers[0]
        taken = csr_matrix(
            (matrix.values.numpy(), matrix.indices.numpy(), matrix.offsets.numpy()),
            shape=matrix.shape,
        )[asked.numpy()]
        column = every.reach.numpy()[taken.indices]
        owner = numbering.owners[column]
        memory["queries"] = {}
        written = {}
        for at in np.unique(owner):
            peer = numbering.names[at]
            span = numbering.span(peer)
            block = hops.chosen(taken, owner == at)
            block = csr_matrix(
                (block.data, column[owner == at] - span.start, block.indptr),
                shape=(len(asked), span.stop - span.start),
            )
            if peer == client.name:
                self._register(client, peer, block, len(train))
            else:
                written[peer] = {"train": torch.tensor(len(train)), **hops.packed(block)}
        return written

    @phase()
    def register(self, client: Client, inbox: Message | None = None) -> Message:
        """Keeps what peers will ask for; draws the own rows of S."""
        own = client.graph.num_nodes
        for peer, letter in (inbox or {}).items():
            who = f"client {client.name!r}: letter of {peer!r}"
            count, train = len(letter["count"]), int(letter["train"])
            if not 0 <= train <= count:
                raise MessageError(f"{who}: tensor 'train' is {train}, must be 0 to {count}")
            self._register(client, peer, hops.unpacked(letter, count, own, who), train)
        width = client.facts.num_classes if self.absorbed else self.d_s
        client.state["S"] = S = self._own_rows(
            client.facts.seed, client.name, own, width
        ).requires_grad_()
        client.state["optimizer of S"] = make_optimizer(
            self.optimizer, [S], self.lr, self.weight_decay
        )
        return {}

    def _register(self, client: Client, peer: str, block: csr_matrix, train: int) -> None:
        block.sum_duplicates()
        block.eliminate_zeros()  # a node with weight 0 is in no sum, and must not raise the bound
        client.memory["queries"][peer] = {
            scope: (
                int((np.diff(rows.indptr) > 0).sum()),
                len(np.unique(rows.indices)),
                hops.as_sparse(rows),
            )
            for scope, rows in (("train", csr_matrix(block[:train])), ("all", block))
        }

    @summed
    @phase(nodes="int64[]")
    def exposed(self, client: Client) -> Message:
        """How many own nodes some peer can solve for, although it asks for fewer sums than there are nodes: alone in a sum, for example."""
        asked = [
            query["all"][2]
            for peer, query in client.memory["queries"].items()
            if peer != client.name
        ]
        found = [
            hops.determined(
                csr_matrix((m.values.numpy(), m.indices.numpy(), m.offsets.numpy()), shape=m.shape)
            )
            for m in asked
        ]
        return {
            "nodes": torch.tensor(len(np.unique(np.concatenate([np.zeros(0, np.int64), *found]))))
        }

    @peer_messages(read_by="hear")
    @phase(sums="float32[n,C]")
    def answer(self, client: Client, everything: Tensor, theta_s: Message | None = None) -> Message:
        """Σ_u Ā_vu g(s_u) over own nodes u, to each client for its training nodes v, or for all that it has labels of."""
        memory, q = client.memory, client.state["S"]
        if theta_s is not None:
            g = self._encoder(client)
            load_weights(g, theta_s)
            q = g(q, None if everything else client.rng("structure dropout"))
        if not everything:
            memory["q"] = q  # the gradient that comes back goes on through it
        sums = {}
        for peer, query in memory["queries"].items():
            asking, involved, matrix = query["all" if everything else "train"]
            limit = self.query_limit or max(involved - 1, 0)
            if peer != client.name and asking > limit:
                raise Refusal(
                    f"client {client.name!r} refuses to answer {peer!r}: sums over {involved} of its nodes for {asking} nodes, more than "
                    f"{limit}; with as many sums as nodes its embeddings could be solved for (method.query_limit sets another bound)"
                )
            sums[peer] = matrix @ q.detach()
        memory["own sums"] = sums.pop(client.name, None)
        return {peer: {"sums": total} for peer, total in sums.items()}

    @phase()
    def hear(self, client: Client, inbox: Message | None = None) -> Message:
        """z of the asked nodes: the peers' sums and the own."""
        memory = client.memory
        parts = {peer: letter["sums"] for peer, letter in (inbox or {}).items()}
        if memory["own sums"] is not None:
            parts[client.name] = memory["own sums"]
        z = torch.zeros(client.graph.num_nodes, client.facts.num_classes)
        for peer in sorted(parts):
            count = len(parts[peer])
            if count not in (len(memory["train"].nodes), len(memory["asked"])):
                raise MessageError(
                    f"client {client.name!r}: letter of {peer!r}: tensor 'sums' has {count} rows, not one for each asked node"
                )
            z.index_add_(0, memory["asked"][:count], parts[peer])
        memory["z"] = z
        return {}

    @summed
    @phase(
        gradient="=model",
        labelled="int64[]",
        pull=Computed(
            lambda method, facts, message, reply: (
                ("", "float32", (int(message["nodes"]), facts.num_classes)),
            )
        ),
    )
    def gradient_of_sums(self, client: Client, model: Message, nodes: Tensor) -> Message:
        """∇ w.r.t. θ_f, and w.r.t. q_u = g(s_u) of all nodes u: Āᵀ (ŷ - y)."""
        local_model, rows = client.state["model"], client.memory["train"]
        load_weights(local_model, model["feature"])
        z = client.memory["z"][rows.nodes].requires_grad_()
        backward(local_model, self._objective(client, rows, z))
        pull = torch.zeros(int(nodes), client.facts.num_classes)
        pull[rows.reach] = rows.powers[0].transpose @ z.grad
        return {
            "gradient": {"feature": _gradients(local_model)},
            "labelled": client.graph.train.sum(),
            "pull": pull,
        }

    @phase()
    def settle(self, client: Client, pull: Tensor) -> Message:
        """One step for the own rows of S along what all clients' losses say of them."""
        optimizer, q = client.state["optimizer of S"], client.memory.pop("q")
        optimizer.zero_grad()
        if self.absorbed:
            q.grad = pull  # it is S itself
        else:
            q.backward(pull)
        optimizer.step()
        return {}

    @summed
    @phase(gradient="=theta_s")
    def settle_and_tell(self, client: Client, pull: Tensor, theta_s: Message) -> Message:
        """The same through g; gives the gradient of θ_s by the own nodes."""
        self.settle(client, pull)
        return {"gradient": _gradients(client.memory["g"])}

    # ---- the server ----
    def run(self, server: Server) -> None:
        """Algorithms 3, 1 and 2."""
        sizes = server.sum(self.setup)["nodes"]
        numbering = Numbering.of(dict(zip(server.clients, sizes.tolist(), strict=True)))
        server.relay(self.greet, nodes=sizes)
        self._powers(server, self.hops, loops=True, numbering=numbering)
        filled = server.sum(self.finish)
        server.notes |= {
            "entries of the structure matrix": int(filled["entries"]),
            "nodes that reach nobody in it": int(filled["empty"]),
        }
        if filled["missed"]:
            server.notes["blocks that did not arrive"] = int(filled["missed"])
        fixed = None if self.structure == "hop2vec" else self._fixed_features(server, numbering)
        if fixed is not None:
            server.ask(self.adopt, rows=fixed)
        if self.private:
            server.relay(self.request)
            server.notes["embeddings that a peer can solve for"] = int(
                server.sum(self.exposed)["nodes"]
            )
        model = self.begin(server, self._initial(server, numbering))
        for _ in server.rounds(self.rounds):
            if self.private:
                self._private_round(server, model, numbering)
            else:
                self.follow(server, server.sum(self.gradient, model=model))
                server.evaluate(model=model)

    def _initial(self, server: Server, numbering: Numbering) -> Message:
        facts = server.facts
        model: Message = {"feature": server.model()}
        if not self.absorbed:
            with seeded(server.rng("structure")):
                model["structure"] = weights(Encoder(self.widths(facts.num_classes), facts.dropout))
        if self.structure == "hop2vec" and not self.private:
            width = facts.num_classes if self.absorbed else self.d_s
            model["S"] = torch.cat(
                [self._own_rows(facts.seed, c, numbering.size(c), width) for c in numbering.names]
            )
        if self.learn_beta:
            model["beta"] = torch.tensor(self.coefficients())
        return model

    def _own_rows(self, seed: int, client: str, nodes: int, width: int) -> Tensor:
        """A client's rows of S at the start: from a seed that all know, so that they need not travel."""
        rng = torch.Generator().manual_seed(stream_seed(seed, "hop2vec", client))
        return self.spread_of_s * torch.randn(nodes, width, generator=rng)

    def _private_round(self, server: Server, model: Message, numbering: Numbering) -> None:
        of_g = {} if self.absorbed else {"theta_s": model["structure"]}
        server.relay(self.answer, everything=torch.tensor(False), **of_g)
        total = server.sum(
            self.gradient_of_sums,
            model={"feature": model["feature"]},
            nodes=torch.tensor(numbering.total),
        )
        pull = total["pull"] / total["labelled"].clamp(min=1)
        each = {c: {"pull": pull[numbering.span(c)]} for c in server.clients}
        if self.absorbed:
            server.ask(self.settle, each=each)
        else:
            of_all = server.sum(self.settle_and_tell, each=each, **of_g)["gradient"]
            # `follow` takes sums over training nodes, and this one is of their mean already.
            total["gradient"]["structure"] = {
                name: g * total["labelled"].clamp(min=1) for name, g in of_all.items()
            }
        self.follow(server, total)
        if server.due():
            server.relay(self.answer, book_as="evaluate", everything=torch.tensor(True), **of_g)
            server.evaluate(model=model)


def _gradients(module: nn.Module) -> Message:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in sorted(module.named_parameters())
    }


def _ones(rows: Any, columns: Any, shape: tuple[int, int], weight: Any = None) -> csr_matrix:
    values = np.ones(len(rows), np.float32) if weight is None else weight
    return csr_matrix((values, (rows, columns)), shape=shape)


def whole_first_power(federation: Federation, numbering: Numbering) -> csr_matrix:
    """Â = D̃^-1 (A + I) of the whole graph [n, n], float64: what no party has, put together from all of them."""
    starts = [numbering.span(name).start for name in federation.names]
    targets, sources, weights_of = (
        [np.arange(numbering.total)],
        [np.arange(numbering.total)],
        [np.ones(numbering.total)],
    )
    order = [np.argsort(graph.node_id.numpy(), kind="stable") for graph in federation.graphs]
    ids = [graph.node_id.numpy()[by] for graph, by in zip(federation.graphs, order, strict=True)]
    for start, graph in zip(starts, federation.graphs, strict=True):
        source, target = graph.edge_index.numpy()
        weight = (
            np.ones(len(source))
            if graph.edge_weight is None
            else graph.edge_weight.numpy().astype(np.float64)
        )
        proper = source != target
        targets.append(start + target[proper])
        sources.append(start + source[proper])
        weights_of.append(weight[proper])
        own, remote, owner, direction = graph.cross_edges.numpy()
        for peer in np.unique(owner):
            here = (owner == peer) & (direction == 1)
            targets.append(start + own[here])
            sources.append(starts[peer] + order[peer][np.searchsorted(ids[peer], remote[here])])
            weights_of.append(np.ones(int(here.sum())))
    ends = np.concatenate(targets), np.concatenate(sources)
    matrix = csr_matrix(
        (np.concatenate(weights_of), ends), shape=(numbering.total, numbering.total)
    )
    return csr_matrix(diags_array(1 / np.asarray(matrix.sum(1)).ravel()) @ matrix)


# ---- edges between clients ----
_NO_EDGES = {
    "source": torch.zeros(0, dtype=torch.int64), "target": torch.zeros(0, dtype=torch.int64),
    "position": torch.zeros(0, dtype=torch.int32), "incoming": torch.zeros(0, dtype=torch.bool),
}  # fmt: skip


def _shared_edges(client: Client) -> dict[str, dict[str, Tensor]]:
    """Per peer the edges shared with it, in an order that both see: ids of both ends, the own end's place, whether it leads here.

    An edge that is there twice is listed twice: inside a client it would count twice, too.
    """
    own, remote, owner, direction = client.graph.cross_edges
    found = {}
    for number in owner.unique().tolist():
        there = owner == number
        here, outside, inward = own[there], remote[there], direction[there] == 1
        inside = client.graph.node_id[here]
        source, target = torch.where(inward, outside, inside), torch.where(inward, inside, outside)
        # Ids of different clients may be the same; which end is whose the direction says, seen from the client that is first by name.
        peer = client.facts.clients[number]
        seen = inward if client.name < peer else ~inward
        order = torch.from_numpy(np.lexsort([seen.numpy(), target.numpy(), source.numpy()]))
        found[peer] = {
            "source": source[order],
            "target": target[order],
            "position": here[order].int(),
            "incoming": inward[order],
        }
    return found


def _require_same_edges(name: str, peer: str, here: Any, there: Message) -> None:
    if len({len(tensor) for tensor in there.values()}) > 1:
        raise MessageError(
            f"client {name!r}: letter of {peer!r}: tensors {', '.join(map(repr, there))} differ in length"
        )
    expected = {"source": here["source"], "target": here["target"], "incoming": ~here["incoming"]}
    differing = [key for key, tensor in expected.items() if not torch.equal(tensor, there[key])]
    if not differing:
        return
    mine = Counter(
        zip(
            here["source"].tolist(), here["target"].tolist(), here["incoming"].tolist(), strict=True
        )
    )
    theirs = Counter(
        zip(
            there["source"].tolist(),
            there["target"].tolist(),
            (~there["incoming"]).tolist(),
            strict=True,
        )
    )
    for only, knows, lacks in ((mine - theirs, name, peer), (theirs - mine, peer, name)):
        for source, target, _ in sorted(only):
            raise MessageError(
                f"cross edge {source} -> {target}: client {knows!r} knows it, client {lacks!r} does not; both owners have to"
            )
    raise MessageError(
        f"client {name!r}: letter of {peer!r}: tensor {differing[0]!r} lists the shared edges in another order"
    )
