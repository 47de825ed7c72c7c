"""Labels: texts and numbers become classes, and classes of several parties get one order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.errors import DataError

AnyGraph = TypeVar("AnyGraph", bound=Graph)


def classes_of(
    labels: list[str],
    where: Callable[[int], str],
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
) -> tuple[Tensor, int, tuple[str, ...]]:
    """Returns class numbers (-1 for unknown), the number of classes, and their names.

    Texts are classes in sorted order. The whole numbers 0 to C - 1 are the classes themselves, and
    have no other names. Other whole numbers are classes in ascending order, and their names are
    the numbers.

    Args:
        labels: One label per item. "" is unknown, and so is -1 if all labels are whole numbers.
        where: Returns the place of label i, with which an error message begins.
        num_classes: Number of classes. Whole numbers must then be 0 to num_classes - 1.
        class_names: The names of all classes, in order.
    """
    present = sorted(set(labels) - {""})
    whole = all(re.fullmatch(r"-?\d+", text) for text in present)
    names = tuple(class_names or ())
    if whole and not (names and set(present) - {"-1"} <= set(names)):
        code = {text: int(text) for text in present}
        known = sorted(set(code.values()) - {-1})
        count = num_classes or len(names)
        valid = f"0 to {count - 1}" if count else "whole numbers from 0"
        valid += ", or empty or -1 for unknown"
        if not count and known and known[0] < 0:
            count = max(known[-1] + 1, 1)  # negative labels are refused below
        elif not count:
            count = len(known)
            if known != list(range(count)):
                names = tuple(str(number) for number in known)
                rank = {number: k for k, number in enumerate(known)}
                code = {text: rank.get(number, -1) for text, number in code.items()}
    else:
        names = names or tuple(present)
        code = {text: number for number, text in enumerate(names)}
        if whole:
            code.setdefault("-1", -1)
        count = num_classes or len(names)
        valid = ", ".join(names)
        if len(names) > count:
            raise DataError(
                f"{where(0)}: {len(names)} different labels, but num_classes is {count}: {valid}"
            )
        if len(names) < count:  # classes that no label names
            names = ()
    code[""] = -1
    bad = {text for text in present if not -1 <= code.get(text, -2) < count}
    if bad:
        first = next(i for i, text in enumerate(labels) if text in bad)
        raise DataError(f"{where(first)}: label {labels[first]!r} is out of range. Valid: {valid}")
    return torch.tensor([code[text] for text in labels]), count, names


def union_of_classes(classes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Returns the classes of all parties: in the first party's order, then new ones, sorted.

    If all parties' classes are whole numbers, the order is that of the numbers.
    """
    parties = [tuple(names) for names in classes]
    known = list(parties[0]) if parties else []
    new = sorted({name for names in parties for name in names} - set(known))
    if all(re.fullmatch(r"-?\d+", name) for name in (*known, *new)):
        return tuple(sorted((*known, *new), key=int))
    return (*known, *new)


def with_classes(graph: AnyGraph, class_names: Sequence[str], party: str = "") -> AnyGraph:
    """Returns the graph with its classes renumbered, by name.

    A graph without class names has the numbers of its classes as names.

    Args:
        graph: The graph.
        class_names: The names of all classes, in the new order.
        party: Whose graph it is, for error messages.
    """
    if len(set(class_names)) < len(class_names):
        raise DataError(f"class_names has the same name twice: {', '.join(class_names)}")
    present = {graph.classes[c] for c in graph.y.unique().tolist() if c >= 0}
    for name in sorted(present - set(class_names)):
        whose = f"party {party!r}: " if party else ""
        raise DataError(
            f"{whose}graph {graph.name!r} has the class {name!r}, which is not among the agreed "
            f"classes. Valid: {', '.join(class_names)}"
        )
    number = {name: c for c, name in enumerate(class_names)}
    new = torch.tensor([*(number.get(name, -1) for name in graph.classes), -1])
    # The last entry is for -1, unknown.
    return replace(
        graph, y=new[graph.y], num_classes=len(class_names), class_names=tuple(class_names)
    )
