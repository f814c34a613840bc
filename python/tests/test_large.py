"""Tensors of more than 2^31 elements, and layers of many channels.

Memory that nothing was written to costs nothing: reading it gives zeros. So the inputs here
are zero but for a few elements, and strides skip most of them.
"""

import ctypes
import mmap
import os

import numpy as np
import pytest
import torch
from drawn_layers import reference_and_bound
from emulation import make_call

from packedconv import _core, conv2d, pack

LIMIT = 2**31


def mapped(elements):
    """A tensor of zeros whose pages are there once they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, 4 * elements, flags=flags)
    except OSError as error:
        pytest.skip(f"no {4 * elements / 2**30:.0f} GiB of addresses: {error}")
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.float32))


def share_pages(memory, period):
    """Let every `period` elements of memory from `mapped` be the same pages; returns memory."""
    file = os.memfd_create("pages")
    os.ftruncate(file, 4 * period)
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x10  # MAP_FIXED, which the mmap module lacks
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    for first in range(0, memory.numel(), period):
        address = memory.data_ptr() + 4 * first
        size = 4 * min(period, memory.numel() - first)
        if call(address, size, protection, mmap.MAP_SHARED | fixed, file, 0) != address:
            pytest.skip(f"cannot map pages again: {os.strerror(ctypes.get_errno())}")
    os.close(file)
    return memory


def few_weights(*shape):
    """Two nonzeros an output channel: its first weight, and its last."""
    weight = torch.zeros(shape)
    for channel, row in enumerate(weight.flatten(1)):
        row[0], row[-1] = 1 + channel, -0.5 - channel
    return weight


# (input shape, kernel, stride, dilation): beyond 2^31 elements along each axis in turn.
INPUTS = {
    "images": ((33000, 1, 255, 256), (3, 3), (253, 254), (1, 1)),
    "channels": ((2, 2048, 725, 725), (1, 1), (181, 181), (1, 1)),
    "rows": ((1, 1, 2**24 + 3, 129), (3, 3), (2**21, 64), (1, 1)),
    "columns": ((1, 2, 2, 2**29 + 77), (1, 3), (1, 2**26), (1, 1)),
    "dilated rows": ((1, 1, 2**25 + 1, 65), (3, 1), (2**21, 8), (2**23 + 1, 1)),
    "dilated columns": ((1, 1, 1, 2**31 + 9), (1, 3), (1, 2**26), (1, 2**29 + 1)),
    # Refused: the input of a tile is what lies between its kernel columns too.
    "columns far apart": ((1, 1, 1, 2**31 + 9), (1, 3), (1, 1), (1, 2**30 + 1)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_beyond_2_31_elements(name):
    """What 32-bit indices would read instead is another number."""
    shape, kernel, stride, dilation = INPUTS[name]
    batch, channels, height, width = shape
    image = mapped(batch * channels * height * width).view(shape)
    assert image.numel() > LIMIT
    packed = pack(few_weights(2, channels, *kernel))
    rows = 1 + (height - 1 - dilation[0] * (kernel[0] - 1)) // stride[0]
    columns = 1 + (width - 1 - dilation[1] * (kernel[1] - 1)) // stride[1]
    # The first and last images, rows and columns of the output, as what they read is set.
    last = (dilation[0] * (kernel[0] - 1), dilation[1] * (kernel[1] - 1))
    expected = {}
    for number in {0, batch // 2, batch - 1}:
        for row in {0, rows // 2, rows - 1}:
            for column in {0, columns // 2, columns - 1}:
                y, x = row * stride[0], column * stride[1]
                place = (number, row, column)
                image[number, 0, y, x] = 1 + len(expected) % 7
                image[number, -1, y + last[0], x + last[1]] = 3 + len(expected) % 5
                expected[place] = None
    for number, row, column in expected:
        y, x = row * stride[0], column * stride[1]
        first, second = image[number, 0, y, x], image[number, -1, y + last[0], x + last[1]]
        expected[number, row, column] = [first - 0.5 * second, 2 * first - 1.5 * second]
    result = conv2d(image, packed, stride=stride, dilation=dilation)
    assert result.shape == (batch, 2, rows, columns)
    for place, values in expected.items():
        number, row, column = place
        assert result[number, :, row, column].tolist() == values, place


def test_expanded_input_beyond_2_31_elements():
    """2^37 elements, which are one row of memory."""
    row = torch.rand(2**9 + 3, generator=torch.Generator().manual_seed(1))
    image = row.expand(3, 1024, 2**16, -1)
    assert image.numel() > 2**36
    packed = pack(few_weights(3, 1024, 1, 3))
    result = conv2d(image, packed, stride=(2**13, 1))
    expected = conv2d(image[:1, :, :1], packed)
    assert result.shape == (3, 3, 8, 2**9 + 1)
    assert torch.allclose(result, expected.expand(result.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "strides",
    [
        (2**33, 2**31 + 64, 100, 1),
        (40, 200, 2**31 + 1000, 1),
        (8, 64, 600, 2**31 // 5),
        (2**34, 16, 2**31 + 9, 128),
    ],
)
def test_strides_beyond_2_31_elements(strides):
    """Input and output whose elements lie far apart, with every schedule."""
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(2, 3, 6, 7, generator=generator)
    packed = pack(torch.rand(3, 3, 3, 3, generator=generator) + 0.1)
    reach = 1 + sum(step * (size - 1) for step, size in zip(strides, values.shape))
    assert reach > LIMIT
    image = mapped(reach).as_strided(values.shape, strides)
    image.copy_(values)
    out = mapped(reach).as_strided(values.shape, strides)
    expected = torch.nn.functional.conv2d(values, packed.unpack(), padding=1)
    assert conv2d(image, packed, padding=1, out=out) is out
    assert torch.allclose(out, expected, rtol=0, atol=1e-5)

    call = make_call(image, packed, padding=1, out=out)
    layer = {
        "input_shape": tuple(call.input.shape),
        "output_shape": tuple(call.output.shape),
        "words": call.words,
        "offsets": call.offsets,
        "kernel": call.kernel,
        "stride": call.stride,
        "padding": call.padding,
        "dilation": call.dilation,
        "groups": call.groups,
        "threads": 2,
    }
    schedules = _core.cpu_schedules(**layer)
    for schedule in [*schedules, {**schedules[0], "path": "naive"}]:
        out.fill_(float("nan"))
        _core.CpuPlan(**layer, schedule=schedule).execute(
            input=image.data_ptr(),
            input_strides=strides,
            bias=0,
            relu=False,
            output=out.data_ptr(),
            output_strides=strides,
            threads=2,
        )
        assert torch.allclose(out, expected, rtol=0, atol=1e-5), schedule


def test_output_beyond_2_31_elements():
    """All below element 2^31 is written to the same few pages, what lies beyond to its own."""
    rows, width = 2**10, 2**12
    row = torch.rand(width, generator=torch.Generator().manual_seed(3)) + 1
    memory = mapped(LIMIT + rows * width)
    share_pages(memory[:LIMIT], rows * width)
    image = row.expand(1, 1, LIMIT // width + rows, width)
    out = memory.view(image.shape)
    assert conv2d(image, pack(torch.full((1, 1, 1, 1), 0.5)), out=out) is out
    expected = (row * 0.5).expand(rows, width)
    for last in (rows, LIMIT // width, LIMIT // width + rows):
        assert torch.equal(out[0, 0, last - rows : last], expected)


@pytest.mark.parametrize(
    ("in_channels", "out_channels", "kernel", "size", "density"),
    [
        (2048, 2048, 1, 7, 0.1),
        (2048, 64, 3, 7, 0.1),
        (64, 2048, 3, 7, 0.1),
        (2048, 2048, 3, 4, 0.02),
        (2048, 512, 1, 14, 0.1),
        (1024, 2048, 1, 1, 0.5),
    ],
)
def test_many_channels(in_channels, out_channels, kernel, size, density):
    generator = torch.Generator().manual_seed(in_channels + out_channels + kernel)
    shape = (out_channels, in_channels, kernel, kernel)
    weight = torch.rand(shape, generator=generator) + 0.1
    weight[torch.rand(shape, generator=generator) >= density] = 0
    packed = pack(weight)
    image = torch.rand(1, in_channels, size, size, generator=generator) * 2 - 1
    bias = torch.rand(out_channels, generator=generator)
    options = {"padding": kernel // 2}
    expected, bound = reference_and_bound(image, packed, bias, None, options)
    result = conv2d(image, packed, bias, **options)
    assert bool(((result.double() - expected).abs() <= bound).all())
