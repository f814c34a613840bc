"""im2col: the convolution as the weights' matrix times the unfolded input.

The weights are a matrix of OC rows and K² · IC columns; an unfolded image has K² · IC rows and a
column per output pixel, so at stride 1 it holds every input value about K² times.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from packedconv.bench.contenders import UnavailableError
from packedconv.bench.machine import available_memory_bytes
from packedconv.layer import Layer

# Writes the product of a weight matrix (OC, K² · IC) and columns (K² · IC, pixels), both FP32,
# into an output (OC, pixels), whose rows need not lie one after the other.
Product = Callable[[torch.Tensor, torch.Tensor], object]
# From an image (1, IC, H, W) to its columns (K² · IC, pixels).
Unfold = Callable[[Layer, torch.Tensor], torch.Tensor]
# From an input (N, IC, H, W) into an output (N, OC, H_out, W_out).
ConvolveInto = Callable[[torch.Tensor, torch.Tensor], None]

# What a band of output rows may take when it is unfolded: what caches hold.
_BAND_BYTES = {"1 MiB": 2**20, "4 MiB": 2**22, "16 MiB": 2**24}


def unfolded_bytes(layer: Layer, rows: int | None = None) -> int:
    """Bytes of one unfolded image, or of so many of its output rows."""
    pixels = (layer.out_height if rows is None else rows) * layer.out_width
    return 4 * layer.kernel_size**2 * layer.in_channels * pixels


def csr_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight (OC, IC, K, K) in CSR: FP32 values, 32-bit columns and offsets."""
    return 8 * int((weight != 0).sum()) + 4 * (len(weight) + 1)


def by_unfold(layer: Layer, image: torch.Tensor) -> torch.Tensor:
    """Columns (K² · IC, pixels) of an image (1, IC, H, W), by PyTorch's own function."""
    return torch.nn.functional.unfold(
        image, layer.kernel_size, layer.dilation, layer.padding, layer.stride
    )[0]


def by_windows(layer: Layer, image: torch.Tensor) -> torch.Tensor:
    """As `by_unfold`, by one copy of a view of the padded image, which several threads share."""
    padded = torch.nn.functional.pad(image, [layer.padding] * 4)
    return _windows(layer, padded, layer.out_height)


def whole(layer: Layer, product: Product, unfold: Unfold) -> ConvolveInto:
    """Unfold and multiply one image at a time."""

    def convolve(input: torch.Tensor, out: torch.Tensor) -> None:
        for image, result in zip(input.split(1), out, strict=True):
            product(unfold(layer, image), result.flatten(1))

    return convolve


def in_bands(layer: Layer, product: Product, band_bytes: int) -> ConvolveInto:
    """Unfold and multiply as many output rows at a time as `band_bytes` hold, at least one."""
    rows = _band_rows(layer, band_bytes)
    window, padding = layer.dilation * (layer.kernel_size - 1) + 1, layer.padding

    def convolve(input: torch.Tensor, out: torch.Tensor) -> None:
        for image, result in zip(input.split(1), out, strict=True):
            flat = result.flatten(1)
            for begin in range(0, layer.out_height, rows):
                end = min(begin + rows, layer.out_height)
                # Input rows that the band sees; those outside the image are zeros.
                first = layer.stride * begin - padding
                last = layer.stride * (end - 1) - padding + window
                above, below = max(0, -first), max(0, last - layer.height)
                band = torch.nn.functional.pad(
                    image[:, :, first + above : last - below], [padding, padding, above, below]
                )
                product(
                    _windows(layer, band, end - begin),
                    flat[:, layer.out_width * begin : layer.out_width * end],
                )

    return convolve


def torch_csr(weight: torch.Tensor) -> Product:
    """torch.sparse's product, by MKL where PyTorch has it; 32-bit indices, which MKL wants."""
    with warnings.catch_warnings():
        # PyTorch says that its CSR is in beta.
        warnings.simplefilter("ignore", UserWarning)
        wide = weight.flatten(1).to_sparse_csr()
        matrix = torch.sparse_csr_tensor(
            wide.crow_indices().int(),
            wide.col_indices().int(),
            wide.values(),
            size=tuple(wide.shape),
            check_invariants=True,
        )
    # With a CSR matrix torch.mm makes zeros of the output's size first, and adds.
    return lambda columns, out: torch.addmm(out, matrix, columns, beta=0, out=out)


def scipy_csr(weight: torch.Tensor) -> Product:
    """SciPy's product, on one thread; it cannot write into an output, so that is copied.

    Raises UnavailableError without SciPy.
    """
    try:
        import scipy.sparse
    except ImportError as error:
        raise UnavailableError(f"SciPy is not installed: {error}") from error
    matrix = scipy.sparse.csr_array(weight.flatten(1).numpy())
    return lambda columns, out: out.copy_(torch.from_numpy(matrix @ columns.numpy()))


def dense_matrix(weight: torch.Tensor) -> Product:
    """The product of the matrix with its zeros."""
    matrix = weight.flatten(1).contiguous()
    return lambda columns, out: torch.mm(matrix, columns, out=out)


class Variant(NamedTuple):
    """make: from a weight (OC, IC, K, K). unfold: of whole images. band_bytes: of bands, which
    are unfolded by windows; None for whole images."""

    make: Callable[[torch.Tensor], Product]
    unfold: Unfold = by_windows
    band_bytes: int | None = None

    def convolution(self, layer: Layer, weight: torch.Tensor) -> ConvolveInto:
        """Raises UnavailableError without what it needs."""
        product = self.make(weight)
        if self.band_bytes is None:
            return whole(layer, product, self.unfold)
        return in_bands(layer, product, self.band_bytes)

    def require(self, layer: Layer) -> None:
        """Raise UnavailableError for a layer that it is not for."""
        if layer.groups != 1:
            raise UnavailableError(f"written for one group, this layer has {layer.groups}")
        if self.band_bytes is not None:
            if _band_rows(layer, self.band_bytes) >= layer.out_height:
                raise UnavailableError("a band is the whole image")
            return
        needed, available = unfolded_bytes(layer), available_memory_bytes()
        # The system would promise the memory, and end the process when it is written.
        if available is not None and needed > available:
            raise UnavailableError(
                f"an unfolded image takes {needed / 1e6:.0f} MB, {available / 1e6:.0f} MB are free"
            )


_CSR = {"torch.sparse": torch_csr, "scipy": scipy_csr}
_UNFOLD = {"unfold": by_unfold, "windows": by_windows}

# By contender, then by name.
VARIANTS = {
    "im2col_csr": {
        f"{way}, {name}": Variant(make, unfold)
        for name, make in _CSR.items()
        for way, unfold in _UNFOLD.items()
    },
    "im2col_csr_bands": {
        f"{size}, {name}": Variant(make, band_bytes=band_bytes)
        for name, make in _CSR.items()
        for size, band_bytes in _BAND_BYTES.items()
    },
    "im2col_dense": {way: Variant(dense_matrix, unfold) for way, unfold in _UNFOLD.items()},
}


def _windows(layer: Layer, padded: torch.Tensor, rows: int) -> torch.Tensor:
    """Columns of so many output rows, given the padded input rows (1, IC, rows, W + 2 P)."""
    size, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    channel, row, column = padded.stride()[1:]
    view = padded.as_strided(
        (layer.in_channels, size, size, rows, layer.out_width),
        (channel, dilation * row, dilation * column, stride * row, stride * column),
    )
    return view.reshape(layer.in_channels * size**2, -1)


def _band_rows(layer: Layer, band_bytes: int) -> int:
    return max(1, band_bytes // unfolded_bytes(layer, 1))
