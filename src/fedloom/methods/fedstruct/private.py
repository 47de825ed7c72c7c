"""Sums instead of embeddings (`private`, App. G.1): a client keeps its rows of S to itself.

Other clients ask it once for sums over some of its nodes. In each round it answers with these sums,
Σ_u Ā_vu g(s_u): c numbers for each of their training nodes v. It gets back its own rows of the
summed gradient and takes the step itself.

A client refuses to answer a peer for as many nodes v as it has nodes in the sums (`query_limit`).
That bounds a number and proves nothing: the only node in a sum is revealed by it, and peers can
combine what they know. The run's notes count the embeddings that a single peer can solve for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import Computed, peer_messages, phase, summed
from fedloom.core.server import Server
from fedloom.errors import MessageError, Refusal
from fedloom.methods.fedstruct import powers
from fedloom.methods.fedstruct.powers import Numbering, Rows
from fedloom.methods.fedstruct.state import Queries, Query, gradients_of, state_of
from fedloom.nn.encoder import Encoder
from fedloom.nn.training import backward, make_optimizer
from fedloom.nn.weights import load_weights


class PrivateSums(ABC):
    """The phases of `private`. They replace `gradient`."""

    absorbed: bool
    d_s: int
    query_limit: int
    noise: float
    audit: bool
    lr: float
    weight_decay: float
    optimizer: str

    @abstractmethod
    def _encoder(self, client: Client) -> Encoder:
        """Returns the client's g."""

    @abstractmethod
    def _objective(self, client: Client, rows: Rows, z: Tensor) -> Tensor:
        """Returns the loss of h + z, summed over the training nodes."""

    @abstractmethod
    def _own_rows(self, client: Client, width: int) -> Tensor:
        """Returns the client's rows of S at the start, which no other party has in a deployment."""

    @abstractmethod
    def _noise(self, client: Client, shape: tuple[int, ...]) -> Tensor:
        """Returns the client's share of the noise on the sum over all clients."""

    @abstractmethod
    def _overhear(self, server: Server, pull: Tensor) -> None:
        """Adds up what the rounds show, for `audit`."""

    @abstractmethod
    def follow(self, server: Server, total: Message) -> None:
        """Takes the server's step."""

    # ---- once: which sums are needed ----
    @peer_messages(read_by="register")
    @phase(train="int64[]", count="int32[n]", column="int32[n]", value="float32[n]")
    def request(self, client: Client) -> Message:
        """Asks each client for sums over some of its nodes, with weights Ā_vu, in every round.

        Training nodes v come first, then validation and test nodes, which scores need.
        """
        graph, state = client.full_graph, state_of(client)
        train, numbering = state.train_rows.nodes, state.numbering
        held_out = (~graph.train & (graph.val | graph.test)).nonzero().flatten()
        state.asked = asked = torch.cat([train, held_out])
        needed = powers.as_scipy(state.rows.powers[0])[asked.numpy()]
        column = state.rows.reach.numpy()[needed.indices]
        owner = numbering.owners[column]
        state.queries = {}
        written = {}
        for at in np.unique(owner):
            peer = numbering.names[at]
            span = numbering.span(peer)
            block = powers.select_entries(needed, owner == at)
            block = csr_matrix(
                (block.data, column[owner == at] - span.start, block.indptr),
                shape=(len(asked), span.stop - span.start),
            )
            if peer == client.name:
                state.queries[peer] = _queries(block, len(train))
            else:
                written[peer] = {"train": torch.tensor(len(train)), **powers.packed(block)}
        return written

    @phase()
    def register(self, client: Client, inbox: Message | None = None) -> Message:
        """Keeps what peers will ask for, and draws the own rows of S."""
        own = client.graph.num_nodes
        for peer, message in (inbox or {}).items():
            who = f"client {client.name!r}: peer message from {peer!r}"
            count, train = len(message["count"]), int(message["train"])
            if not 0 <= train <= count:
                raise MessageError(f"{who}: tensor 'train' is {train}, must be 0 to {count}")
            block = powers.unpacked(message, count, own, who)
            state_of(client).queries[peer] = _queries(block, train)
        width = client.facts.num_classes if self.absorbed else self.d_s
        client.state["S"] = S = self._own_rows(client, width).requires_grad_()
        client.state["optimizer of S"] = make_optimizer(
            self.optimizer, [S], self.lr, self.weight_decay
        )
        return {}

    @summed
    @phase(nodes="int64[] in 0..nodes")
    def exposed(self, client: Client) -> Message:
        """Counts the own nodes whose embeddings some peer can solve for, within the bound.

        The only node in a sum is an example.
        """
        queries = state_of(client).queries
        solved = [
            powers.determined(powers.as_scipy(query.every.weight))
            for peer, query in queries.items()
            if peer != client.name
        ]
        nodes = np.unique(np.concatenate([np.zeros(0, np.int64), *solved]))
        return {"nodes": torch.tensor(len(nodes))}

    # ---- each round ----
    @peer_messages(read_by="hear")
    @phase(sums="float32[n,C]")
    def answer(self, client: Client, everything: Tensor, theta_s: Message | None = None) -> Message:
        """Sends each client its sums Σ_u Ā_vu g(s_u) over own nodes u.

        everything: False: for its training nodes v. True: for all its nodes with labels, to score.
        """
        state, q = state_of(client), client.state["S"]
        if theta_s is not None:
            g = self._encoder(client)
            load_weights(g, theta_s)
            q = g(q, None if everything else client.rng("structure dropout"))
        if not everything:
            state.q = q
        sums = {}
        for peer, queries in state.queries.items():
            query = queries.every if everything else queries.training
            limit = self.query_limit or max(query.nodes - 1, 0)
            if peer != client.name and query.sums > limit:
                raise Refusal(
                    f"client {client.name!r} refuses to answer {peer!r}: sums over {query.nodes} "
                    f"of its nodes for {query.sums} nodes, more than {limit}; with as many sums as "
                    "nodes its embeddings could be solved for (method.query_limit sets another "
                    "bound)"
                )
            sums[peer] = query.weight @ q.detach()
        state.own_sums = sums.pop(client.name, None)
        return {peer: {"sums": total} for peer, total in sums.items()}

    @phase()
    def hear(self, client: Client, inbox: Message | None = None) -> Message:
        """Adds the peers' sums and the own ones: z of the nodes that were asked for."""
        state = state_of(client)
        parts = {peer: message["sums"] for peer, message in (inbox or {}).items()}
        if state.own_sums is not None:
            parts[client.name] = state.own_sums
        z = torch.zeros(client.graph.num_nodes, client.facts.num_classes)
        for peer in sorted(parts):
            count = len(parts[peer])
            if count not in (len(state.train_rows.nodes), len(state.asked)):
                raise MessageError(
                    f"client {client.name!r}: peer message from {peer!r}: tensor 'sums' has "
                    f"{count} rows, not one for each asked node"
                )
            z.index_add_(0, state.asked[:count], parts[peer])
        state.z = z
        return {}

    @summed
    @phase(
        gradient="=model",
        labelled="int64[] in 0..train",
        pull=Computed(
            lambda method, facts, message, reply: (
                ("", "float32", (int(message["nodes"]), facts.num_classes)),
            )
        ),
    )
    def gradient_of_sums(self, client: Client, model: Message, nodes: Tensor) -> Message:
        """∇ with respect to θ_f, and to q_u = g(s_u) of all nodes u: `pull` = Āᵀ (ŷ - y)."""
        state, local_model = state_of(client), client.state["model"]
        rows = state.train_rows
        load_weights(local_model, model["feature"])
        assert state.z is not None, "'gradient_of_sums' comes after 'hear'"
        z = state.z[rows.nodes].requires_grad_()
        backward(local_model, self._objective(client, rows, z))
        pull = torch.zeros(int(nodes), client.facts.num_classes)
        assert z.grad is not None
        pull[rows.reach] = rows.powers[0].transpose @ z.grad
        if self.noise:
            pull += self._noise(client, tuple(pull.shape))
        return {
            "gradient": {"feature": gradients_of(local_model)},
            "labelled": client.graph.train.sum(),
            "pull": pull,
        }

    @phase()
    def settle(self, client: Client, pull: Tensor) -> Message:
        """One step of the own rows of S along the gradient of all clients' losses."""
        state, optimizer = state_of(client), client.state["optimizer of S"]
        q, state.q = state.q, None
        assert q is not None, "'settle' comes after 'answer'"
        optimizer.zero_grad()
        if self.absorbed:
            q.grad = pull  # q is S itself
        else:
            q.backward(pull)
        optimizer.step()
        return {}

    @summed
    @phase(gradient="=theta_s")
    def settle_and_tell(self, client: Client, pull: Tensor, theta_s: Message) -> Message:
        """`settle` through g. Answers the gradient of θ_s that comes from own nodes."""
        self.settle(client, pull)
        g = state_of(client).encoder
        assert g is not None, "'settle_and_tell' comes after 'answer'"
        return {"gradient": gradients_of(g)}

    def _private_round(self, server: Server, model: Message, numbering: Numbering) -> None:
        """One round of App. G.1, and its scores if they are due."""
        of_g = {} if self.absorbed else {"theta_s": model["structure"]}
        server.relay(self.answer, everything=torch.tensor(False), **of_g)
        total = server.sum(
            self.gradient_of_sums,
            model={"feature": model["feature"]},
            nodes=torch.tensor(numbering.total),
        )
        if self.audit:
            self._overhear(server, total["pull"])
        labelled = total["labelled"].clamp(min=1)
        pull = total["pull"] / labelled
        each = {c: {"pull": pull[numbering.span(c)]} for c in server.clients}
        if self.absorbed:
            server.ask(self.settle, each=each)
        else:
            gradient = server.sum(self.settle_and_tell, each=each, **of_g)["gradient"]
            # `follow` takes a sum over training nodes. This one is already their mean.
            total["gradient"]["structure"] = {n: g * labelled for n, g in gradient.items()}
        self.follow(server, total)
        if server.due():
            server.relay(self.answer, book_as="evaluate", everything=torch.tensor(True), **of_g)
            server.evaluate(model=model)


def _queries(block: csr_matrix, train: int) -> Queries:
    """Returns the queries in a block [asked nodes, own nodes] whose first rows are for training."""
    block.sum_duplicates()
    block.eliminate_zeros()  # a node with weight 0 is in no sum and must not raise the bound
    return Queries(_query(csr_matrix(block[:train])), _query(block))


def _query(rows: csr_matrix) -> Query:
    asking = int((np.diff(rows.indptr) > 0).sum())
    return Query(asking, len(np.unique(rows.indices)), powers.as_sparse(rows))
