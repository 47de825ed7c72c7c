"""Shared rows: the matrices of many clients, with rows that are equal at many of them stored once.

A client's first layer has a row for each feature. Training moves only the rows of features that
the client has, so most rows of most clients stay equal. `Sharing` says which stored row each client
uses. `SharedRows` is a stack of matrices in that form. It behaves like the dense tensor
[clients, rows, width] where a `Batch` needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedloom.data.sparse import Sparse


class Sharing:
    """Which stored row each client uses.

    A row of the matrix that some clients do not own is stored once for all of them. The other
    stored rows belong to one client each.

    Attributes:
        index: The stored row of each client's row, [clients, rows].
        column: The row of the matrix that each stored row is a version of, [stored].
    """

    def __init__(self, index: Tensor, column: Tensor):
        self.index, self.column = index, column
        self._mean: tuple[Tensor, Sparse] | None = None

    @classmethod
    def of_owned(cls, owned: Tensor) -> Sharing:
        """Returns the sharing in which clients have rows of their own where `owned` is true.

        owned: [clients, rows] bool.
        """
        own, shared = owned.nonzero(), (~owned).any(0).nonzero().flatten()
        index = torch.zeros(owned.shape, dtype=torch.int64)
        index[:, shared] = torch.arange(len(shared))
        index[own[:, 0], own[:, 1]] = len(shared) + torch.arange(len(own))
        return cls(index, torch.cat([shared, own[:, 1]]))

    @property
    def stored(self) -> int:
        """The number of stored rows."""
        return len(self.column)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the index, for the history hash."""
        return hashlib.sha256(self.index.to(torch.int32).numpy().tobytes()).digest()

    @cached_property
    def source(self) -> Tensor:
        """The place of each stored row among all clients' rows, [stored]."""
        flat = torch.arange(self.index.numel())
        # Some client uses each stored row. If several do, their rows are equal.
        return torch.zeros(self.stored, dtype=torch.int64).scatter_(0, self.index.flatten(), flat)

    def stored_rows(self, dense: Tensor) -> Tensor:
        """Returns the stored rows [stored, width] of a dense stack [clients, rows, width]."""
        return dense.reshape(-1, dense.shape[-1]).index_select(0, self.source)

    def holds(self, dense: Tensor) -> bool:
        """Returns whether the rows of a dense stack that are to be shared are equal."""
        flat = dense.reshape(-1, dense.shape[-1])
        first = flat.index_select(0, self.source[self.index[:, 0]])  # most unequal stacks end here
        return torch.equal(first, dense[:, 0]) and torch.equal(
            SharedRows(self.stored_rows(dense), self).dense(), dense
        )

    def mean_matrix(self, by: Tensor) -> Sparse:
        """Returns the matrix [rows, stored] that averages the clients' matrices.

        by: the clients' weights.
        """
        if self._mean is None or not torch.equal(self._mean[0], by):
            weight = torch.zeros(self.stored, dtype=torch.float64).index_add_(
                0, self.index.flatten(), by.double().repeat_interleave(self.index.shape[1])
            )
            shape = (self.index.shape[1], self.stored)
            stored = torch.arange(self.stored)
            self._mean = by, Sparse.from_edges(self.column, stored, weight, shape)
        return self._mean[1]


class SharedRows:
    """A stack of matrices [clients, rows, width] whose equal rows are stored once.

    Attributes:
        stored: The stored rows, [stored, width].
        sharing: Which of them each client uses.
    """

    def __init__(self, stored: Tensor, sharing: Sharing):
        self.stored, self.sharing = stored, sharing

    @property
    def shape(self) -> torch.Size:
        """The shape of the dense stack."""
        return torch.Size((*self.sharing.index.shape, self.stored.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.stored.dtype

    def __getitem__(self, client: int) -> Tensor:
        """Returns the matrix of one client, a copy."""
        return self.stored.index_select(0, self.sharing.index[client])

    def dense(self) -> Tensor:
        """Returns the dense stack, a copy."""
        return self.stored.index_select(0, self.sharing.index.flatten()).view(self.shape)

    def mean(self, by: Tensor) -> Tensor:
        """Returns Σ_k by_k · matrix_k, [rows, width]."""
        return self.sharing.mean_matrix(by) @ self.stored

    def select(self, clients: Tensor) -> SharedRows:
        """Returns the matrices of some clients, in the given order."""
        return SharedRows(self.stored, Sharing(self.sharing.index[clients], self.sharing.column))

    @staticmethod
    def joined(parts: Sequence[SharedRows]) -> SharedRows:
        """Copies the matrices of the clients of several stacks, one stack after another."""
        sharings = tuple(part.sharing for part in parts)
        sharing = sharings[0] if len(sharings) == 1 else _joined_sharing(sharings)
        return SharedRows(torch.cat([part.stored for part in parts]), sharing)


@lru_cache(maxsize=8)  # the same groups answer in every round, and a sharing caches its mean
def _joined_sharing(parts: tuple[Sharing, ...]) -> Sharing:
    index, start = [], 0
    for part in parts:
        index.append(part.index + start)
        start += part.stored
    return Sharing(torch.cat(index), torch.cat([part.column for part in parts]))
