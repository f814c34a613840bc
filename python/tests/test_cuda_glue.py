"""From conv2d to the launch of a CUDA kernel: plans, tables, streams, graphs and errors.

A recording stand-in for the extension shows what is launched; the emulated extension computes
layers on the CPU; and what only a GPU can show is skipped without one.
"""

import copy
import functools
import gc
import pickle
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
from drawn_layers import LAYERS, check, laid_out
from emulation import A100, H200, TEGRA_X1, emulated_core
from hypothesis import given
from hypothesis import strategies as st

from packedconv import _core, conv, cuda, device
from packedconv.conv import conv2d
from packedconv.packed import PackedWeight, pack

pytestmark = pytest.mark.usefixtures("one_thread")


def random_tensor(*shape, seed=0, place="cpu"):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return values.to(place)


def sparse_weight(*shape, seed=0):
    weight = random_tensor(*shape, seed=seed).clamp(min=1e-3)
    return pack(weight * (random_tensor(*shape, seed=seed + 1) > 0.2))


class RecordingCore:
    """Notes plans and launches. Its table depends on the weight and the height of the image."""

    def __init__(self):
        self.plans, self.launches = [], []

    def cuda_plan(self, **arguments):
        self.plans.append(arguments)
        table = arguments["words"] + np.uint32(arguments["input_shape"][2])
        return types.SimpleNamespace(table=table, number=len(self.plans))

    def cuda_conv2d(self, **arguments):
        self.launches.append(arguments)


@pytest.fixture
def core():
    return RecordingCore()


@pytest.fixture
def packed():
    """3 x 3, 4 channels to 6."""
    return sparse_weight(6, 4, 3, 3)


@pytest.fixture
def image():
    return random_tensor(2, 4, 9, 11)


def call(core, packed, image, limits=A100, device_index=0, stream=1, **options):
    """conv2d with the launches of `core`."""
    launch_options = {
        name: options.pop(name) for name in ("implementation", "config") if name in options
    }
    launch = functools.partial(cuda.convolve, core, limits, device_index, stream, **launch_options)
    return conv.compute(image, packed, launch=launch, **options)


@pytest.fixture
def recorded_streams(monkeypatch):
    tables = []
    monkeypatch.setattr(cuda, "_record_stream", tables.append)
    return tables


@pytest.fixture
def capture(monkeypatch):
    """Turns CUDA graph capture on and off, as far as the code can see."""
    state = types.SimpleNamespace(on=False)
    monkeypatch.setattr(cuda, "_capturing", lambda tensor: state.on)
    return state


# What is launched.


def test_launch(core, packed):
    image = laid_out(random_tensor(2, 4, 9, 11), "channels_last")
    bias, out = random_tensor(6), laid_out(torch.zeros(2, 6, 5, 11), "transposed")
    result = call(
        core, packed, image, stream=77, device_index=3, bias=bias, out=out, activation="relu",
        stride=(2, 1), padding=(1, 2), dilation=(1, 2),
    )  # fmt: skip
    assert result is out
    [plan], [launch] = core.plans, core.launches
    assert plan.pop("words") is packed.words
    assert plan.pop("offsets") is packed.offsets
    assert plan == {
        "input_shape": (2, 4, 9, 11),
        "output_shape": (2, 6, 5, 11),
        "kernel": (3, 3),
        "stride": (2, 1),
        "padding": (1, 2),
        "dilation": (1, 2),
        "groups": 1,
        "limits": A100,
        "implementation": "auto",
        "config": None,
    }
    table = launch.pop("table")
    assert table % 16 == 0
    assert launch.pop("plan").number == 1
    assert launch == {
        "device": 3,
        "stream": 77,
        "input": image.data_ptr(),
        "input_strides": image.stride(),
        "bias": bias.data_ptr(),
        "relu": True,
        "output": out.data_ptr(),
        "output_strides": out.stride(),
    }


def test_table_is_the_plan_s(core, packed, image):
    call(core, packed, image)
    [entry] = packed.derived("cuda", None).entries.values()
    assert core.launches[0]["table"] == entry.table.memory.data_ptr()
    assert np.array_equal(entry.table.memory.numpy().view(np.uint32), packed.words + np.uint32(9))


def test_no_bias_and_unbatched(core, packed, image):
    result = call(core, packed, image[1])
    assert result.shape == (6, 7, 9)
    assert core.plans[0]["input_shape"] == (1, 4, 9, 11)
    assert core.launches[0]["bias"] == 0
    assert core.launches[0]["input"] == image[1].data_ptr()


def test_negated_views_are_resolved(core, packed, image):
    negated = torch._neg_view(image)
    call(core, packed, negated)
    assert core.launches[0]["input"] != image.data_ptr()


def test_empty_batch_launches_nothing(core, packed):
    assert call(core, packed, torch.zeros(0, 4, 9, 11)).shape == (0, 6, 7, 9)
    assert not core.plans
    assert not core.launches


# Plans and tables.


def test_second_call_plans_and_copies_nothing(core, packed, image, monkeypatch):
    call(core, packed, image)
    monkeypatch.setattr(cuda, "_Table", None)
    call(core, packed, image.clone(), bias=random_tensor(6), activation="relu")
    call(core, packed, laid_out(image, "channels_last"))
    assert len(core.plans) == 1
    assert len({launch["table"] for launch in core.launches}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"image": random_tensor(1, 4, 9, 11)},
        {"image": random_tensor(2, 4, 10, 11)},
        {"stride": 2},
        {"padding": 1},
        {"padding": "same"},
        {"dilation": 2},
        {"limits": H200},
        {"device_index": 1},
        {"implementation": "general"},
        {"implementation": "paper", "config": (32, 4, 2, 1)},
        {"implementation": "paper", "config": [32, 4, 2, 2]},
        {"core": RecordingCore()},
    ],
)
def test_what_a_plan_depends_on(core, packed, image, changes):
    arguments = {"core": core, "packed": packed, "image": image}
    for _ in range(2):
        call(**arguments)
        call(**{**arguments, **changes})
    plans = core.plans + (changes["core"].plans if "core" in changes else [])
    assert len(plans) == 2


def test_plans_of_a_weight(packed, image):
    assert cuda.plans(packed) == []
    for implementation in ("general", "column", "paper", "general"):
        call(emulated(), packed, image, implementation=implementation)
    assert [plan.kernel for plan in cuda.plans(packed)] == ["column", "paper", "general"]
    for plan in cuda.plans(packed):
        assert plan.why
        assert plan.facts["threads"] % 32 == 0
    column, paper, general = [plan.facts for plan in cuda.plans(packed)]
    assert len(column["config"]) == 8
    assert column["config"][:3] in _core.cuda_kernels()["column"]
    assert column["tile"][1] == column["lane_columns"] * column["column_groups"]
    assert paper["config"] in _core.cuda_kernels()["paper"]
    assert paper["tile"] == (
        paper["rows_per_thread"],
        paper["col_per_warp"] * paper["warps_per_block"],
    )
    assert 0 < max(column["shared_bytes"], paper["shared_bytes"]) <= A100[2]
    assert general["config"] is None


def test_configuration_is_taken_as_given(packed, image):
    for config in [(4, 8, 2, 1), (16, 2, 4, 3)]:
        call(emulated(), packed, image, implementation="paper", config=config)
        assert cuda.plans(packed)[-1].facts["config"] == config
    call(emulated(), packed, image, implementation="column")
    config = cuda.plans(packed)[-1].facts["config"]
    call(emulated(), packed, image, implementation="column", config=config)
    assert cuda.plans(packed)[-1].facts["config"] == config
    assert len(cuda.plans(packed)) == 4


def test_groups_are_part_of_the_plan(core, image):
    packed = sparse_weight(6, 4, 3, 3)
    call(core, packed, image)
    call(core, packed, random_tensor(2, 8, 9, 11), groups=2)
    assert [plan["groups"] for plan in core.plans] == [1, 2]


def test_equal_tables_are_copied_once(core, packed, image):
    for width in (11, 12, 13):
        call(core, packed, random_tensor(2, 4, 9, width))
    assert len(core.plans) == 3
    assert len({launch["table"] for launch in core.launches}) == 1
    call(core, packed, random_tensor(2, 4, 10, 11))
    assert len({launch["table"] for launch in core.launches}) == 2


def test_least_recently_used_plan_is_dropped(core, packed):
    def run(width):
        call(core, packed, random_tensor(1, 4, 3, width))

    for width in range(3, 3 + cuda.MAX_PLANS):
        run(width)
    run(3)
    run(3 + cuda.MAX_PLANS)
    assert len(packed.derived("cuda", None).entries) == cuda.MAX_PLANS
    made = len(core.plans)
    run(3)
    assert len(core.plans) == made
    run(4)
    assert len(core.plans) == made + 1


def test_tables_go_with_the_packed_weight(core, image):
    packed = sparse_weight(6, 4, 3, 3)
    call(core, packed, image)
    [entry] = packed.derived("cuda", None).entries.values()
    gone = weakref.ref(entry.table)
    del packed, entry
    core.plans.clear()
    core.launches.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))],
)
def test_copies_leave_plans_behind(core, packed, image, copied):
    before = pickle.dumps(packed)
    call(core, packed, image)
    assert pickle.dumps(packed) == before
    other = copied(packed)
    assert other == packed
    call(core, other, image)
    assert len(core.plans) == 2


def test_threads_share_one_plan(packed, image):
    class SlowCore(RecordingCore):
        def cuda_plan(self, **arguments):
            time.sleep(0.05)  # for the others to come, too
            return super().cuda_plan(**arguments)

    core, barrier = SlowCore(), threading.Barrier(8)

    def run():
        barrier.wait()
        call(core, packed, image)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(core.plans) == 1
    assert len(core.launches) == 8


def test_error_of_a_plan(packed, image):
    class Refusing(RecordingCore):
        def cuda_plan(self, **arguments):
            raise ValueError("weight: changed after packing")

    for _ in range(2):
        with pytest.raises(ValueError, match="weight: changed after packing"):
            call(Refusing(), packed, image)
    assert not packed.derived("cuda", None).entries


def test_error_of_a_launch(packed, image):
    class Failing(RecordingCore):
        def cuda_conv2d(self, **arguments):
            raise RuntimeError('conv2d: CUDA says "invalid resource handle"')

    out = torch.zeros(2, 6, 7, 9)
    version = out._version
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        call(Failing(), packed, image, out=out)
    assert out._version == version


# Streams and graphs.


def test_table_is_kept_for_other_streams(core, packed, image, recorded_streams):
    call(core, packed, image, stream=5)
    call(core, packed, image, stream=5)
    assert not recorded_streams
    call(core, packed, image, stream=6)
    assert [memory.data_ptr() for memory in recorded_streams] == [core.launches[0]["table"]]
    # A plan made in another stream that shares the table belongs to the table's stream.
    call(core, packed, random_tensor(2, 4, 9, 12), stream=6)
    assert len(recorded_streams) == 2
    call(core, packed, random_tensor(2, 4, 9, 12), stream=5)
    assert len(recorded_streams) == 2


def test_capture_of_a_first_call(core, packed, image, capture):
    capture.on = True
    with pytest.raises(RuntimeError, match="call conv2d once before capturing"):
        call(core, packed, image)
    assert not core.plans
    assert not core.launches
    capture.on = False
    call(core, packed, image)
    capture.on = True
    call(core, packed, image)
    assert len(core.plans) == 1
    with pytest.raises(RuntimeError, match="call conv2d once before capturing"):
        call(core, packed, random_tensor(1, 4, 9, 11))


@pytest.mark.parametrize("capturing", [False, True, None])
def test_whether_a_graph_is_captured(core, packed, image, monkeypatch, capturing):
    """PyTorch 1.10 has no function that tells."""
    name = "is_current_stream_capturing"
    if capturing is None:
        monkeypatch.delattr(torch.cuda, name)
    else:
        monkeypatch.setattr(torch.cuda, name, lambda: capturing)
    assert cuda._capturing(OnGpu(2, 4, 9, 11)) is bool(capturing)
    assert not cuda._capturing(image)


def test_captured_weights_are_known(core, packed, image, capture):
    assert not cuda.is_captured(packed)
    call(core, packed, image)
    assert not cuda.is_captured(packed)
    capture.on = True
    call(core, packed, image)
    capture.on = False
    call(core, packed, image)
    assert cuda.is_captured(packed)


def test_captured_plans_are_never_dropped(core, packed, image, capture):
    call(core, packed, image)
    capture.on = True
    call(core, packed, image)
    capture.on = False
    for width in range(3, 10 + cuda.MAX_PLANS):
        call(core, packed, random_tensor(1, 4, 3, width))
    assert len(packed.derived("cuda", None).entries) == cuda.MAX_PLANS
    made = len(core.plans)
    call(core, packed, image)
    assert len(core.plans) == made


def test_current_stream_of_the_input_s_device(core, packed, image, monkeypatch):
    """Whichever device is current: a stream of another one is never launched on."""
    current = [7]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    def current_stream():
        return types.SimpleNamespace(cuda_stream=100 + current[-1])

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(cuda, "_core", core)
    monkeypatch.setattr(cuda, "_Table", lambda values, digest, place, stream: table)
    monkeypatch.setattr(device, "device_limits", lambda index: (80, index, 0, 0))
    table = types.SimpleNamespace(memory=torch.zeros(4), stream=102, digest=b"")

    class OnGpu2(torch.Tensor):
        device = torch.device("cuda:2")

    out = torch.empty(2, 6, 7, 9)
    cuda.launch(image.as_subclass(OnGpu2), packed, None, (1, 1), (0, 0), (1, 1), 1, False, out)
    assert core.launches[0]["stream"] == 102
    assert core.launches[0]["device"] == 2
    assert core.plans[0]["limits"] == (80, 2, 0, 0)
    assert current == [7]


# Arguments that are refused.


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU and has no memory there."""

    @staticmethod
    def __new__(cls, *shape, place="cuda:0"):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=place)

    @classmethod
    def __torch_dispatch__(cls, function, classes, arguments=(), options=None):
        raise AssertionError(f"nothing is computed, not even {function}")


def gpu(name="NVIDIA A100-SXM4-40GB", capability=(8, 0), multiprocessors=108):
    return {
        "name": name,
        "compute_capability": capability,
        "multiprocessors": multiprocessors,
        "memory_bytes": 40 << 30,
        "shared_per_block": 166912,
        "shared_per_multiprocessor": 167936,
    }


@pytest.fixture
def extension(monkeypatch):
    """Sets the CUDA version, the architectures and the GPUs that the extension tells of."""

    def set_up(version="13.0", architectures=(80, 90), gpus=(), driver="13.0"):
        info = {"cuda": version, "cuda_architectures": list(architectures)}
        found = [{**gpu, "index": index} for index, gpu in enumerate(gpus)]
        core = types.SimpleNamespace(
            build_info=lambda: info, gpus=lambda: found, cuda_driver_version=lambda: driver
        )
        monkeypatch.setattr(device, "_extension", lambda: core)

    device.device_limits.cache_clear()
    yield set_up
    device.device_limits.cache_clear()


def test_build_without_cuda(packed, extension):
    extension(version=None, architectures=())
    with pytest.raises(RuntimeError, match="this build has no CUDA kernels; build with nvcc"):
        conv2d(OnGpu(2, 4, 9, 11), packed)
    with pytest.raises(RuntimeError, match="this build has no CUDA kernels; build with nvcc"):
        cuda.conv2d(OnGpu(2, 4, 9, 11), packed, implementation="paper")


def test_machine_without_a_gpu(packed, extension):
    extension()
    with pytest.raises(RuntimeError, match=r"cuda:0: no CUDA device, .*nvidia-smi"):
        conv2d(OnGpu(2, 4, 9, 11), packed)


def test_driver_that_is_too_old(packed, extension):
    extension(driver="12.4")
    message = "cuda:0: the driver supports CUDA 12.4 and this build needs 13.0: update the driver"
    with pytest.raises(RuntimeError, match=message):
        conv2d(OnGpu(2, 4, 9, 11), packed)


def test_gpu_that_is_too_old(packed, extension):
    extension(gpus=[gpu(), gpu("Tesla T4", (7, 5), 40)])
    message = (
        r"cuda:1: Tesla T4 \(compute capability 7.5\) is older than every architecture of this "
        r"build \(8.0, 9.0\); rebuild with the CMake option -DCMAKE_CUDA_ARCHITECTURES=75 "
    )
    with pytest.raises(RuntimeError, match=message):
        conv2d(OnGpu(2, 4, 9, 11, place="cuda:1"), packed)


def test_gpu_that_the_driver_does_not_show(packed, extension):
    extension(gpus=[gpu()])
    message = r"cuda:3: expected one of the GPUs that the driver shows \(cuda:0 NVIDIA A100-SXM4-"
    with pytest.raises(RuntimeError, match=message):
        conv2d(OnGpu(2, 4, 9, 11, place="cuda:3"), packed)


@pytest.mark.parametrize("name", ["bias", "out"])
def test_tensors_on_different_devices(packed, image, extension, name):
    extension(gpus=[gpu(), gpu()])
    shape = {"bias": (6,), "out": (2, 6, 7, 9)}[name]
    message = rf"{name}: expected a tensor on cpu, where the input is, got cuda:0; move it with"
    with pytest.raises(ValueError, match=message):
        conv2d(image, packed, **{name: OnGpu(*shape)})
    message = rf"{name}: expected a tensor on cuda:0, where the input is, got cuda:1"
    with pytest.raises(ValueError, match=message):
        conv2d(OnGpu(2, 4, 9, 11), packed, **{name: OnGpu(*shape, place="cuda:1")})
    message = rf"{name}: expected a tensor on cuda:0, where the input is, got cpu"
    with pytest.raises(ValueError, match=message):
        conv2d(OnGpu(2, 4, 9, 11), packed, **{name: torch.zeros(shape)})


def test_devices_without_a_kernel(packed):
    for place in ("meta", "xla:0"):
        image = OnGpu(2, 4, 9, 11, place=place)
        with pytest.raises(ValueError, match=f"input: expected .* NVIDIA GPU, .* got {place}"):
            conv2d(image, packed)


def test_named_kernel_on_the_cpu(packed, image):
    with pytest.raises(ValueError, match="input: expected a CUDA tensor, got cpu; move it"):
        cuda.conv2d(image, packed, implementation="paper")
    with pytest.raises(TypeError, match=r"input: expected a torch.Tensor, got NoneType"):
        cuda.conv2d(None, packed)


def test_launch_on_this_machine(packed, image):
    """The extension as it is built here says what is missing."""
    if _core.gpus():
        pytest.skip("there is a GPU")
    plan = _core.cuda_plan(
        (2, 4, 9, 11), (2, 6, 7, 9), packed.words, packed.offsets, (3, 3), (1, 1), (0, 0), (1, 1),
        1, A100,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"conv2d: .*no CUDA (kernels|device)"):
        _core.cuda_conv2d(plan, 0, 0, 0, (0, 0, 0, 0), 0, 0, False, 0, (0, 0, 0, 0))
    with pytest.raises(RuntimeError, match=r"no CUDA (kernels|device)"):
        conv2d(OnGpu(2, 4, 9, 11), packed)


@pytest.mark.parametrize(
    ("implementation", "config", "message"),
    [
        ("fast", None, 'implementation: expected "auto", "column", "paper" or "general", got "f'),
        ("auto", (1, 2), 'config: expected None for implementation "auto"'),
        ("general", (1, 2), 'config: expected None for implementation "general"'),
        ("paper", (32, 4), r"config: expected \(col_per_warp, rows_per_thread, .* got 2 values"),
        ("column", (8, 2), r"config: expected \(rows_per_thread, column_groups, .* got 2 values"),
        ("paper", (5, 4, 2, 1), "mapping|config"),
        ("column", (1,) * 8, "config"),
    ],
)
def test_kernels_that_do_not_exist(packed, image, implementation, config, message):
    with pytest.raises(ValueError, match=message):
        call(_core, packed, image, implementation=implementation, config=config)


def test_configuration_of_another_type(packed, image):
    with pytest.raises(TypeError, match="config: expected None or a tuple of ints"):
        call(_core, packed, image, implementation="paper", config="fast")


def test_column_kernel_for_a_layer_that_it_cannot_compute():
    packed = sparse_weight(2, 2, 16, 16)
    image = random_tensor(1, 2, 600, 600)
    limits = (80, 108, 2048, 2048)
    with pytest.raises(ValueError, match="implementation: no tile of the column kernel"):
        call(_core, packed, image, limits=limits, implementation="column", dilation=30)


# Memory of CUDA tensors.


class AddressOnly:
    """What the overlap check sees of a CUDA tensor."""

    device = torch.device("cuda:0")

    def __init__(self, tensor):
        self.shape, self.stride, self.data_ptr = tensor.shape, tensor.stride, tensor.data_ptr
        self.numel, self.is_contiguous = tensor.numel, tensor.is_contiguous


@given(
    st.tuples(*[st.integers(0, 40)] * 2),
    st.tuples(*[st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4)] * 2),
)
def test_overlap_is_found_by_address(starts, axes):
    memory = torch.zeros(200)
    views = [
        memory.as_strided([size for size, _ in axis], [step for _, step in axis], start)
        for start, axis in zip(starts, axes)
    ]
    elements = [set(view.flatten().tolist()) for view in self_numbered(memory, views)]
    expected = bool(elements[0] & elements[1])
    assert conv._share_memory(*map(AddressOnly, views)) == expected
    assert conv._share_memory(*views) == expected


def self_numbered(memory, views):
    """The views of memory in which every element holds its own index."""
    memory.copy_(torch.arange(len(memory)))
    return views


def test_interleaved_out_on_a_gpu():
    memory = torch.zeros(1, 4, 9, 22)
    even, odd = AddressOnly(memory[..., ::2]), AddressOnly(memory[..., 1::2])
    assert not conv._share_memory(even, odd)
    assert conv._share_memory(even, AddressOnly(memory))


# The emulated kernels behind the whole of conv2d.


@functools.lru_cache(maxsize=None)
def emulated():
    return emulated_core()


SOME_LAYERS = LAYERS[::9]
ALL_LIMITS = (A100, H200, TEGRA_X1)


@pytest.mark.parametrize("layer", SOME_LAYERS, ids=LAYERS.index)
def test_drawn_layer(layer):
    def run(image, packed, *arguments, **options):
        return call(emulated(), packed, image, ALL_LIMITS[layer.seed % 3], bias=arguments[0],
                    **options)  # fmt: skip

    check(layer, run)


@pytest.mark.parametrize("implementation", ["auto", "column", "paper", "general"])
def test_every_kernel_computes_what_the_cpu_does(packed, image, implementation):
    bias = random_tensor(6)
    options = {"bias": bias, "padding": 1, "activation": "relu"}
    expected = conv2d(image, packed, **options)
    for _ in range(2):
        result = call(emulated(), packed, image, implementation=implementation, **options)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    negated = call(emulated(), packed, torch._neg_view(image), implementation=implementation)
    torch.testing.assert_close(negated, conv2d(-image, packed), rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "column", "paper", "general"])
@pytest.mark.parametrize("name", ["words", "offsets"])
def test_packed_weight_that_was_tampered_with(image, implementation, name):
    packed = sparse_weight(6, 4, 3, 3)
    changed = getattr(packed, name).copy()
    if name == "words":
        changed[7] |= 0xFF00  # input channel 255
    else:
        changed[0, 2] = 10**6
    setattr(packed, "_" + name, changed)
    with pytest.raises(ValueError, match=r"weight: expected .* pack it again"):
        call(emulated(), packed, image, implementation=implementation)


def test_tile_that_is_too_large_for_the_device(image):
    packed = sparse_weight(2, 2, 16, 16)
    image = random_tensor(1, 2, 200, 200)
    with pytest.raises(ValueError, match="shared memory"):
        call(
            emulated(), packed, image, (53, 1, 2048, 2048), implementation="paper",
            config=(32, 8, 8, 1), dilation=8,
        )  # fmt: skip


# On a GPU.

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and any(found.kind == "cuda" for found in device.devices())),
    reason="no GPU that this build has kernels for",
)


@needs_gpu
@pytest.mark.parametrize("layer", SOME_LAYERS, ids=LAYERS.index)
def test_drawn_layer_on_a_gpu(layer):
    def run(image, packed, bias, out=None, **options):
        place = None
        if out is not None:
            size = out.untyped_storage().nbytes() // 4
            place = torch.empty(0).set_(out.untyped_storage(), 0, (size,)).cuda()
        result = conv2d(
            moved(image),
            packed,
            None if bias is None else moved(bias),
            out=None
            if out is None
            else place.as_strided(out.shape, out.stride(), out.storage_offset()),
            **options,
        ).cpu()
        if out is None:
            return result
        memory = torch.empty(0).set_(out.untyped_storage(), 0, (size,))
        memory.copy_(place)
        return out

    def moved(tensor):
        """On the GPU with the same strides and what lies between its elements."""
        size = tensor.untyped_storage().nbytes() // 4
        memory = torch.empty(0).set_(tensor.untyped_storage(), 0, (size,)).cuda()
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    check(layer, run)


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("implementation", ["auto", "column", "paper", "general"])
def test_later_calls_wait_for_nothing(packed, image, implementation):
    image, bias = image.cuda(), random_tensor(6, place="cuda")
    expected = cuda.conv2d(image, packed, bias, padding=1, implementation=implementation)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = cuda.conv2d(image, packed, bias, padding=1, implementation=implementation)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert torch.equal(result, expected)
    cpu = conv2d(image.cpu(), packed, bias.cpu(), padding=1)
    torch.testing.assert_close(result.cpu(), cpu, rtol=0, atol=1e-5)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_graph(packed, image):
    image, out = image.cuda(), torch.zeros(2, 6, 7, 9, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call conv2d once before capturing"), torch.cuda.graph(
        graph
    ):
        conv2d(image, packed, out=out)
    conv2d(image, packed, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        conv2d(image, packed, out=out)
    for seed in (4, 5):
        image.copy_(random_tensor(2, 4, 9, 11, seed=seed))
        graph.replay()
        torch.testing.assert_close(out.cpu(), conv2d(image.cpu(), packed), rtol=0, atol=1e-5)


@needs_gpu
def test_other_streams(packed, image):
    image = image.cuda()
    expected = conv2d(image, packed)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(conv2d(image, packed))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@needs_gpu
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_on_a_gpu(packed, image, mode):
    compiled = torch.compile(lambda x: conv2d(x, packed, padding=1) + 1, fullgraph=True, mode=mode)
    for seed in range(5):
        image = random_tensor(2, 4, 9, 11, seed=seed, place="cuda")
        with torch.no_grad():
            assert torch.equal(compiled(image), conv2d(image, packed, padding=1) + 1)


@needs_gpu
def test_out_that_overlaps_the_input_on_a_gpu(packed):
    memory = torch.zeros(12, 9, 11, device="cuda")
    with pytest.raises(ValueError, match="out: expected memory apart from input"):
        conv2d(memory[:4], packed, padding=1, out=memory[3:9])
    conv2d(memory[:4], packed, padding=1, out=memory[4:10])


@needs_gpu
def test_stream_of_another_device_is_refused(packed, image):
    """A launch with a handle that CUDA does not know there raises what CUDA says."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    image = image.to("cuda:0")
    conv2d(image, packed)
    stream = torch.cuda.Stream("cuda:1").cuda_stream
    out = torch.empty(2, 6, 7, 9, device="cuda:0")
    with pytest.raises(RuntimeError, match="CUDA says"):
        cuda.convolve(
            *(_core, device.device_limits(0), 0, stream, image, packed, None),
            *((1, 1), (0, 0), (1, 1), 1, False, out),
        )


def test_packed_weight_stays_as_it_was(core, packed, image):
    words, offsets = packed.words.copy(), packed.offsets.copy()
    call(core, packed, image)
    assert packed == PackedWeight(words, offsets, packed.shape)
