"""Engines: where phases run. One file or package per engine; `base` is what they share.

| engine            | clients run                                                      |
|-------------------|------------------------------------------------------------------|
| loop              | one after another, in plain PyTorch: the reference               |
| wire              | as in the loop, and every message passes the encoder and decoder |
| stacked           | in groups, each phase once or in lockstep                        |
| processes         | in worker processes of this machine, as in the loop              |
| stacked_processes | in worker processes of this machine, as in the stacked engine    |
| ray               | in the actors of a Ray cluster, as in the loop                   |
| flower            | in processes of their own, over Flower (`fedloom.deploy.engine`) |

"auto" is none of them: a run with it takes the fastest that gives it what it asks for
(`fedloom.experiments.engine_choice`).
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from fedloom.engines.base import EngineFactory
from fedloom.errors import unknown

if TYPE_CHECKING:  # mypy checks here that every engine satisfies the protocol
    from fedloom.engines import loop, processes, ray, stacked, stacked_processes, wire

    _CHECKED: tuple[EngineFactory, ...] = (
        loop.Engine,
        wire.Engine,
        stacked.Engine,
        processes.Engine,
        stacked_processes.Engine,
        ray.Engine,
    )

AUTO = "auto"
_ELSEWHERE = {"flower": "fedloom.deploy.engine"}  # an engine that needs a later layer
_FORKS = ("processes", "stacked_processes")
_WITH_WORKERS = (*_FORKS, "ray")
_IN_LOCKSTEP = ("stacked", "stacked_processes")


def engine_names() -> list[str]:
    """Returns the names of all engines."""
    here = [m.name for m in pkgutil.iter_modules(__path__)]
    return sorted([n for n in here if not n.startswith("_") and n != "base"] + [*_ELSEWHERE])


def engine_choices() -> list[str]:
    """Returns the valid values of `run.engine`: "auto", and the names of all engines."""
    return [AUTO, *engine_names()]


def engine_class(name: str) -> EngineFactory:
    """Returns the engine of that name.

    Raises a ConfigError if there is none, or if a package that it needs is not installed.
    """
    if name not in engine_names():
        raise unknown("engine", name, engine_names())
    module = importlib.import_module(_ELSEWHERE.get(name, f"fedloom.engines.{name}"))
    engine: EngineFactory = module.Engine
    return engine


def has_workers(name: str) -> bool:
    """Returns whether the engine of that name distributes the clients over workers."""
    return name in _WITH_WORKERS


def forks(name: str) -> bool:
    """Returns whether the workers of the engine of that name are forks of this process."""
    return name in _FORKS


def in_lockstep(name: str) -> bool:
    """Returns whether the engine of that name runs groups of clients in lockstep."""
    return name in _IN_LOCKSTEP
