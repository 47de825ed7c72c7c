"""The stacked_processes engine: worker processes, each with the stacked engine over its clients.

It is for federations in which a round has tens of milliseconds of arithmetic or more, on a machine
with free cores. Results equal the loop engine's up to rounding, as those of the stacked engine do.

A worker answers with one tensor for each name, if its replies have one schema. The engine joins the
workers' tensors, so a round with a thousand clients costs it a few copies.
"""

from typing import ClassVar

from fedloom.engines import processes, stacked
from fedloom.engines.base import Details, EngineFactory


class Engine(processes.Engine):
    """Runs groups of clients in lockstep, in worker processes."""

    tolerates_failures: ClassVar[bool] = False  # a client that fails stops its group
    inside: ClassVar[EngineFactory] = stacked.Engine

    def details(self) -> Details:
        """Returns the workers, and the groups and calls of all of them as in the stacked engine."""
        return {**super().details(), **self.details_inside()}
