"""What a client of FedStruct keeps from one phase to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.data.sparse import Sparse
from fedloom.methods.fedstruct.powers import Numbering, Numbers, PartyAdjacency, Rows
from fedloom.nn.encoder import Encoder
from fedloom.privacy import bfv


@dataclass(frozen=True)
class Query:
    """The sums that a peer needs over own nodes (`private`).

    Attributes:
        sums: How many sums are not empty.
        nodes: How many own nodes are in them.
        weight: Ā_vu, [sums, own nodes].
    """

    sums: int
    nodes: int
    weight: Sparse


@dataclass(frozen=True)
class Queries:
    """A peer's queries. training: for its training nodes. every: also for its held-out nodes."""

    training: Query
    every: Query


@dataclass(repr=False)
class StructureState:
    """Everything that the phases of one client share.

    An attribute exists once the phase in brackets has run. Nothing of it is saved: all of it is
    rebuilt before the rounds of a resumed run, or in each round.
    """

    # Who holds which nodes, and the edges that both ends know.
    numbering: Numbering = field(init=False)  # [greet]
    adjacency: PartyAdjacency = field(init=False)  # [meet]

    # The power that is being computed.
    loops: bool = field(init=False)  # [start] whether the powers are of A + I or of A
    hop: int = field(init=False)  # [start] which power `power` is
    power: csr_matrix = field(init=False)  # [start, absorb, cut] own rows, [own nodes, n]
    used_powers: dict[int, csr_matrix] = field(init=False)  # [start] {hop: a power that Ā needs}
    return_probabilities: dict[int, NDArray[np.float32]] = field(
        init=False
    )  # [start] {step: [n_i]}
    missed: int = field(init=False)  # [start] expected blocks that did not arrive

    # Which rows of the blocks travel (`blocks`).
    sent: dict[str, csr_matrix] = field(init=False)  # [start, trust] {peer: weights of its rows}
    arriving: dict[str, csr_matrix] = field(init=False)  # [start] {peer: weights of own rows}
    left_out: dict[str, csr_matrix] = field(
        init=False
    )  # [start] {peer: links whose row stays away}
    known: dict[str, csr_matrix] = field(init=False)  # [start, absorb] {peer: its rows, as known}
    # [absorb] others' rows of Â that arrived, with their nodes
    single: list[tuple[Numbers, csr_matrix]] = field(default_factory=list)

    # BFV (`encrypt`).
    keys: bfv.Keys = field(init=False)  # [publish]
    peer_keys: dict[str, NDArray[np.uint8]] = field(init=False)  # [trust]

    # The structure branch.
    rows: Rows = field(init=False)  # [finish] Ā for all own nodes
    train_rows: Rows = field(init=False)  # [finish] Ā for the own training nodes
    fixed: Tensor = field(init=False)  # [adopt] S [n, d_s], if it is not trained
    encoder: Encoder | None = None  # g; with `private`, its weights are those loaded last
    beta: Tensor | None = None  # [evaluate] the last β, if it is trained

    # Sums instead of embeddings (`private`).
    asked: Tensor = field(init=False)  # [request] own nodes v that need sums, training nodes first
    queries: dict[str, Queries] = field(init=False)  # [request, register] what each client needs
    q: Tensor | None = None  # [answer] g(s_u) of own nodes; `settle` sends the gradient through it
    own_sums: Tensor | None = None  # [answer] the sums over own nodes for own nodes
    z: Tensor | None = None  # [hear] z of all own nodes, 0 for those that were not asked for


def state_of(client: Client) -> StructureState:
    """Returns the client's state, created at first use."""
    state: StructureState = client.memory.setdefault("fedstruct", StructureState())
    return state


def gradients_of(parameters: nn.Module | Mapping[str, Tensor]) -> Message:
    """Returns the gradients of a module's parameters, or of tensors, by name.

    They are zeros where there is none.
    """
    named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in sorted(dict(named).items())
    }
