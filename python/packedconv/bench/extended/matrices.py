"""A weight as a sparse matrix of PyTorch or SciPy: made from a dense one, and multiplied."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from packedconv.formats import BLOCKS

LIBRARIES = ("torch", "scipy")
# What multiplies on one thread whatever is asked for.
ONE_THREAD = ("scipy",)


def make_matrix(name: str, library: str, dense: torch.Tensor) -> Any:
    """A dense matrix, float32 (rows, columns), as coo, csr or one of formats.BLOCKS.

    Indices of 32 bits, but for PyTorch's COO, which has 64 only.
    Raises RuntimeError or ValueError where the library cannot, ImportError without it.
    """
    return _MAKERS[library](name, dense)


def multiply(matrix: Any, right: torch.Tensor) -> torch.Tensor:
    """The product with a dense matrix (columns, n) or vector (columns,), newly allocated."""
    if isinstance(matrix, torch.Tensor):
        return matrix @ right
    return torch.from_numpy(matrix @ right.numpy())


def matrix_arrays(matrix: Any) -> list[np.ndarray]:
    """Indices and values that a matrix holds."""
    if not isinstance(matrix, torch.Tensor):
        indices = matrix.coords if matrix.format == "coo" else (matrix.indptr, matrix.indices)
        return [*indices, matrix.data]
    if matrix.layout == torch.sparse_coo:
        return [matrix.indices().numpy(), matrix.values().numpy()]
    parts = (matrix.crow_indices(), matrix.col_indices(), matrix.values())
    return [part.numpy() for part in parts]


def copied(matrix: Any) -> Any:
    """A matrix with memory of its own."""
    return matrix.clone() if isinstance(matrix, torch.Tensor) else matrix.copy()


def _torch_matrix(name: str, dense: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        # "Sparse CSR tensor support is in beta state", and that it checks no invariants.
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        if name == "coo":
            return dense.to_sparse_coo()
        long = dense.to_sparse_bsr(BLOCKS[name]) if name in BLOCKS else dense.to_sparse_csr()
        return torch.sparse_compressed_tensor(
            long.crow_indices().int(),
            long.col_indices().int(),
            long.values(),
            long.shape,
            layout=long.layout,
        )


def _scipy_matrix(name: str, dense: torch.Tensor) -> Any:
    import scipy.sparse

    array = dense.numpy()
    if name in BLOCKS:
        return scipy.sparse.bsr_array(array, blocksize=BLOCKS[name])
    return {"coo": scipy.sparse.coo_array, "csr": scipy.sparse.csr_array}[name](array)


_MAKERS: dict[str, Callable[[str, torch.Tensor], Any]] = {
    "torch": _torch_matrix,
    "scipy": _scipy_matrix,
}
