"""Layers that no tile, warp or block of channels divides, for each CUDA kernel that is compiled."""

import functools
import pathlib
import random
import re
import typing
import zlib

import torch
from drawn_layers import laid_out, reference_and_bound
from emulation import A100, CSRC, H200, TEGRA_X1, Call, Case, Limits, make_call, run_cases

from packedconv.packed import PackedWeight, pack

Pair = typing.Tuple[int, int]


class OddLayer(typing.NamedTuple):
    name: str
    batch: int
    in_channels: int
    out_channels: int
    size: Pair
    kernel: Pair = (3, 3)
    stride: Pair = (1, 1)
    padding: Pair = (1, 1)
    dilation: Pair = (1, 1)
    groups: int = 1
    density: float = 0.2
    bias: bool = True
    relu: bool = False
    layout: str = "contiguous"  # of input and output

    @property
    def paper_shape(self) -> bool:
        """Whether the paper's kernel has its tile's size compiled in."""
        return (self.kernel, self.stride, self.dilation) == ((3, 3), (1, 1), (1, 1))

    def stored_columns(self, columns: int) -> int:
        """Columns of the column kernel's tile for so many output columns, by stride residue."""
        taps = [tap * self.dilation[1] for tap in range(self.kernel[1])]
        residues = {tap % self.stride[1] for tap in taps}
        return len(residues) * (columns + max(taps) // self.stride[1])


LAYERS = [
    OddLayer("rows and columns over", 1, 37, 13, (11, 37)),
    OddLayer("rows of whole copies", 3, 8, 7, (19, 64), relu=True),
    OddLayer("two packed blocks", 1, 300, 5, (6, 9), padding=(2, 1), density=0.1),
    OddLayer("no padding", 1, 32, 45, (9, 40), padding=(0, 0), relu=True, layout="channels_last"),
    OddLayer("groups", 2, 12, 9, (10, 21), padding=(2, 2), groups=3, layout="sliced"),
    OddLayer("no nonzeros", 1, 4, 3, (5, 7), density=0.0),
    OddLayer("no image", 0, 4, 3, (5, 7)),
    OddLayer("1 x 1", 1, 33, 10, (7, 35), kernel=(1, 1), padding=(0, 0), bias=False),
    OddLayer("strides", 1, 5, 11, (23, 41), (5, 3), (2, 2), (2, 1), (1, 2), density=0.4),
    OddLayer("16 x 16", 1, 2, 3, (20, 18), (16, 16), padding=(7, 9), density=0.1),
    OddLayer("dilation", 1, 34, 6, (13, 29), padding=(3, 3), dilation=(3, 2), bias=False),
    OddLayer("one row", 2, 6, 4, (1, 50), (1, 7), (1, 3), (0, 2), groups=2, layout="transposed"),
]
# For real threads and other slow runs; the last one's rows are copied four columns at a time.
TINY_LAYERS = [
    OddLayer("tiny", 1, 5, 6, (5, 19)),
    OddLayer("tiny, strided", 1, 5, 6, (5, 19), (2, 3), (2, 1)),
    OddLayer("tiny, whole copies", 1, 5, 6, (5, 20)),
]
# Every kernel that is compiled. (rows per thread, column groups, pitch); mappings of one slice.
COLUMN_KERNELS = [
    tuple(int(value) for value in entry)
    for entry in re.findall(
        r"^  X\((\d+), (\d+), (\d+)\)",
        (CSRC / "cuda" / "column_config.h").read_text("utf-8"),
        re.MULTILINE,
    )
]
MAPPINGS = [
    (columns, rows, warps, 1)
    for columns in (4, 8, 16, 32)
    for rows in (1, 2, 4, 8)
    for warps in (2, 4, 8)
]
# A device that holds one block, which then works through all tiles.
ONE_BLOCK: Limits = (80, 1, 166912, 0)
ALL_LIMITS = (ONE_BLOCK, A100, H200, TEGRA_X1)


@functools.lru_cache(maxsize=None)
def tensors(
    layer: OddLayer,
) -> typing.Tuple[torch.Tensor, PackedWeight, typing.Optional[torch.Tensor]]:
    """Input, weight and bias; the memory around a sliced input is NaN."""
    generator = torch.Generator().manual_seed(zlib.crc32(layer.name.encode()))

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
    weight = draw(*shape).clamp(min=1e-3)
    weight[torch.rand(shape, generator=generator) >= layer.density] = 0
    image = laid_out(draw(layer.batch, layer.in_channels, *layer.size), layer.layout)
    return image, pack(weight), draw(layer.out_channels) if layer.bias else None


def options(layer: OddLayer) -> typing.Dict[str, typing.Any]:
    return {
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
    }


@functools.lru_cache(maxsize=None)
def reference(layer: OddLayer) -> typing.Tuple[torch.Tensor, torch.Tensor]:
    """float64 result of torch, and the largest error allowed."""
    activation = "relu" if layer.relu else None
    return reference_and_bound(*tensors(layer), activation, options(layer))


def new_call(layer: OddLayer) -> Call:
    """The layer with an output of NaN."""
    activation = "relu" if layer.relu else None
    out = laid_out(torch.full(reference(layer)[0].shape, float("nan")), layer.layout)
    return make_call(*tensors(layer), activation=activation, out=out, **options(layer))


def wrong(layer: OddLayer, output: torch.Tensor) -> torch.Tensor:
    """Which elements of the output are over the bound, or NaN."""
    expected, bound = reference(layer)
    return ~((output.double() - expected).abs() <= bound)


def is_right(layer: OddLayer, output: torch.Tensor) -> bool:
    return not bool(wrong(layer, output).any())


def assert_right(layer: OddLayer, output: torch.Tensor, what: str) -> None:
    assert is_right(layer, output), (
        f"{int(wrong(layer, output).sum())} of {output.numel()} outputs are wrong, the first at "
        f"{wrong(layer, output).nonzero()[0].tolist()}: {what}, layer {layer.name!r}"
    )


def run_right(
    program: pathlib.Path, layers_and_cases: typing.Sequence[typing.Tuple[OddLayer, Case]]
) -> None:
    """Run cases in a program of their own; each must be what its layer's reference says."""
    results = run_cases(program, [case for _, case in layers_and_cases])
    for (layer, case), result in zip(layers_and_cases, results):
        what = f"{case.implementation} {case.config}, limits {case.limits}"
        assert result.kernel == case.implementation, f"{what}: {result.sentence}"
        assert_right(layer, result.output, what)


def column_config(
    kernel: typing.Tuple[int, int, int], layer: OddLayer
) -> typing.Optional[typing.Tuple[int, ...]]:
    """A configuration of a compiled column kernel, drawn; None where the layer is too wide."""
    rows, groups, pitch = kernel
    lanes = [
        lanes
        for lanes in ((32,) if groups > 1 else (8, 16, 32))
        if layer.stored_columns(lanes * groups) <= pitch
    ]
    if not lanes:
        return None
    generator = random.Random(f"{kernel} {layer.name}")
    row_warps = generator.choice((1, 2, 4))
    warps = row_warps * generator.choice((1, 2, 3, 4))
    buffers = generator.choice((1, 2))
    slices = min(generator.choice((1, 2, 3)), layer.out_channels // layer.groups)
    return (rows, groups, pitch, generator.choice(lanes), warps, row_warps, buffers, slices)


def paper_config(mapping: typing.Tuple[int, ...], layer: OddLayer) -> typing.Tuple[int, ...]:
    """A compiled mapping with a drawn number of slices."""
    slices = random.Random(f"{mapping} {layer.name}").choice((1, 2, 3, 50))
    return (*mapping[:3], slices)


def little_memory(channels: int, bytes_per_channel: int, beside: int = 0) -> Limits:
    """A device that holds one block, with a tile of so many input channels and a bit beside."""
    return (80, 1, channels * bytes_per_channel + beside, 0)


def little_memory_for_column(
    config: typing.Tuple[int, ...], layer: OddLayer, channels: int, beside: int
) -> Limits:
    """For a layer of stride 1; so many bytes beside the tile are for the nonzeros."""
    rows, _, pitch, lanes, _, row_warps, buffers, _ = config
    stored_rows = rows * (32 // lanes) * row_warps + layer.dilation[0] * (layer.kernel[0] - 1)
    return little_memory(channels, 4 * buffers * stored_rows * pitch, beside)


def little_memory_for_paper(mapping: typing.Tuple[int, ...], channels: int) -> Limits:
    """For a layer of the paper's shape."""
    columns, rows, warps, _ = mapping
    return little_memory(channels, 4 * (rows + 2) * (columns * warps + 2))
