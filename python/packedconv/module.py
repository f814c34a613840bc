"""A torch module around conv2d, for inference with a pruned network."""

import typing

import numpy as np
import torch

from packedconv import arguments, packed_file
from packedconv.conv import IntOrPair, conv2d
from packedconv.packed import PackedWeight, pack
from packedconv.plan import CpuPlan
from packedconv.schedule import Schedule


class SparseConv2d(torch.nn.Module):
    """torch.nn.Conv2d with a packed sparse weight; inference only.

    input float32 (N, IC, H, W) or (IC, H, W); output (N, OC, H_out, W_out) or (OC, ...).
    Takes the arguments of `packedconv.conv2d`, and raises as it does. Its state_dict holds the
    bias, and the packed weight as the bytes of the packed file, with what `autotune` kept.
    """

    def __init__(
        self,
        packed: PackedWeight,
        bias: typing.Optional[torch.Tensor] = None,
        stride: IntOrPair = 1,
        padding: typing.Union[str, IntOrPair] = 0,
        dilation: IntOrPair = 1,
        groups: int = 1,
        activation: typing.Optional[str] = None,
    ) -> None:
        super().__init__()
        if not isinstance(packed, PackedWeight):
            raise TypeError(f"packed: expected a PackedWeight, got {type(packed).__name__}")
        self.packed = packed
        self.stride = arguments.pair("stride", stride, 1)
        self.dilation = arguments.pair("dilation", dilation, 1)
        arguments.padding_pairs(padding, packed.shape[2:], self.stride, self.dilation)
        self.padding = padding
        self.groups = arguments.group_count(groups, packed.shape[0])
        arguments.is_relu(activation)
        self.activation = activation
        if bias is not None:
            _check_bias(bias, packed.shape[0])
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @classmethod
    def from_dense(
        cls, conv: torch.nn.Conv2d, activation: typing.Optional[str] = None
    ) -> "SparseConv2d":
        """The same layer with `conv.weight` packed: FP16 values, zeros dropped.

        Raises TypeError unless `conv` is a torch.nn.Conv2d, ValueError for a padding mode
        other than zeros, and as `packedconv.pack` for the weight.
        """
        if not isinstance(conv, torch.nn.Conv2d):
            raise TypeError(f"conv: expected a torch.nn.Conv2d, got {type(conv).__name__}")
        if torch.nn.parameter.is_lazy(conv.weight):
            raise ValueError(
                "conv: expected an initialized layer, got one whose weight has no shape yet; "
                "call it on an image first"
            )
        if conv.padding_mode != "zeros":
            raise ValueError(
                f'conv: expected padding_mode "zeros", got {conv.padding_mode!r}; '
                "pad the input before the layer instead"
            )
        return cls(
            pack(conv.weight),
            conv.bias,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            activation=activation,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return conv2d(
            input,
            self.packed,
            self.bias,
            activation=self.activation,
            **self._options(),
        )

    def plan(
        self,
        input_shape: typing.Sequence[int],
        threads: typing.Optional[int] = None,
        schedule: typing.Optional[Schedule] = None,
    ) -> CpuPlan:
        """The plan of the layer on the CPU for an input of this shape; see PackedWeight.plan."""
        return self.packed.plan(input_shape, **self._options(), threads=threads, schedule=schedule)

    def autotune(
        self,
        input_shape: typing.Sequence[int],
        threads: typing.Optional[int] = None,
        seconds: float = 1.0,
    ) -> CpuPlan:
        """Keep the fastest schedule for inputs of this shape; see PackedWeight.autotune."""
        return self.packed.autotune(
            input_shape, **self._options(), threads=threads, seconds=seconds
        )

    def _options(self) -> typing.Dict[str, typing.Any]:
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    def get_extra_state(self) -> torch.Tensor:
        content = np.frombuffer(packed_file.to_bytes(self.packed), dtype=np.uint8)
        return torch.from_numpy(content.copy())

    def set_extra_state(self, state: torch.Tensor) -> None:
        packed = packed_file.from_bytes(state.cpu().numpy().tobytes())
        if packed.shape != self.packed.shape:
            raise ValueError(f"packed: expected shape {self.packed.shape}, got {packed.shape}")
        self.packed = packed

    def extra_repr(self) -> str:
        return (
            f"{self.packed}, stride={self.stride}, padding={self.padding!r}, "
            f"dilation={self.dilation}, groups={self.groups}, activation={self.activation!r}"
        )


def _check_bias(bias: torch.Tensor, out_channels: int) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: expected a torch.Tensor, got {type(bias).__name__}")
    if tuple(bias.shape) != (out_channels,):
        raise ValueError(f"bias: expected shape ({out_channels},), got {tuple(bias.shape)}")
