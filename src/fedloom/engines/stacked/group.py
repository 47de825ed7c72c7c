"""Group: clients that run together, and what the engine keeps for them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim import Optimizer

from fedloom.core.message import Stack
from fedloom.engines.stacked.parameters import SharedStack, StackedOptimizer
from fedloom.nn.operations import Operation

if TYPE_CHECKING:
    from fedloom.engines.stacked.lockstep import Batched

T = TypeVar("T")


class Group:
    """Clients that run together.

    Attributes:
        batched: The operations that have a batched form in lockstep.
        calls: How many calls of operations ran "batched" and "single", and how many clients' phases
            were "recorded".
        shared: The parameters of the clients in shared rows, while they are in use.
        kept: By stage, the weights that the clients predicted with in its best evaluation. The
            engine hands them out when they are asked for.
    """

    CACHE_LIMIT = 64  # entries; some are made anew at every step and must not pile up
    CHOICES_LIMIT = 4  # of clients, for which a group keeps what it has computed

    def __init__(self, batched: Mapping[Operation[Any, Any], Batched], whole: Group | None = None):
        self.batched = batched
        self._whole = whole
        self._choices: OrderedDict[tuple[str, ...], Group] = OrderedDict()
        self.calls: Counter[str] = Counter()
        self.shared: SharedStack | None = None
        self.kept: dict[str, dict[str, Stack]] = {}
        self._cache: OrderedDict[Hashable, tuple[Sequence[Any], Any]] = OrderedDict()

    def cached(self, purpose: str, objects: Sequence[Any], make: Callable[[], T]) -> T:
        """Returns the result of `make()` for exactly these objects; computes it once."""
        key = (purpose, *map(id, objects))
        if key in self._cache:
            self._cache.move_to_end(key)
        else:
            self._cache[key] = (objects, make())  # a reference keeps their ids unique
            if len(self._cache) > self.CACHE_LIMIT:
                self._cache.popitem(last=False)
        made: T = self._cache[key][1]
        return made

    @property
    def whole(self) -> Group:
        """The group that this is a part of, or itself."""
        return self._whole or self

    def optimizer_of(self, optimizers: Sequence[Optimizer]) -> StackedOptimizer | None:
        """Returns optimisers as one; None if they cannot be (`StackedOptimizer.of`).

        Some parameters are stacked later than at the first step, so it asks again until they are.
        """
        known: list[StackedOptimizer | None] = self.cached("optimizer", optimizers, lambda: [None])
        known[0] = known[0] or StackedOptimizer.of(optimizers)
        return known[0]

    def part(self, clients: tuple[str, ...]) -> Group:
        """Returns a group of some of the clients, with a cache of its own."""
        if clients not in self._choices:
            self._choices[clients] = Group(self.batched, self)
            if len(self._choices) > self.CHOICES_LIMIT:
                self._choices.popitem(last=False)
        self._choices.move_to_end(clients)
        return self._choices[clients]

    def close(self) -> None:
        """Releases what it keeps. Without this, the garbage collector would have to find it."""
        self.separate()
        self._choices.clear()
        self._cache.clear()

    def write_back(self) -> None:
        """Brings the clients' own models and optimisers up to date."""
        if self.shared is not None:
            self.shared.write_back()

    def separate(self) -> None:
        """Brings the clients' own models up to date and ends the sharing of rows."""
        self.write_back()
        self.shared = None

    @contextmanager
    def separated(self) -> Iterator[None]:
        """Inside the block, the clients' own models are up to date and may change.

        If none did, the sharing of rows goes on after it.
        """
        self.write_back()
        before = self.shared.versions() if self.shared is not None else []
        try:
            yield
        finally:
            if self.shared is not None and self.shared.versions() != before:
                self.shared = None
