"""Layers drawn so that every pair of options occurs, with their tensors and reference.

`LAYERS` is the same on every machine. A device's kernel is tested by calling
`check(layer, run)` for each, where `run` takes the arguments of `packedconv.conv2d`.
"""

import random
import typing
import warnings
import zlib

import torch
from allpairspy import AllPairs

from packedconv.packed import PackedWeight, pack

# The values of every option. Image sizes are relative to the smallest that the kernel fits.
OPTIONS = {
    "kernel_height": (1, 2, 3, 5, 7, 16),
    "kernel_width": (1, 2, 3, 5, 7, 16),
    "stride": (1, 2, 3, (2, 1), (1, 3)),
    "padding": (0, "half", "asymmetric", "same", "valid", "large"),
    "dilation": (1, 2, 3, (3, 1), (1, 2)),
    "groups": (1, 2, 4),
    "batch": (None, 0, 1, 3),
    "group_in_channels": (1, 3, 8, 257, 600),
    "group_out_channels": (1, 2, 3, 7),
    "image": ("pixel", "row", "column", "odd", "wide", "tall"),
    "input_layout": ("contiguous", "channels_last", "transposed", "sliced", "expanded"),
    "out_layout": (None, "contiguous", "channels_last", "transposed", "sliced"),
    "bias": (None, "contiguous", "strided"),
    "activation": (None, "relu"),
    "pattern": ("dense", "half", "sparse", "zero", "skewed"),
}
_EXTRA = {"pixel": (0, 0), "row": (0, 18), "column": (18, 0), "odd": (7, 5), "wide": (2, 71)}
_EXTRA["tall"] = (23, 4)
COVERS = 10
_MOST_PRODUCTS = 1_000_000


class DrawnLayer(typing.NamedTuple):
    kernel_height: int
    kernel_width: int
    stride: typing.Union[int, typing.Tuple[int, int]]
    padding: typing.Union[int, str]
    dilation: typing.Union[int, typing.Tuple[int, int]]
    groups: int
    batch: typing.Optional[int]
    group_in_channels: int
    group_out_channels: int
    image: str
    input_layout: str
    out_layout: typing.Optional[str]
    bias: typing.Optional[str]
    activation: typing.Optional[str]
    pattern: str

    @property
    def out_channels(self) -> int:
        return self.groups * self.group_out_channels

    @property
    def kernel(self) -> typing.Tuple[int, int]:
        return self.kernel_height, self.kernel_width

    @property
    def weight_shape(self) -> typing.Tuple[int, int, int, int]:
        return (self.out_channels, self.group_in_channels) + self.kernel

    @property
    def padding_argument(self) -> typing.Union[int, str, typing.Tuple[int, int]]:
        named = {
            "half": (self.kernel_height // 2, self.kernel_width // 2),
            "asymmetric": (2, 1),
            "large": max(self.kernel) + 1,
        }
        return named.get(self.padding, self.padding)

    @property
    def options(self) -> typing.Dict[str, typing.Any]:
        """Keyword arguments that torch's conv2d takes too."""
        return {
            "stride": self.stride,
            "padding": self.padding_argument,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    @property
    def size(self) -> typing.Tuple[int, int]:
        """Height and width of the image."""
        sizes = []
        for axis in range(2):
            extent = both(self.dilation)[axis] * (self.kernel[axis] - 1) + 1
            if self.padding == "same":
                smallest = 1
            else:
                padding = 0 if self.padding == "valid" else both(self.padding_argument)[axis]
                smallest = max(1, extent - 2 * padding)
            sizes.append((smallest, _EXTRA[self.image][axis]))
        # Wide layers get smaller images, so that all of them run in seconds.
        weights = self.out_channels * self.group_in_channels * self.kernel[0] * self.kernel[1]
        shrink = 1
        while True:
            height, width = (smallest + -(-extra // shrink) for smallest, extra in sizes)
            if weights * height * width <= _MOST_PRODUCTS or shrink > 16:
                return height, width
            shrink *= 2

    @property
    def input_shape(self) -> typing.Tuple[int, ...]:
        batch = () if self.batch is None else (self.batch,)
        return (*batch, self.groups * self.group_in_channels, *self.size)

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(self).encode())


def both(value) -> typing.Tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def possible(values: typing.Dict[str, object]) -> bool:
    """Whether a (partial) choice of options is one that torch accepts."""
    return not (values.get("padding") == "same" and values.get("stride", 1) != 1)


def draw_layers(covers: typing.Iterable[int]) -> typing.List[DrawnLayer]:
    """The layers of some covers, each of which has every pair of options."""
    layers = []
    for cover in covers:
        # Another order of options and values makes another set of rows that covers all pairs.
        generator = random.Random(cover)
        names = sorted(OPTIONS, key=lambda name: (-len(OPTIONS[name]), generator.random()))
        values = [generator.sample(OPTIONS[name], len(OPTIONS[name])) for name in names]
        rows = AllPairs(
            values, filter_func=lambda row, names=names: possible(dict(zip(names, row)))
        )
        layers += [DrawnLayer(**dict(zip(names, row))) for row in rows]
    return layers


LAYERS = draw_layers(range(COVERS))


def draw_weight(layer: DrawnLayer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer.seed)
    shape = layer.weight_shape
    weight = torch.rand(shape, generator=generator) * 2 - 1
    # Away from what FP16 makes subnormal.
    weight = torch.where(weight.abs() < 1e-3, torch.full((), 1e-3), weight)
    keep = torch.rand(shape, generator=generator)
    if layer.pattern == "zero":
        return torch.zeros(shape)
    if layer.pattern == "half":
        weight[keep < 0.5] = 0
    elif layer.pattern == "sparse":
        weight[keep < 0.9] = 0
    elif layer.pattern == "skewed":
        # Every third row is empty, every third full.
        weight[0::3] = 0
        weight[2::3][keep[2::3] < 0.9] = 0
    return weight


def draw_input(layer: DrawnLayer) -> torch.Tensor:
    """An input of the drawn layout; memory around a sliced one is NaN."""
    generator = torch.Generator().manual_seed(layer.seed + 1)
    shape = layer.input_shape
    values = torch.rand(shape, generator=generator) * 2 - 1
    if layer.input_layout == "expanded":
        if layer.seed % 2:
            return values[..., :1].expand(shape)
        return values[..., :1, :, :].expand(shape)
    return laid_out(values, layer.input_layout)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    shape = values.shape
    if layout == "channels_last":
        if values.dim() == 3:
            return values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        outer = torch.full([2 * size + 3 for size in shape], float("nan"))
        view = outer[tuple(slice(1, 1 + 2 * size, 2) for size in shape)]
        view.copy_(values)
        return view
    return values


def draw_bias(layer: DrawnLayer) -> typing.Optional[torch.Tensor]:
    if layer.bias is None:
        return None
    generator = torch.Generator().manual_seed(layer.seed + 2)
    values = torch.rand(2 * layer.out_channels, generator=generator) * 4 - 2
    return values[::2] if layer.bias == "strided" else values[: layer.out_channels].clone()


def reference_and_bound(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor],
    activation: typing.Optional[str],
    options: typing.Dict[str, typing.Any],
) -> typing.Tuple[torch.Tensor, torch.Tensor]:
    """float64 result of torch, and the largest error allowed (csrc/FORMAT.md)."""
    weight, x = packed.unpack().double(), input.double()
    bias = None if bias is None else bias.double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
        expected = torch.nn.functional.conv2d(x, weight, bias, **options)
        bias = None if bias is None else bias.abs()
        size = torch.nn.functional.conv2d(x.abs(), weight.abs(), bias, **options)
    terms = (weight != 0).sum(dim=(1, 2, 3)) + (0 if bias is None else 1)
    bound = (4 + terms.double().sqrt()).view(-1, 1, 1) * 2.0**-23 * size
    return (expected.relu() if activation == "relu" else expected), bound


def check(layer: DrawnLayer, run: typing.Callable[..., torch.Tensor]) -> None:
    """Assert that `run` computes the layer within the bound, and writes nothing but `out`."""
    packed = pack(draw_weight(layer))
    image, bias = draw_input(layer), draw_bias(layer)
    expected, bound = reference_and_bound(image, packed, bias, layer.activation, layer.options)
    out = None
    if layer.out_layout is not None:
        out = laid_out(torch.full(expected.shape, float("nan")), layer.out_layout)
    around = None if out is None else out.untyped_storage().nbytes() // 4
    if layer.out_layout == "sliced":
        memory = torch.empty(0).set_(out.untyped_storage(), 0, (around,))
        memory.fill_(-77.0)
    result = run(image, packed, bias, activation=layer.activation, out=out, **layer.options)
    assert out is None or result is out
    assert result.dtype == torch.float32
    assert result.shape == expected.shape
    assert not result.isnan().any()
    excess = (result.double() - expected).abs() - bound
    assert bool((excess <= 0).all()), f"over the bound by {excess.max().item()}: {layer}"
    if layer.out_layout == "sliced":
        written = out.clone()
        out.fill_(-77.0)
        assert bool((memory == -77.0).all()), f"wrote outside out: {layer}"
        out.copy_(written)
