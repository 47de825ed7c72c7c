"""Engines: how phases get run. Each file has a class `Engine(method, clients)` with `call(phase, {client: message}) -> {client: reply}`."""

import importlib
import pkgutil
from typing import Any

from fedloom.errors import unknown


def engine_names() -> list[str]:
    """The engines there are, by file name."""
    return [m.name for m in pkgutil.iter_modules(__path__)]


def engine_class(name: str) -> Any:
    """The engine of that name."""
    if name not in engine_names():
        raise unknown("engine", name, engine_names())
    return importlib.import_module(f"fedloom.engines.{name}").Engine
