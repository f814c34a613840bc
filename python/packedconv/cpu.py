"""Calls of the CPU kernel, through plans that the packed weight keeps."""

import functools
import typing

import torch

from packedconv import _core, plan
from packedconv.arguments import Pair
from packedconv.packed import PackedWeight


def launch(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor],
    stride: Pair,
    before: Pair,
    dilation: Pair,
    groups: int,
    relu: bool,
    out: torch.Tensor,
    schedule: typing.Optional[typing.Tuple] = None,
) -> None:
    """Compute into `out` on torch.get_num_threads() threads.

    input (N, IC, H, W), out (N, OC, H_out, W_out): float32 of any strides, not overlapping;
    bias contiguous. before: padding above and left of the image. schedule: as `plan.frozen`
    gives it, None for the plan's own.

    The first call for a layer makes its plan; later ones allocate nothing.
    Raises ValueError for a PACKEDCONV_ISA that this processor or build has not, for a schedule
    that it does not have, and for words and offsets that do not fit the layer; MemoryError.
    """
    threads = torch.get_num_threads()
    # torch.Size counts as a tuple in a key.
    call = (input.shape, out.shape, stride, before, dilation, groups, threads, _core.isa())
    plan.find(packed, call, schedule).core.execute(
        input.data_ptr(),
        input.stride(),
        0 if bias is None else bias.data_ptr(),
        relu,
        out.data_ptr(),
        out.stride(),
        threads,
    )


def launcher(
    schedule: typing.Optional[typing.Dict[str, typing.Any]],
) -> typing.Callable[..., None]:
    """`launch` with the schedule given, for `conv.compute`; None for the plan's own.

    Raises TypeError and ValueError for what is no schedule. That a layer does not have it is
    a ValueError of the launch.
    """
    return functools.partial(launch, schedule=None if schedule is None else plan.frozen(schedule))
