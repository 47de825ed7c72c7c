"""Engine choice: which engine runs a run whose engine is "auto".

| the run                                        | engine    | why                              |
|------------------------------------------------|-----------|----------------------------------|
| asks for workers, a deadline or a grace period | processes | it has them                      |
| asks for a quorum below 1                      | loop      | in lockstep, a client that fails |
|                                                |           | stops its group                  |
| has one client, or only clients that fill a    | loop      | there is nothing to batch        |
| group by themselves                            |           |                                  |
| does not fit into the memory in lockstep       | loop      | it keeps the graphs once         |
| is any other                                   | stacked   | the fastest in one process       |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fedloom.data.federation import Federation
from fedloom.engines import AUTO
from fedloom.engines.stacked.engine import groups
from fedloom.experiments import memory_estimate
from fedloom.experiments.memory_estimate import Need

if TYPE_CHECKING:
    from fedloom.core.facts import Facts
    from fedloom.experiments.settings import RunSettings


class Choice(NamedTuple):
    """The engine of a run.

    Attributes:
        engine: Its name.
        reason: Why it was chosen; "" if the settings name it.
        need: The memory that the run needs in it.
    """

    engine: str
    reason: str
    need: Need


def choose_engine(settings: RunSettings, federation: Federation, facts: Facts) -> Choice:
    """Returns the engine of a run: the one that the settings name, or the fastest that fits.

    Args:
        settings: The run settings. Only `engine = "auto"` leaves a choice.
        federation: The clients' graphs, as the method gets them.
        facts: What every party knows.
    """

    def chosen(engine: str, reason: str = "") -> Choice:
        need = memory_estimate.predict(federation, facts, engine, settings.workers)
        return Choice(engine, reason, need)

    if settings.engine != AUTO:
        return chosen(settings.engine)
    if settings.engine_required:
        return chosen(*settings.engine_required)
    # If distributing clients over several cores pays off without being asked for, say so here.
    nodes = {n: g.num_nodes for n, g in zip(federation.names, federation.graphs, strict=True)}
    if all(len(names) == 1 for names in groups(facts, nodes)):
        only = "one client" if len(nodes) == 1 else "every client fills a group by itself"
        return chosen("loop", only)
    lockstep = chosen("stacked", "the fastest in one process")
    free = memory_estimate.available()
    if free is not None and lockstep.need.total > free:
        return chosen("loop", "the stacked engine would need more memory than there is")
    return lockstep
