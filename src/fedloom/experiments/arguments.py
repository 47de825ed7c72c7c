"""Arguments: checks of what a user passes to `run`, `compare` and `tune`.

Each error says what was passed, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path

from torch import nn

from fedloom.core.method import Method, Plugin
from fedloom.data.display import shown
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, unknown
from fedloom.experiments.settings import RunSettings

_DIVIDE = "fedloom.divide({}, clients=10)"
RUN_SETTINGS = tuple(f.name for f in fields(RunSettings))


def is_graph(value: object) -> bool:
    """Returns whether a value is a Graph, or a graph of PyG or networkx."""
    package = type(value).__module__.partition(".")[0]
    of_others = package in ("torch_geometric", "networkx") and not isinstance(value, nn.Module)
    return isinstance(value, Graph) or of_others


def is_method(value: object) -> bool:
    """Returns whether a value is a Method, or the class of a method or a plug-in."""
    is_class = isinstance(value, type) and issubclass(value, (Method, Plugin))
    return is_class or isinstance(value, Method)


def require_method(value: object, federation: object) -> None:
    """Raises a ConfigError if a value is not a method.

    Args:
        value: What was passed as the method.
        federation: What was passed as the federation: maybe the two are swapped.
    """
    if isinstance(value, (str, Mapping)) or is_method(value):
        return
    if isinstance(value, Federation) or is_graph(value):
        if isinstance(federation, str) or is_method(federation):
            name = repr(federation) if isinstance(federation, str) else "method"
            given = "federation" if isinstance(value, Federation) else _DIVIDE.format("graph")
            raise ConfigError(
                f"run: the arguments are swapped; write fedloom.run({name}, {given}, ...)"
            )
        if isinstance(value, Federation):
            raise ConfigError(
                'run: the method is missing; write fedloom.run("fedavg", federation, ...)'
            )
        raise ConfigError(
            f"run: the first argument is {shown(value)}, must be a method. Divide the graph first: "
            f'federation = {_DIVIDE.format("graph")}; then fedloom.run("fedavg", federation)'
        )
    if isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module)):
        raise ConfigError(
            f"method is {_kind(value)}, a torch module; that is a model: "
            'fedloom.run("fedavg", federation, model=...)'
        )
    raise ConfigError(
        f"method is {shown(value)}, must be a name (see fedloom.method_names()), the path of a "
        "method file, a Method or its class, or a table with a name"
    )


def require_federation(value: object) -> Federation:
    """Returns the federation. Raises a ConfigError if it is not one."""
    if isinstance(value, Federation):
        return value
    if value is None:
        raise ConfigError(
            "federation is missing; make one with "
            f"{_DIVIDE.format('graph')}, or fedloom.Federation([graph_a, graph_b])"
        )
    if is_graph(value):
        raise ConfigError(
            f"federation is {shown(value)}, must be a Federation; divide it first: "
            f"{_DIVIDE.format('graph' if isinstance(value, Graph) else 'data')}"
        )
    if isinstance(value, (str, Path)):
        name = repr(str(value))
        raise ConfigError(
            f"federation is {name}, must be a Federation; load and divide it first: "
            f"{_DIVIDE.format(f'fedloom.load({name})')}"
        )
    if isinstance(value, Mapping) and any(map(is_graph, value.values())):
        raise ConfigError(
            "federation is a dict of graphs, must be a Federation: "
            "fedloom.Federation(list(graphs.values()), names=list(graphs))"
        )
    if isinstance(value, Collection) and any(map(is_graph, value)):
        convert = "" if all(isinstance(graph, Graph) for graph in value) else (
            "; graphs of PyG and networkx are converted by fedloom.from_pyg and "
            "fedloom.from_networkx"
        )  # fmt: skip
        raise ConfigError(
            f"federation is a {type(value).__name__} of graphs, must be a Federation: "
            f"fedloom.Federation(graphs) for a graph of each party{convert}"
        )
    if is_method(value):
        raise ConfigError(f"federation is {shown(value)}, a method; it is the first argument")
    raise ConfigError(
        f"federation is {shown(value)}, must be a Federation: {_DIVIDE.format('graph')}"
    )


def require_settings(value: object) -> None:
    """Raises a ConfigError if a value is neither None nor RunSettings."""
    if value is None or isinstance(value, RunSettings):
        return
    how = "fedloom.RunSettings(**settings)" if isinstance(value, Mapping) else (
        "fedloom.RunSettings(seed=0, ...)"
    )  # fmt: skip
    raise ConfigError(f"settings is {shown(value)}, must be a RunSettings: {how}")


def require_known(options: Collection[str], of_method: Collection[str], method: str) -> None:
    """Raises a ConfigError if an option is neither a setting of the method nor of the run.

    Args:
        options: The names of the options.
        of_method: The names of the method's settings.
        method: The method's name.
    """
    for key in options:
        if key not in of_method and key not in RUN_SETTINGS:
            kind = f"setting of the run and of method {method!r}:"
            raise unknown(kind, key, (*of_method, *RUN_SETTINGS))


def _kind(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
