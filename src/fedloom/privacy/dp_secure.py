"""Differential privacy under secure sums: every client adds a share of the noise.

The server sees the masked sum of what the clients send, so nobody sees a sum without its noise. A
client clips its reply, truncates it to the fixed point of the secure sum, and adds discrete
Gaussian noise (Kairouz, Liu and Steinke, ICML 2021). The shares of the fewest clients that a sum
can have make up the whole noise: if more clients stay, there is more noise than promised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core.aggregation import Refuse, Request
from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.ledger import MEASURING
from fedloom.core.message import Message, Schema, flatten
from fedloom.core.phase import BoundPhase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.errors import ConfigError
from fedloom.privacy import dp, dp_noise
from fedloom.privacy.dp_accounting import Budget
from fedloom.privacy.secure_aggregation import Layout, SecureAggregation
from fedloom.privacy.secure_sum import is_complete


def fewest_shares(terms: SecureTerms, parties: int, population: int) -> int:
    """Returns how many clients' shares make up the noise: the fewest that a sum can have.

    Args:
        terms: The terms of the sum.
        parties: The clients that are asked.
        population: All clients.
    """
    quorum = terms.quorum(parties)
    if is_complete(parties, terms.neighbours):
        return quorum
    return max(1, min(quorum, terms.least(population)))


def share_scale(facts: Facts, change: float, parties: int) -> float:
    """Returns the standard deviation of a client's share of the noise.

    Args:
        facts: The facts of the run.
        change: The sensitivity of the sum.
        parties: The clients that are asked.
    """
    assert facts.privacy is not None
    assert facts.secure is not None
    shares = fewest_shares(facts.secure, parties, facts.num_clients)
    return facts.privacy.noise * change / math.sqrt(shares)


def require_fine(facts: Facts, change: float) -> None:
    """Raises a ConfigError if the fixed point is too coarse, or too narrow, for the noise."""
    assert facts.privacy is not None
    assert facts.secure is not None
    scale = share_scale(facts, change, facts.privacy.expected)
    bits = facts.secure.fraction_bits(facts.privacy.expected)
    largest = 20 * scale + facts.privacy.clip
    if np.ldexp(scale, bits) < dp_noise.FINEST or largest > facts.secure.range:
        raise ConfigError(
            f"run.secure_range is {facts.secure.range:g} with run.secure_bits = "
            f"{facts.secure.bits}: noise of standard deviation {scale:.3g} needs a range of at "
            f"least {largest:.3g} and a unit of at most {scale / dp_noise.FINEST:.3g}"
        )


def private_vector(
    client: Client, bound: BoundPhase, reply: Message, sent: Message, parties: int
) -> NDArray[np.unsignedinteger]:
    """Returns what a client masks: its bounded reply and its share of the noise.

    Args:
        client: The client.
        bound: The phase.
        reply: Its reply, of the right schema.
        sent: What it was sent.
        parties: The clients that are asked.
    """
    facts = client.facts
    assert facts.privacy is not None
    assert facts.secure is not None
    terms, secure, flat = facts.privacy, facts.secure, flatten(sent)
    schema = bound.phase.reply_schema(bound.method, facts, sent)
    bits = secure.fraction_bits(parties)
    vector = dp.as_vector(bound.phase, reply, flat, dp.protected(bound.phase, schema))
    whole = dp.bounded_units(vector, terms, bits)
    scale = share_scale(facts, dp.sensitivity(bound, facts), parties)
    draw = dp_noise.source_of(client.rng, terms.seeded)
    whole += dp_noise.discrete_gaussian(len(whole), float(np.ldexp(scale, bits)), draw)
    return whole.view(np.uint64).astype(secure.word)


class PrivateSecureAggregation(SecureAggregation):
    """The server learns noisy sums and nothing else.

    Args:
        facts: The facts of the run.
        budget: What the run has spent.
        folder: The run folder; None keeps the cohorts in memory.
    """

    def __init__(self, facts: Facts, budget: Budget, folder: Path | None = None):
        assert facts.privacy is not None
        assert facts.secure is not None
        super().__init__(facts.secure, folder)
        self.privacy, self.budget = facts.privacy, budget
        self._budget = budget

    def replies(
        self,
        server: Server,
        request: Request,
        needed: int | None = None,
        refuse: Refuse | None = None,
    ) -> Replies:
        """Asks for a phase without a reply; refuses any other."""
        dp.refuse_reply(request, self.privacy)
        return super().replies(server, request, needed, refuse)

    def sum(self, server: Server, request: Request) -> Message:
        """Returns the noisy sum."""
        return self._release(server, request)

    def mean(self, server: Server, request: Request) -> Message:
        """Returns the noisy mean. Clients have equal weights."""
        return self._release(server, request)

    def peer_messages(self, server: Server, request: Request, book_as: str | None) -> Replies:
        """Refuses."""
        raise dp.unbounded(request.phase.name, self.privacy.unit)

    def _release(self, server: Server, request: Request) -> Message:
        name = request.phase.name
        if name not in MEASURING:
            dp.common_message(server, request)
            require_fine(server.facts, dp.sensitivity(request.phase, server.facts))
            self._budget.spend(server.round, name)  # clients may open the sum as soon as it begins
        return self._total(server, request)[0]

    def layout(self, phase: BoundPhase, reply: Schema) -> Layout:
        """Only what has noise is added up."""
        if phase.name in MEASURING:
            return super().layout(phase, reply)
        return {key: ("float64", shape) for key, _, shape in dp.protected(phase.phase, reply)}

    def opened(
        self,
        server: Server,
        phase: BoundPhase,
        added: dict[str, NDArray],
        reply: Schema,
        messages: Mapping[str, Message],
    ) -> Message:
        """Returns the noisy sum or mean."""
        if phase.name in MEASURING:
            return super().opened(server, phase, added, reply, messages)
        sent: dict[str, torch.Tensor] = flatten(next(iter(messages.values())))
        shielded = dp.protected(phase.phase, reply)
        total = np.concatenate([np.empty(0), *(added[name].ravel() for name, _, _ in shielded)])
        sizes = {name: self._said(server, phase, name, messages) for name, _, _ in reply}
        return dp.as_message(phase.phase, total, reply, sent, self.privacy, sizes)

    @staticmethod
    def _said(server: Server, phase: BoundPhase, name: str, messages: Mapping[str, Message]) -> int:
        """Returns the sum of a size over the clients, as they said it at the start."""
        limit = phase.phase.ranges.get(name)
        return sum(server.said(client).get(limit.low, 0) for client in messages) if limit else 0
