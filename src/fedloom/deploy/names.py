"""Names: a party's classes and features in the order of the agreement.

Two parties may number their classes differently: at one, 0 is "fraud", at the other, 0 is "ok".
The names decide, so that a class means the same at every party. The same holds for the columns of
the features.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from fedloom.data.graph import Graph
from fedloom.data.labels import with_classes
from fedloom.errors import DataError


def align_classes(graph: Graph, names: Sequence[str], count: int, where: str) -> Graph:
    """Returns the graph with its classes in the agreed order.

    A graph whose labels are numbers is taken in the agreed order, with a warning. Raises DataError
    if the graph has a class that the agreement does not have, or names that the agreement lacks.

    Args:
        graph: A party's graph.
        names: The agreed classes, in the order of their numbers. Empty: only numbers are agreed.
        count: The agreed number of classes.
        where: The party and its data, with which an error message begins.
    """
    if _are_numbers(graph) and not set(graph.class_names) & set(names):
        return _number_classes(graph, names, count, where)
    own = ", ".join(graph.class_names)
    numbers = tuple(str(number) for number in range(count))
    if not names and set(graph.class_names) <= set(numbers):  # numbers with gaps
        return replace(with_classes(graph, numbers), class_names=())
    if not names:
        raise DataError(
            f"{where}: its classes have names ({own}), but the agreement has none, so that parties "
            "may number them differently; add class_names to [data] of the agreement"
        )
    if unknown := [name for name in graph.class_names if name not in names]:
        raise DataError(
            f"{where} has a class {unknown[0]!r} that the agreement does not have; "
            f"its classes: {own}; agreed classes: {', '.join(names)}"
        )
    agreed = torch.tensor([names.index(name) for name in graph.class_names])
    y = torch.where(graph.y >= 0, agreed[graph.y.clamp(min=0)], graph.y)
    return replace(graph, y=y, num_classes=count, class_names=tuple(names))


def _are_numbers(graph: Graph) -> bool:
    """Returns whether the graph's classes have no names other than their numbers."""
    return graph.class_names in ((), tuple(str(number) for number in range(graph.num_classes)))


def _number_classes(graph: Graph, names: Sequence[str], count: int, where: str) -> Graph:
    """Returns a graph whose classes are numbers, with the agreed names."""
    highest = int(graph.y.max()) if len(graph.y) else -1
    if highest >= count:
        raise DataError(
            f"{where} has a class {highest}, the agreement says num_classes = {count} "
            f"(0 to {count - 1})"
        )
    if names:
        order = ", ".join(f"{number} is {name}" for number, name in enumerate(names))
        warnings.warn(
            f"{where}: its classes are numbers, which are taken in the order of the agreement: "
            f"{order}",
            stacklevel=3,
        )
    return replace(graph, num_classes=count, class_names=tuple(names))


def align_features(graph: Graph, names: Sequence[str], where: str) -> Graph:
    """Returns the graph with the columns of its features in the agreed order.

    A graph without names, and an agreement without names, leave the order as it is; the first with
    a warning. Raises DataError that names missing and further columns.

    Args:
        graph: A party's graph.
        names: The agreed columns. Empty: only their number is agreed.
        where: The party and its data, with which an error message begins.
    """
    if not names:
        return graph
    if not graph.feature_names:
        if graph.num_features != len(names):
            raise DataError(
                f"{where} has {graph.num_features} features without names, the agreement has "
                f"{len(names)}: {', '.join(names)}"
            )
        warnings.warn(
            f"{where}: its features have no names; they are taken in the order of the agreement",
            stacklevel=2,
        )
        return replace(graph, feature_names=tuple(names))
    if set(graph.feature_names) != set(names):
        missing = [name for name in names if name not in graph.feature_names]
        more = [name for name in graph.feature_names if name not in names]
        parts = {"lacks": missing, "has, besides those of the agreement,": more}
        texts = [f"{verb} {', '.join(columns)}" for verb, columns in parts.items() if columns]
        raise DataError(
            f"{where}: the features do not match the agreement: it {'; it '.join(texts)}"
        )
    if tuple(names) == graph.feature_names:
        return graph
    order = [graph.feature_names.index(name) for name in names]
    return replace(graph, x=graph.x[:, order], feature_names=tuple(names))
