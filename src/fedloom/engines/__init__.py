"""Engines: how phases get run.

Each file has a class `Engine(method, clients, patience)` with `call(phase, {client: message}) -> {client: reply or Absent}`, `snapshot`,
`restore`, `models`, `exhibits`, `about`, `finish` and `close`, as in `loop`; those with workers take their number too. `round` is set
before a call; `outlives` says whether others go on when a client fails, `interrupts` whether they can do without who is late. A file
"_name.py" holds what several share.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fedloom.errors import unknown
from fedloom.faults import Patience as Patience  # what every engine is told

if TYPE_CHECKING:
    from fedloom.method import Method
    from fedloom.party import Client


def engine_names() -> list[str]:
    """The engines there are, by file name."""
    return [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]


def engine_class(name: str) -> Any:
    """The engine of that name; a ConfigError if there is none, or if what it needs is not installed."""
    if name not in engine_names():
        raise unknown("engine", name, engine_names())
    return importlib.import_module(f"fedloom.engines.{name}").Engine


def has_workers(name: str) -> bool:
    """Whether the engine of that name deals the clients to workers."""
    from fedloom.engines._groups import Groups

    return issubclass(engine_class(name), Groups)


def make_engine(
    name: str, method: "Method", clients: Iterable["Client"], workers: int = 0, patience: Patience = Patience()
) -> Any:  # fmt: skip
    """The engine of that name over these clients. workers: how many, in engines that have them (0 = chosen)."""
    cls = engine_class(name)
    return cls(method, clients, workers, patience) if has_workers(name) else cls(method, clients, patience)
