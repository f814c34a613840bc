"""The shape of one convolution layer as the workflow measures it."""

import typing


class Layer(typing.NamedTuple):
    """A square-kernel convolution on a batch of images, NCHW (paper section 3).

    Symbols of the paper: batch N, in_channels IC, out_channels OC, height H,
    width W, kernel_size K. `stride`, `padding` and `dilation` apply to both axes. Each of the
    `groups` has OC / groups output channels, which see IC / groups input channels.
    """

    name: str
    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel_size: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def out_height(self) -> int:
        return output_size(self.height, self.kernel_size, self.stride, self.padding, self.dilation)

    @property
    def out_width(self) -> int:
        return output_size(self.width, self.kernel_size, self.stride, self.padding, self.dilation)

    @property
    def weight_shape(self) -> typing.Tuple[int, int, int, int]:
        """(OC, IC / groups, K, K)."""
        group_channels = self.in_channels // self.groups
        return (self.out_channels, group_channels, self.kernel_size, self.kernel_size)

    @property
    def input_shape(self) -> typing.Tuple[int, int, int, int]:
        """(N, IC, H, W)."""
        return (self.batch, self.in_channels, self.height, self.width)

    @property
    def output_shape(self) -> typing.Tuple[int, int, int, int]:
        """(N, OC, H_out, W_out)."""
        return (self.batch, self.out_channels, self.out_height, self.out_width)

    @property
    def conv2d_arguments(self) -> typing.Dict[str, int]:
        """stride, padding, dilation and groups, as convolutions take them."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    @property
    def weight_count(self) -> int:
        """Number of weights, zeros included: K² · IC · OC / groups."""
        return self.kernel_size**2 * (self.in_channels // self.groups) * self.out_channels


def output_size(size: int, kernel_size: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Number of output rows or columns (paper equation 2, with dilation)."""
    return (size + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1


def nonzero_count(weight_count: int, sparsity: float) -> int:
    """Number of nonzeros that a sparsity leaves: round((1 - S) · n), half to even."""
    return round((1 - sparsity) * weight_count)


def sparsity_key(sparsity: float) -> str:
    """Name of a sparsity in files: "s90" for 0.90, "s905" for 0.905.

    Raises ValueError unless the sparsity is a multiple of 0.001 in [0, 1).
    """
    thousandths = round(1000 * sparsity)
    if not 0 <= thousandths < 1000 or abs(thousandths - 1000 * sparsity) > 1e-6:
        raise ValueError(
            f"sparsity: expected a multiple of 0.001 from 0 to 0.999, got {sparsity!r}"
        )
    digits = "%03d" % thousandths
    return "s" + (digits[:2] if digits.endswith("0") else digits)
