"""Engine choice: which engine runs a run whose engine is "auto".

It is the first of these that fits:

| the run                                        | engine            | why                        |
|------------------------------------------------|-------------------|----------------------------|
| asks for a deadline or a grace period          | processes         | it has them                |
| asks for workers and a quorum below 1          | processes         | in lockstep, a client that |
|                                                |                   | fails stops its group      |
| asks for workers                               | stacked_processes | the fastest with workers   |
| asks for a quorum below 1                      | loop              | as above                   |
| computes much (`HIDDEN_VALUES`), on free cores | stacked_processes | the fastest                |
| is any other                                   | stacked           | the fastest in one process |
| does not fit into the memory in that one       | loop              | it needs the least memory  |

An engine does not fit if it needs more memory than there is, or forks where a fork cannot train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fedloom._system import free_cores
from fedloom.data.federation import Federation
from fedloom.experiments import memory_estimate
from fedloom.experiments.memory_estimate import CannotForkError, Need

if TYPE_CHECKING:
    from fedloom.core.facts import Facts
    from fedloom.experiments.settings import RunSettings

# From here on two workers pay off: nodes x width of the model, over all clients. With fewer, a
# round is so short that the messages between processes take a large part of what they save.
HIDDEN_VALUES = 1_000_000


class Choice(NamedTuple):
    """The engine of a run.

    Attributes:
        engine: Its name.
        reason: Why it was chosen; "" if the settings name it.
        need: The memory that the run needs in it.
        workers: The number of its workers; 0 lets the engine choose.
    """

    engine: str
    reason: str
    need: Need
    workers: int


def choose_engine(settings: RunSettings, federation: Federation, facts: Facts) -> Choice:
    """Returns the engine of a run: the one that the settings name, or the fastest that fits.

    Args:
        settings: The run settings. Only `engine = "auto"` leaves a choice.
        federation: The clients' graphs, as the method gets them.
        facts: What every party knows.
    """

    def chosen(engine: str, reason: str = "", workers: int = settings.workers) -> Choice:
        need = memory_estimate.predict(federation, facts, engine, workers)
        return Choice(engine, reason, need, workers)

    if settings.engine_required:
        engine, reason = settings.engine_required
        return chosen(engine, "" if settings.engine == engine else reason)
    nodes = {n: g.num_nodes for n, g in zip(federation.names, federation.graphs, strict=True)}
    free = memory_estimate.available()
    if (workers := useful_workers(settings, facts, nodes)) > 1:
        with suppress(CannotForkError):
            found = chosen("stacked_processes", f"the fastest on {workers} cores", workers)
            if free is None or found.need.total <= free:
                return found
    found = chosen("stacked", "the fastest in one process")
    if free is None or found.need.total <= free:
        return found
    return chosen("loop", "the stacked engine would need more memory than there is")


def useful_workers(settings: RunSettings, facts: Facts, nodes: Mapping[str, int]) -> int:
    """Returns how many workers pay off: one per free core, as far as there is work for them.

    Args:
        settings: The run settings.
        facts: What every party knows.
        nodes: The number of nodes of each client.
    """
    if not hasattr(os, "memfd_create"):
        return 1  # `fedloom.engines.processes` needs it
    hidden = sum(count * facts.width_of(facts.model_of[c]) for c, count in nodes.items())
    return min(free_cores() // settings.threads, len(nodes), 2 * hidden // HIDDEN_VALUES)
