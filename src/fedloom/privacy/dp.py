"""Differential privacy: the server's side of a run whose sums have noise.

    each reply      is clipped to the length C         (unit "client"; the other units: the method)
    their sum       gets noise of z times its sensitivity, on integers       `dp_noise`
    the budget      is charged before the sum is released                    `dp_accounting`
    a mean          is the noisy sum divided by the number of participants that are expected

In a plain run the server is trusted: it sees the replies, clips them and adds the noise. In a
secure run each client clips its own reply and adds a share of the noise (`dp_secure`).
docs/differential-privacy.md has the guarantee and its limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core.aggregation import PlainAggregation, Refuse, Request
from fedloom.core.ledger import MEASURING
from fedloom.core.message import DTYPES, Message, Schema, flatten, unflatten
from fedloom.core.phase import BoundPhase, Phase, phases_of
from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.core.replies import Replies
from fedloom.errors import ConfigError
from fedloom.privacy import dp_noise
from fedloom.privacy.dp_accounting import Budget

if TYPE_CHECKING:
    from fedloom.core.facts import Facts
    from fedloom.core.method import Method
    from fedloom.core.server import Server


# ---- what may be released ----
def unbounded_reply(method: Method, facts: Facts) -> str:
    """Returns the first phase whose reply has no bounded sensitivity; "" if there is none.

    Args:
        method: The method.
        facts: The facts of the run, with `privacy`.
    """
    assert facts.privacy is not None
    if method.sensitivities(facts) is not None:
        return ""
    phases = phases_of(type(method))
    weights = {"size", "count_labels", *(phase.weighted_by for phase in phases.values())}
    for name, phase in phases.items():
        if not phase.reply or name in {*MEASURING, *weights}:
            continue
        if facts.privacy.unit != "client" or not _is_update(phase):
            return name
    return ""


def _is_update(phase: Phase) -> bool:
    """Whether the replies to a phase can be clipped: summed updates or gradients, and sizes."""
    texts = list(phase.reply.values())
    return (
        bool(phase.aggregate)
        and not phase.read_by
        and all(isinstance(text, str) and (text[0] in "=~" or " is " in text) for text in texts)
        and any(isinstance(text, str) and text[0] in "=~" for text in texts)
    )


def releases_per_round(method: Method, facts: Facts) -> int:
    """Returns how many noisy sums a round of the method has."""
    known = method.sensitivities(facts)
    if known is not None:
        return len(known)
    phases = phases_of(type(method)).items()
    return sum(_is_update(phase) for name, phase in phases if name not in MEASURING)


def sensitivity(phase: BoundPhase, facts: Facts) -> float:
    """Returns how much neighbours can change the sum of a phase, as a Euclidean length.

    Raises a ConfigError that names the phase if there is no bound.
    """
    terms = facts.privacy
    assert terms is not None
    known = phase.method.sensitivities(facts)
    if known is None and terms.unit == "client" and _is_update(phase.phase):
        return terms.clip
    if known is None or phase.name not in known:
        raise unbounded(phase.name, terms.unit)
    return float(known[phase.name])


def unbounded(phase: str, unit: str) -> ConfigError:
    """Returns the error of a phase without a bound."""
    return ConfigError(
        f"run.dp_epsilon: what clients answer to {phase!r} has no bounded sensitivity for "
        f"run.dp_unit = {unit!r}; valid: methods that send only weight updates or gradients, as "
        "fedavg does, or that bound their replies, as fedsgd does for nodes "
        "(docs/differential-privacy.md)"
    )


def protected(phase: Phase, schema: Schema) -> Schema:
    """Returns the part of a reply's schema that is clipped and gets noise: its floats."""
    return tuple(row for row in schema if DTYPES[row[1]].is_floating_point)


# ---- one vector ----
def as_vector(
    phase: Phase, reply: Message, sent: Mapping[str, torch.Tensor], schema: Schema
) -> NDArray[np.float64]:
    """Returns the protected part of a reply as one vector. An update becomes its difference.

    Args:
        phase: The phase.
        reply: A client's reply.
        sent: What the client was sent, flat.
        schema: The protected part of its schema.
    """
    flat = flatten(reply)
    parts = [np.empty(0)]
    for name, _, _ in schema:
        tensor = flat[name].detach().double()
        if original := phase.original(name):
            tensor = tensor - sent[original].double()
        parts.append(tensor.reshape(-1).numpy())
    return np.concatenate(parts)


def bounded_units(vector: NDArray[np.float64], terms: PrivacyTerms, bits: int) -> NDArray[np.int64]:
    """Returns a client's vector in units of 2^-bits; clipped if the unit is a client."""
    kept = dp_noise.clipped(vector, terms.clip) if terms.unit == "client" else vector
    return dp_noise.to_units(kept, bits)


def as_message(
    phase: Phase,
    total: NDArray[np.float64],
    schema: Schema,
    sent: Mapping[str, torch.Tensor],
    terms: PrivacyTerms,
    sizes: Mapping[str, int],
) -> Message:
    """Returns a noisy sum as what the server's `sum` or `mean` returns.

    A mean is the sum divided by the expected number of participants, added to what was sent. In a
    sum of the unit "client", every client's size counts as 1: clients weigh equally.

    Args:
        phase: The phase.
        total: The noisy sum of the vectors.
        schema: The schema of the reply.
        sent: What the clients were sent, flat.
        terms: The terms.
        sizes: The sums of the sizes in the replies, which clients say at the start of a run.
    """
    found: dict[str, torch.Tensor] = {}
    share = 1 / terms.expected if phase.aggregate == "mean" else 1.0
    start = 0
    for name, dtype, shape in schema:
        kind = DTYPES[dtype]
        if not kind.is_floating_point:
            count = terms.expected if terms.unit == "client" else sizes[name]
            found[name] = torch.full(shape, count, dtype=kind)
            continue
        size = int(np.prod(shape))
        tensor = torch.from_numpy(total[start : start + size] * share).reshape(shape)
        if original := phase.original(name):
            tensor = tensor + sent[original].double()
        found[name], start = tensor.to(kind), start + size
    return unflatten(found)


def common_message(server: Server, request: Request) -> Message:
    """Returns what all clients are sent; raises a ConfigError if they are sent different things."""
    if request.each is not None:
        raise ConfigError(
            f"run.dp_epsilon: this method sends different messages in {request.phase.name!r}; "
            "a run with differential privacy sends one to all"
        )
    return request.message


# ---- the server's side ----
class PrivateAggregation(PlainAggregation):
    """A trusted server clips the replies, adds them up and adds noise.

    Args:
        terms: The terms.
        budget: What the run has spent.
    """

    def __init__(self, terms: PrivacyTerms, budget: Budget):
        self.terms, self.budget, self._budget = terms, budget, budget

    def replies(
        self,
        server: Server,
        request: Request,
        needed: int | None = None,
        refuse: Refuse | None = None,
    ) -> Replies:
        """Asks for a phase without a reply, or for scores; refuses any other."""
        refuse_reply(request, self.terms)
        return super().replies(server, request, needed, refuse)

    def sum(self, server: Server, request: Request) -> Message:
        """Returns the noisy sum."""
        return self._release(server, request)

    def mean(self, server: Server, request: Request) -> Message:
        """Returns the noisy mean. Clients have equal weights."""
        return self._release(server, request)

    def peer_messages(self, server: Server, request: Request, book_as: str | None) -> Replies:
        """Refuses."""
        raise unbounded(request.phase.name, self.terms.unit)

    def _release(self, server: Server, request: Request) -> Message:
        bound, terms, message = request.phase, self.terms, common_message(server, request)
        scale = terms.noise * sensitivity(bound, server.facts)
        bits = dp_noise.server_bits(scale)
        self._budget.require(bound.name)  # before clients compute for nothing
        messages = server.address(request)
        schema = server.reply_schema(bound, message, server.clients[0])
        shielded, sent = protected(bound.phase, schema), flatten(message)
        size = int(sum(np.prod(shape) for _, _, shape in shielded))
        total, sizes = np.zeros(size, np.int64), dict.fromkeys((name for name, _, _ in schema), 0)
        # Nobody may take part in a round, if participants are drawn by coins.
        replies = server.ask_phase(bound, messages) if messages else Replies({})
        for reply in replies.values():
            total += bounded_units(as_vector(bound.phase, reply, sent, shielded), terms, bits)
            for name, tensor in flatten(reply).items():
                if not tensor.is_floating_point():
                    sizes[name] += int(tensor)
        self._budget.spend(server.round, bound.name)
        draw = dp_noise.source_of(server.rng, terms.seeded)
        total += dp_noise.discrete_gaussian(size, float(np.ldexp(scale, bits)), draw)
        noisy = np.ldexp(total.astype(np.float64), -bits)
        return as_message(bound.phase, noisy, schema, sent, terms, sizes)


def refuse_reply(request: Request, terms: PrivacyTerms) -> None:
    """Raises a ConfigError if a request asks for single replies other than scores."""
    phase = request.phase
    if phase.phase.reply and phase.name not in MEASURING:
        raise unbounded(phase.name, terms.unit)
