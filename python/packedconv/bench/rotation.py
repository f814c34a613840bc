"""Inputs and outputs that executions take in turn, so that caches do not hold them."""

import typing

import torch

from packedconv.bench.contenders import DENSE_LAYOUTS, Contender, in_layout
from packedconv.bench.machine import available_memory_bytes, largest_cache_bytes
from packedconv.layer import Layer

_VALUE_BYTES = 4
# Of what can be had; inputs in two layouts and two sets of outputs are there at once.
_MEMORY_SHARE = 6


def copies(layer: Layer, set_bytes: int) -> int:
    """How many inputs and outputs to rotate, two at least.

    They span twice the last-level cache, `set_bytes` at most, and a sixth of the memory that
    can be had at most.
    """
    limits = [set_bytes]
    if largest_cache_bytes():
        limits.append(2 * largest_cache_bytes())
    available = available_memory_bytes()
    if available is not None:
        limits.append(available // _MEMORY_SHARE)
    return max(2, min(limits) // pair_bytes(layer))


def pair_bytes(layer: Layer) -> int:
    """Bytes of one input and its output."""
    sizes = (layer.input_shape, layer.output_shape)
    return _VALUE_BYTES * sum(n * channels * rows * columns for n, channels, rows, columns in sizes)


class Rotation:
    """Copies of an input (N, IC, H, W), and as many outputs of the sparse and the dense side.

    All contenders share one position, so that what an execution takes was last touched as
    many executions ago as there are copies.
    """

    def __init__(self, layer: Layer, image: torch.Tensor, count: int) -> None:
        self._layer = layer
        self._image = image
        self._count = count
        self._position = 0
        self._inputs = {}  # type: typing.Dict[bool, typing.List[torch.Tensor]]
        self._outputs = {}  # type: typing.Dict[str, typing.List[torch.Tensor]]

    def sparse(
        self, convolve: typing.Callable[[torch.Tensor, torch.Tensor], typing.Any]
    ) -> typing.Callable[[], None]:
        """Executions of convolve(input, output)."""
        inputs, outputs = self._inputs_of("nchw"), self._outputs_of("sparse")

        def execute() -> None:
            index = self._next()
            convolve(inputs[index], outputs[index])

        return execute

    def dense(self, layout: str, weight: torch.Tensor) -> Contender:
        """A dense contender. Raises UnavailableError."""
        convolve = DENSE_LAYOUTS[layout](self._layer, self._image, weight)
        inputs = self._inputs_of(layout)
        outputs = self._outputs_of("dense")

        def execute() -> None:
            index = self._next()
            # PyTorch allocates the output, in the memory that was given back last: that of the
            # execution as many executions ago as there are copies.
            outputs[index] = convolve(inputs[index])

        return Contender("dense", layout, execute)

    def _next(self) -> int:
        self._position = (self._position + 1) % self._count
        return self._position

    def _inputs_of(self, layout: str) -> typing.List[torch.Tensor]:
        arranged = in_layout(layout, self._image)
        key = arranged.is_contiguous()
        if key not in self._inputs:
            self._inputs[key] = [arranged.clone() for _ in range(self._count)]
        return self._inputs[key]

    def _outputs_of(self, implementation: str) -> typing.List[torch.Tensor]:
        if implementation not in self._outputs:
            # Filled, so that the pages are there.
            shape = self._layer.output_shape
            self._outputs[implementation] = [torch.full(shape, 0.0) for _ in range(self._count)]
        return self._outputs[implementation]
