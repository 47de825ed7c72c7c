"""Ridge regression from sums: the statistics of rows, and the weights that they determine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def packed(gram: Tensor) -> Tensor:
    """Returns the upper triangle of a symmetric matrix [m, m], row by row, [m (m+1) / 2]."""
    row, column = torch.triu_indices(*gram.shape)
    return gram[row, column]


def unpacked(triangle: Tensor, m: int) -> Tensor:
    """Returns the symmetric matrix [m, m] of a packed upper triangle."""
    row, column = torch.triu_indices(m, m)
    gram = triangle.new_zeros(m, m)
    gram[row, column] = triangle
    gram[column, row] = triangle
    return gram


def nearest_psd(matrix: Tensor) -> Tensor:
    """Returns the positive semi-definite matrix nearest to a symmetric one, in Frobenius length.

    Noise needs it, and the rounding of float32 sums if columns depend on each other.
    """
    symmetric = ((matrix + matrix.T) / 2).double()
    values, vectors = torch.linalg.eigh(symmetric)
    return ((vectors * values.clamp(min=0)) @ vectors.T).to(matrix.dtype)


def repaired(gram: Tensor, ridge: float) -> Tensor:
    """Returns G in float64, made positive semi-definite if G + λI is not positive definite."""
    G = gram.double()
    failed = torch.linalg.cholesky_ex(G + ridge * torch.eye(len(G), dtype=torch.float64)).info
    return nearest_psd(G) if failed else G


def weights_of(gram: Tensor, moment: Tensor, ridges: Sequence[float]) -> Tensor:
    """Returns W(λ) = (G + λ I)^-1 B for several λ, [ridges, m, C] float32.

    Args:
        gram: G = Fᵀ F, [m, m].
        moment: B = Fᵀ Y, [m, C].
        ridges: The values of λ, each above 0.
    """
    G, B = repaired(gram, min(ridges)), moment.double()
    identity = torch.eye(len(G), dtype=torch.float64)
    solved = [
        torch.cholesky_solve(B, torch.linalg.cholesky(G + ridge * identity)) for ridge in ridges
    ]
    return torch.stack(solved).float()


def corrections(rows: Tensor, residual: Tensor, ridges: Sequence[float]) -> Tensor:
    """Returns F'(F F' + μ I)^-1 R for several μ, [ridges, m, C]: what own rows add to weights.

    It is ridge regression on the residual, through a system as large as the number of rows.

    Args:
        rows: F, [n, m].
        residual: R = Y - F W, [n, C].
        ridges: The values of μ, each above 0.
    """
    K, R = (rows @ rows.T).double(), residual.double()
    values, vectors = torch.linalg.eigh(K)
    inside = vectors.T @ R
    scaled = [vectors @ (inside / (values.clamp(min=0) + mu)[:, None]) for mu in ridges]
    return torch.stack([rows.T @ a.float() for a in scaled])


def generalised_error(gram: Tensor, moment: Tensor, W: Tensor, ridge: float) -> float:
    """Returns the error of generalised cross-validation (Golub, Heath, Wahba 1979), from sums.

    It is (R/n) / (1 - t/n)² with the squared error R on the n rows, and t = tr G (G + λI)^-1, the
    degrees of freedom. The last column of F is 1, and the rows of Y are one-hot, so n and Σ‖y‖²
    are in G and B.

    Args:
        gram: G = Fᵀ F, [m, m].
        moment: B = Fᵀ Y, [m, C].
        W: W(λ), [m, C].
        ridge: λ.
    """
    G, B, W = repaired(gram, ridge), moment.double(), W.double()
    rows = float(G[-1, -1])
    error = max(0.0, float(B[-1].sum() - 2 * (W * B).sum() + (W * (G @ W)).sum()))
    root = torch.linalg.cholesky(G + ridge * torch.eye(len(G), dtype=torch.float64))
    free = len(G) - ridge * float(torch.cholesky_inverse(root).diagonal().sum())
    return error / max(rows, 1.0) / max(1 - free / max(rows, 1.0), 1e-6) ** 2
