"""Fixed structure features s_u: DEG, FED*, and those of a server that knows the graph (App. H)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import Computed, phase, runs_once, summed
from fedloom.core.server import Server
from fedloom.methods._shared.graphlets import graphlet_features
from fedloom.methods._shared.node2vec import node2vec
from fedloom.methods._shared.structure import degree_features
from fedloom.methods.fedstruct.powers import Numbering, matrix_of
from fedloom.methods.fedstruct.state import state_of


class FixedFeatures(ABC):
    """The phases of `structure` other than "hop2vec"."""

    structure: str
    d_s: int
    walk: int

    @abstractmethod
    def _compute_powers(
        self, server: Server, count: int, loops: bool, numbering: Numbering
    ) -> None:
        """Has every client compute its rows of the first `count` powers."""

    @abstractmethod
    def _keep_power(self, client: Client) -> None:
        """Keeps what is needed of the current power."""

    @property
    def described(self) -> int:
        """How many numbers describe a node (DEG and FED*)."""
        return self.walk + 1 if self.structure == "fed" else 1

    @runs_once
    @summed
    @phase(
        rows=Computed(
            lambda method, facts, message, reply: (
                ("", "float32", (int(message["nodes"]), method.described)),
            )
        )
    )
    def describe(self, client: Client, nodes: Tensor) -> Message:
        """Return probabilities (FED*) and degrees of own nodes, in their rows; zeros elsewhere."""
        state = state_of(client)
        columns = [state.adjacency.mean_degrees()]
        if self.structure == "fed":
            self._keep_power(client)
            steps = range(1, self.walk + 1)
            columns = [*(state.return_probabilities[step] for step in steps), *columns]
            del state.power, state.return_probabilities
        rows = torch.zeros(int(nodes), self.described)
        rows[state.numbering.span(client.name)] = torch.from_numpy(np.stack(columns, 1))
        return {"rows": rows}

    @phase(edges="int64[2,n]")
    def reveal(self, client: Client) -> Message:
        """All edges to own nodes, by node numbers, for a server that may know the graph."""
        state = state_of(client)
        rows, columns = state.adjacency.first_power(loops=False).nonzero()
        start = state.numbering.span(client.name).start
        return {"edges": torch.from_numpy(np.stack([columns, rows + start]).astype(np.int64))}

    @phase()
    def adopt(self, client: Client, rows: Tensor) -> Message:
        """Computes the fixed structure features of all nodes from what was downloaded."""
        state_of(client).fixed = self.features(rows)
        return {}

    def features(self, rows: Tensor) -> Tensor:
        """Returns S [n, d_s] from the rows that travel."""
        if self.structure == "deg":
            return degree_features(rows[:, 0], self.d_s)
        if self.structure == "fed":
            degrees = degree_features(rows[:, -1], self.d_s - self.walk)
            return torch.cat([rows[:, :-1], degrees], 1)
        return rows

    def _fixed_features(self, server: Server, numbering: Numbering) -> Tensor:
        """Returns what the server sends to `adopt`: a row for each of the n nodes."""
        nodes = numbering.total
        if self.structure in ("deg", "fed"):
            if self.structure == "fed":
                self._compute_powers(server, self.walk, loops=False, numbering=numbering)
            return server.sum(self.describe, nodes=torch.tensor(nodes))["rows"]
        edges = torch.cat(list(server.ask(self.reveal).column("edges").values()), 1).numpy()
        adjacency = matrix_of(edges[1], edges[0], (nodes, nodes))
        if self.structure == "node2vec":
            return node2vec(adjacency, self.d_s, server.rng("node2vec"))
        counts = graphlet_features(adjacency)
        return torch.cat([counts, torch.zeros(nodes, self.d_s - counts.shape[1])], 1)
