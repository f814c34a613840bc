"""CPU plans: what they show, how they are kept, every schedule against float64, autotune."""

import concurrent.futures
import copy
import ctypes
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import tracemalloc
import typing

import numpy as np
import pytest
import torch
from drawn_layers import laid_out, reference_and_bound

from packedconv import _core, autotune, conv, cpu, plan
from packedconv.conv import conv2d
from packedconv.module import SparseConv2d
from packedconv.packed import PackedWeight, pack

pytestmark = pytest.mark.usefixtures("one_thread")
needs_aligned = pytest.mark.skipif(
    _core.isa() not in ("x86_64_v3", "x86_64_v4"), reason="no aligned path"
)


class Case(typing.NamedTuple):
    """A layer: (N, IC, H, W), (OC, IC/groups, K_h, K_w) and options of conv2d."""

    input_shape: typing.Tuple[int, int, int, int]
    weight_shape: typing.Tuple[int, int, int, int]
    options: typing.Dict[str, typing.Any] = {}


CASES = {
    "3 x 3": Case((2, 5, 14, 37), (7, 5, 3, 3), {"padding": 1}),
    "wide": Case((1, 3, 9, 150), (9, 3, 3, 3), {"padding": (0, 1)}),
    "narrow": Case((3, 6, 7, 7), (10, 6, 3, 3), {"padding": 1}),
    "1 x 1": Case((2, 20, 14, 13), (6, 20, 1, 1)),
    "1 x 1, stride 2": Case((2, 20, 15, 14), (6, 20, 1, 1), {"stride": 2}),
    "7 x 7, stride 2": Case((1, 3, 30, 45), (8, 3, 7, 7), {"stride": 2, "padding": 3}),
    "3 x 3, stride 2": Case((2, 4, 28, 27), (5, 4, 3, 3), {"stride": 2, "padding": 1}),
    "5 x 5, same": Case((1, 4, 12, 20), (5, 4, 5, 4), {"padding": "same"}),
    "groups": Case((2, 8, 10, 21), (12, 2, 3, 3), {"padding": 1, "groups": 4}),
    "dilation": Case((1, 6, 17, 30), (4, 6, 3, 3), {"padding": 2, "dilation": 2}),
    "two packed blocks": Case((1, 300, 6, 9), (3, 300, 3, 3), {"padding": 1}),
    "all options": Case(
        (1, 6, 20, 23),
        (4, 3, 2, 3),
        {"stride": (1, 2), "padding": (2, 1), "dilation": (3, 1), "groups": 2},
    ),
    "no image": Case((0, 4, 6, 7), (3, 4, 3, 3), {"padding": 1}),
}
SMALL = Case((1, 4, 9, 11), (6, 4, 3, 3), {"padding": 1})


def random_tensor(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def weight_of(case, seed=0):
    weight = random_tensor(*case.weight_shape, seed=seed).clamp(min=1e-3)
    return pack(weight * (random_tensor(*case.weight_shape, seed=seed + 1) > 0.4))


def image_of(case, seed=2):
    return random_tensor(*case.input_shape, seed=seed)


def schedules_of(packed, case, threads=1):
    key = plan.plan_key(packed, case.input_shape, threads=threads, **case.options)
    return _core.cpu_schedules(**plan.core_arguments(packed, key))


def variants_of(packed, case, threads=1):
    """Schedules that are listed, and some that one can ask for besides."""
    listed = schedules_of(packed, case, threads)
    first = {}
    for schedule in listed:
        first.setdefault(schedule["path"], schedule)
    changes = [{"block_channels": 1}, {"block_channels": 3, "strip": 2}, {"strip": 5}]
    changes += [{"strip": 3, "prefetch": True, "stream": True}]
    changes += [{"strip": 2, "prefetch": False, "stream": False}]
    others = [{**schedule, **change} for schedule in first.values() for change in changes]
    others += [{**first["loose"], "rows": 1, "vectors": 1}, {**listed[0], "path": "naive"}]
    return listed + others


def compute(case, packed, schedule, image=None, **more):
    image = image_of(case) if image is None else image
    launch = cpu.launcher(schedule)
    return conv.compute(image, packed, launch=launch, **case.options, **more)


def kept_plans(packed):
    return packed.derived("cpu", None).entries


@pytest.fixture
def packed():
    return weight_of(SMALL)


@pytest.fixture
def made(monkeypatch):
    """The keys of the plans that are compiled from now on."""
    keys = []
    compiled = plan.compiled
    monkeypatch.setattr(
        plan,
        "compiled",
        lambda packed, key, *rest: (keys.append(key), compiled(packed, key, *rest))[1],
    )
    return keys


class Recorder:
    """A compiled plan that notes the threads of its executions."""

    def __init__(self, core, threads):
        self.core, self.threads = core, threads
        self.schedule, self.facts, self.why = core.schedule, core.facts, core.why

    def execute(self, *arguments):
        self.threads.append(arguments[-1])
        self.core.execute(*arguments)


@pytest.fixture
def executed(monkeypatch):
    """The number of threads of each execution of a plan that is compiled from now on."""
    threads = []
    compiled = plan.compiled
    monkeypatch.setattr(plan, "compiled", lambda *a: Recorder(compiled(*a), threads))
    return threads


# Every schedule.


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_schedule_is_right(case, isa, monkeypatch):
    monkeypatch.setenv("PACKEDCONV_ISA", isa)
    packed, image, bias = weight_of(case), image_of(case), random_tensor(case.weight_shape[0])
    expected, bound = reference_and_bound(image, packed, bias, "relu", case.options)
    for schedule in variants_of(packed, case):
        out = torch.full(expected.shape, float("nan"))
        compute(case, packed, schedule, image, bias=bias, activation="relu", out=out)
        assert bool(((out - expected).abs() <= bound).all()), schedule


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_schedule_depends_on_threads(case, torch_threads):
    packed, image = weight_of(case), image_of(case)
    for schedule in variants_of(packed, case, threads=2):
        results = []
        for threads in (1, 2, 3):
            torch_threads(threads)
            results.append(compute(case, packed, schedule, image).numpy().tobytes())
        assert len(set(results)) == 1, schedule


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced"])
def test_no_schedule_depends_on_the_layout(layout):
    case = CASES["3 x 3"]
    packed, image = weight_of(case), image_of(case)
    for schedule in variants_of(packed, case):
        expected = compute(case, packed, schedule, image)
        out = laid_out(torch.zeros(expected.shape), layout)
        compute(case, packed, schedule, laid_out(image, layout), out=out)
        assert torch.equal(out, expected), schedule


def test_subnormal_inputs_count_at_full_value():
    """Whole multiples of the smallest number, whose sums are exact in any order."""
    case = CASES["3 x 3"]
    weight = (random_tensor(*case.weight_shape) * 4).round()
    packed = pack(weight * (random_tensor(*case.weight_shape, seed=1) > 0))
    image = (image_of(case) * 1000).round() * 2.0**-149
    assert 0 < float(image.abs().max()) < 2.0**-126
    expected = torch.nn.functional.conv2d(image.double(), packed.unpack().double(), padding=1)
    for schedule in variants_of(packed, case):
        assert torch.equal(compute(case, packed, schedule, image).double(), expected), schedule


def test_subnormal_weights_count_at_full_value():
    case = CASES["3 x 3"]
    weight = (random_tensor(*case.weight_shape) * 1000).round() * 2.0**-24
    with pytest.warns(UserWarning, match="subnormals"):
        packed = pack(weight * (random_tensor(*case.weight_shape, seed=1) > 0))
    assert packed.subnormals == packed.nnz > 100
    # Normal ones, and so small ones that all products are subnormal or zero in FP32.
    for scale in (1.0, 2.0**-115):
        image = image_of(case) * scale
        expected, bound = reference_and_bound(image, packed, None, None, case.options)
        # Below the normal numbers, products and sums are off by half the smallest one each.
        bound = bound + 2 * packed.nnz * 2.0**-150
        for schedule in variants_of(packed, case):
            result = compute(case, packed, schedule, image)
            assert bool(((result.double() - expected).abs() <= bound).all()), schedule


@pytest.mark.parametrize("isa", _core.isas())
def test_every_weight_counts_at_full_value(isa, monkeypatch):
    """All nonzero numbers that FP16 has, each by itself the sum of an output."""
    monkeypatch.setenv("PACKEDCONV_ISA", isa)
    positive = torch.arange(1, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = torch.cat([positive, -positive, torch.ones(2)]).float()
    case = Case((62, 62, 1, 1), (1024, 62, 1, 1))
    with pytest.warns(UserWarning, match="subnormals"):
        packed = pack(values.reshape(1024, 62, 1, 1))
    # Image n shows channel n alone.
    image = torch.eye(62).reshape(case.input_shape)
    expected = values.reshape(1024, 62).T
    for schedule in variants_of(packed, case):
        out = compute(case, packed, schedule, image)
        assert torch.equal(out.reshape(62, 1024), expected), schedule


@needs_aligned
def test_a_block_is_no_larger_than_its_words_can_reach():
    """13 bits of a word count vectors of a tile."""
    case = Case((1, 1400, 3, 50), (2, 1400, 1, 1))
    packed, image = weight_of(case), image_of(case)
    expected, bound = reference_and_bound(image, packed, None, None, case.options)
    asked = {**schedules_of(packed, case)[0], "path": "aligned", "rows": 7, "vectors": 1}
    reached = {}
    for channels in (1400, 1171, 1170, 1000):
        schedule = {**asked, "block_channels": channels}
        made = packed.plan(case.input_shape, schedule=schedule)
        reached[channels] = made.schedule["block_channels"]
        out = compute(case, packed, schedule, image)
        assert bool(((out - expected).abs() <= bound).all()), schedule
    assert reached == {1400: 1170, 1171: 1170, 1170: 1170, 1000: 1000}
    for schedule in schedules_of(packed, case):
        if schedule["path"] == "aligned":
            vectors = schedule["rows"] * schedule["vectors"] * schedule["block_channels"]
            assert vectors <= 1 << 13, schedule


@needs_aligned
def test_a_tile_that_words_cannot_reach_all_of_is_loose():
    case = Case((1, 1, 4100, 40), (2, 1, 3, 3), {"padding": (2048, 1), "dilation": (2048, 1)})
    packed, image = weight_of(case), image_of(case)
    listed = schedules_of(packed, case)
    assert {schedule["path"] for schedule in listed if schedule["vectors"] > 1} == {"loose"}
    expected, bound = reference_and_bound(image, packed, None, None, case.options)
    out = compute(case, packed, None, image)
    assert bool(((out - expected).abs() <= bound).all())
    schedule = {**listed[0], "path": "aligned", "rows": 4, "vectors": 2}
    with pytest.raises(ValueError, match=r"schedule: expected path loose or naive, since the ali"):
        packed.plan(case.input_shape, schedule=schedule, **case.options)


# What a plan shows.


def test_print_shows_what_was_chosen():
    case = Case((2, 8, 14, 30), (12, 2, 3, 3), {"padding": 1, "groups": 4})
    packed = weight_of(case)
    shown = packed.plan(case.input_shape, threads=2, **case.options)
    schedule, text = shown.schedule, str(shown)
    lines = {line[:8].strip(): line[8:] for line in text.splitlines()}
    assert lines["layer"] == "2 x 8 x 14 x 30 to 2 x 12 x 14 x 30"
    assert lines["path"].startswith(schedule["path"])
    assert _core.isa() in lines["path"]
    tile = f"{schedule['rows']} rows x {schedule['vectors']} vectors of {shown.facts['lanes']} "
    assert lines["tile"].startswith(tile)
    assert lines["block"] == f"{schedule['block_channels']} of 2 input channels"
    assert lines["strip"].startswith(f"{schedule['strip']} tiles")
    assert lines["threads"].startswith("2,")
    assert "GFLOP" in lines["bound"]
    assert "ms" not in lines["bound"]
    assert lines["why"] == shown.why != ""
    assert (shown.threads, shown.key.groups) == (2, 4)
    assert repr(shown).startswith("CpuPlan(input_shape=(2, 8, 14, 30), threads=2, path=")


def test_print_of_the_naive_path(packed):
    schedule = {**packed.plan(SMALL.input_shape).schedule, "path": "naive"}
    text = str(packed.plan(SMALL.input_shape, schedule=schedule))
    assert "path    naive" in text
    assert not {"tile", "block", "strip"} & {line[:8].strip() for line in text.splitlines()}


def test_bound_worked_by_hand():
    # 6 nonzeros on 2 images of 4 x 5 pixels, 3 channels to 2.
    packed = pack(torch.ones(2, 3, 1, 1))
    shown = packed.plan((2, 3, 4, 5))
    assert shown.facts["flop"] == 2 * 6 * 2 * 20 == 480
    # Input 2 * 3 * 20, 6 words and 3 offsets, output 2 * 2 * 20, of 4 bytes each.
    assert shown.facts["bytes"] == 4 * (120 + 6 + 3 + 80) == 836
    assert shown.bound(peak_flops=1e9, bandwidth=1e9) == pytest.approx(836e-9)
    assert shown.bound(peak_flops=1e8, bandwidth=1e9) == pytest.approx(4800e-9)
    assert "at least 0.000836 ms" in shown.describe(1e9, 1e9)
    for ceilings in ((0, 1e9), (1e9, -1), (float("nan"), 1)):
        with pytest.raises(ValueError, match=r"(peak_flops|bandwidth): expected a positive"):
            shown.bound(*ceilings)
    for ceilings in ({"peak_flops": 1e9}, {"bandwidth": 1e9}):
        with pytest.raises(ValueError, match="expected both or neither, got"):
            shown.describe(**ceilings)


def test_an_output_that_is_too_large():
    packed = pack(torch.ones(1 << 12, 1, 1, 1))
    shape = (1 << 45, 1, 4, 4)
    for call in (packed.plan, packed.autotune):
        with pytest.raises(ValueError, match=r"output: expected fewer than 2\^61 elements, got \("):
            call(shape)
    assert packed.plan((1 << 44, 1, 4, 4)).key.output_shape == (1 << 44, 1 << 12, 4, 4)


def test_plan_is_immutable(packed):
    shown = packed.plan(SMALL.input_shape)
    before = str(shown)
    shown.schedule["rows"] = 0
    shown.facts["flop"] = 0.0
    assert str(shown) == before
    with pytest.raises(AttributeError):
        shown.schedule = {}
    with pytest.raises(AttributeError):
        shown.extra = 1


def test_planning_executes_nothing(packed, executed):
    packed.plan(SMALL.input_shape, **SMALL.options)
    assert executed == []
    conv2d(image_of(SMALL), packed, **SMALL.options)
    assert executed == [1]


# Plans that are kept.


def test_plan_is_made_once(packed, made):
    first = packed.plan(SMALL.input_shape, **SMALL.options)
    assert packed.plan(list(SMALL.input_shape), **SMALL.options) is first
    assert packed.plan(SMALL.input_shape[1:], **SMALL.options) is first
    assert packed.plan(torch.Size(SMALL.input_shape), padding="same", threads=1) is first
    for image in (image_of(SMALL), image_of(SMALL)[0], laid_out(image_of(SMALL), "sliced")):
        conv2d(image, packed, **SMALL.options)
    assert len(made) == 1
    assert list(kept_plans(packed).values()) == [first]


@pytest.mark.parametrize(
    "changes",
    [
        {"input_shape": (2, 4, 9, 11)},
        {"input_shape": (1, 4, 10, 11)},
        {"input_shape": (1, 4, 9, 12)},
        {"stride": 2},
        {"padding": 0},
        {"dilation": 2},
        {"threads": 2},
    ],
)
def test_another_call_has_another_plan(packed, changes):
    arguments = {"input_shape": SMALL.input_shape, **SMALL.options}
    first = packed.plan(**arguments)
    assert packed.plan(**{**arguments, **changes}) is not first
    assert packed.plan(**arguments) is first


def test_groups_are_part_of_the_call():
    packed = weight_of(Case((), (6, 2, 1, 1)))
    one, two = packed.plan((1, 2, 5, 5)), packed.plan((1, 4, 5, 5), groups=2)
    assert (one.key.groups, two.key.groups) == (1, 2)


def test_padding_behind_the_image_is_part_of_the_call():
    packed = weight_of(Case((), (6, 2, 2, 2)))
    shapes = [packed.plan((1, 2, 5, 5), padding=padding).key for padding in ("same", "valid")]
    assert [key.padding for key in shapes] == [(0, 0), (0, 0)]
    assert [key.output_shape for key in shapes] == [(1, 6, 5, 5), (1, 6, 4, 4)]


def test_isa_is_part_of_the_call(packed, monkeypatch):
    found = set()
    for isa in _core.isas():
        monkeypatch.setenv("PACKEDCONV_ISA", isa)
        found.add(packed.plan(SMALL.input_shape).facts["isa"])
    assert found == set(_core.isas())


def test_an_isa_that_changes_while_a_plan_is_made(packed, monkeypatch):
    monkeypatch.setattr(_core, "isa", lambda: "another")
    for call in (packed.plan, packed.autotune):
        with pytest.raises(ValueError, match=r"PACKEDCONV_ISA: expected another .*call again"):
            call(SMALL.input_shape)
    assert kept_plans(packed) == {}


def test_unknown_isa_is_noticed_by_later_calls_too(packed, monkeypatch):
    conv2d(image_of(SMALL), packed)
    monkeypatch.setenv("PACKEDCONV_ISA", "sse9")
    for call in (
        lambda: conv2d(image_of(SMALL), packed),
        lambda: conv2d(image_of(SMALL)[:0], packed),
        lambda: packed.plan(SMALL.input_shape),
        lambda: packed.autotune(SMALL.input_shape),
    ):
        with pytest.raises(ValueError, match=r"PACKEDCONV_ISA: expected one of .*; got sse9"):
            call()


def test_images_of_many_shapes(packed):
    for batch in range(4):
        for height, width in ((9, 11), (3, 3), (40, 5), (11, 9), (9, 70)):
            case = Case((batch, 4, height, width), SMALL.weight_shape, SMALL.options)
            image = image_of(case)
            expected, bound = reference_and_bound(image, packed, None, None, case.options)
            result = conv2d(image, packed, **case.options)
            assert bool(((result - expected).abs() <= bound).all()), case


def test_number_of_plans_is_bounded(packed, monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    first = packed.plan((1, 4, 9, 9))
    others = [packed.plan((1, 4, 9, width)) for width in (10, 11)]
    assert packed.plan((1, 4, 9, 9)) is first
    packed.plan((1, 4, 9, 12))
    # The one that was not used for longest has gone.
    assert len(kept_plans(packed)) == 3
    assert packed.plan((1, 4, 9, 9)) is first
    assert packed.plan((1, 4, 9, 11)) is others[1]
    assert packed.plan((1, 4, 9, 10)) is not others[0]


def test_memory_of_plans_is_bounded(packed, monkeypatch):
    size = packed.plan((1, 4, 9, 9)).facts["plan_bytes"]
    assert size >= packed.nnz
    monkeypatch.setattr(plan, "MAX_PLAN_BYTES", 2 * size - 1)
    last = packed.plan((1, 4, 9, 10))
    assert list(kept_plans(packed).values()) == [last]
    monkeypatch.setattr(plan, "MAX_PLAN_BYTES", 0)
    assert packed.plan((1, 4, 9, 10)) is last


def test_torch_threads_are_respected(packed, executed, torch_threads):
    for threads in (1, 2, 3, 1):
        torch_threads(threads)
        conv2d(image_of(SMALL), packed)
    assert executed == [1, 2, 3, 1]
    assert sorted(key[0].threads for key in kept_plans(packed)) == [1, 2, 3]


def test_threads_that_execute_one_plan_at_once(packed, made, torch_threads):
    torch_threads(2)
    images = [image_of(SMALL, seed) for seed in range(40)]
    expected = [reference_and_bound(image, packed, None, None, SMALL.options) for image in images]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda image: conv2d(image, packed, **SMALL.options), images))
    for result, (value, bound) in zip(results, expected):
        assert bool(((result - value).abs() <= bound).all())
    # The number of threads belongs to a thread of Python, so workers may have one of their own.
    assert len(made) == len(set(made))


def test_threads_that_ask_at_once_get_one_plan(packed, made):
    barrier, found = threading.Barrier(8), []

    def ask():
        barrier.wait()
        found.append(packed.plan(SMALL.input_shape, threads=1))

    workers = [threading.Thread(target=ask) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == len(made) == 1


def test_later_calls_keep_nothing(packed):
    image, out = image_of(SMALL), torch.empty(1, 6, 9, 11)

    def call():
        conv2d(image, packed, out=out, **SMALL.options)

    for _ in range(10):
        call()
    tracemalloc.start()
    try:
        call()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(100):
            call()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000
    assert peak - before < 10_000


ALLOCATIONS = """
#include <stddef.h>
#include <errno.h>
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
static long count;
static void add(void) { __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED); }
long allocations(void) { return __atomic_load_n(&count, __ATOMIC_RELAXED); }
void* malloc(size_t size) { add(); return __libc_malloc(size); }
void* calloc(size_t items, size_t size) { add(); return __libc_calloc(items, size); }
void* realloc(void* old, size_t size) { add(); return __libc_realloc(old, size); }
void* memalign(size_t align, size_t size) { add(); return __libc_memalign(align, size); }
void* aligned_alloc(size_t align, size_t size) { add(); return __libc_memalign(align, size); }
int posix_memalign(void** result, size_t align, size_t size) {
  add();
  *result = __libc_memalign(align, size);
  return *result ? 0 : ENOMEM;
}
"""
# Handing arguments over allocates a little by itself, as a call for no image shows.
COUNTING = """
import ctypes, torch
from packedconv import _core, plan
from packedconv.packed import pack

count = ctypes.CDLL(None).allocations
count.restype = ctypes.c_long

def counted(core, places):
    before = count()
    for _ in range(3):
        core.execute(*places)
    return count() - before

packed = pack(torch.ones(1, 1, 1, 1))
nothing = plan.compiled(packed, plan.plan_key(packed, (0, 1, 1, 1)), None)
empty = torch.empty(0, 1, 1, 1)
handed_over = counted(nothing, (0, empty.stride(), 0, True, 0, empty.stride(), 1))
for threads in (1, 2):
    torch.set_num_threads(threads)
    for size, options in ((61, {"padding": 1}), (64, {"stride": 2}), (7, {"padding": 1})):
        image = torch.rand(3, 20, size, size)
        packed = pack(torch.rand(10, 20, 3, 3))
        key = plan.plan_key(packed, image.shape, threads=threads, **options)
        out = torch.empty(key.output_shape)
        for schedule in _core.cpu_schedules(**plan.core_arguments(packed, key)):
            core = plan.compiled(packed, key, schedule)
            places = (image.data_ptr(), image.stride(), 0, True, out.data_ptr(), out.stride())
            counted(core, (*places, threads))
            more = counted(core, (*places, threads)) - handed_over
            assert more == 0, (more, threads, size, schedule)
before = count()
kept = bytearray(10**6)
assert count() > before  # allocations are seen
print("none")
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__libc_malloc"), reason="needs glibc")
def test_a_plan_that_has_run_allocates_nothing(tmp_path):
    source, library = tmp_path / "allocations.c", tmp_path / "allocations.so"
    source.write_text(ALLOCATIONS)
    compiler = [*os.environ.get("CXX", "c++").split(), "-x", "c"]
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "none\n"


# Schedules that are asked for.


def test_plan_with_a_schedule(packed):
    own = packed.plan(SMALL.input_shape, **SMALL.options)
    for schedule in schedules_of(packed, SMALL):
        given = packed.plan(SMALL.input_shape, schedule=schedule, **SMALL.options)
        assert given.schedule == schedule
        again = dict(reversed(list(schedule.items())))
        assert packed.plan(SMALL.input_shape, schedule=again, **SMALL.options) is given
    assert packed.plan(SMALL.input_shape, **SMALL.options) is own
    assert packed.schedules == {}


def test_default_is_the_first_of_the_schedules():
    for case in CASES.values():
        packed = weight_of(case)
        own = packed.plan(case.input_shape, threads=2, **case.options)
        assert own.schedule == schedules_of(packed, case, threads=2)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "fast"}, r"schedule: expected path .*got 'fast'"),
        ({"rows": 0}, r"schedule: expected rows of at least 1 and .*, got 0"),
        ({"rows": 1000}, r"schedule: .*rows"),
        ({"rows": 2**31}, r"schedule: expected rows"),
        ({"vectors": 1000}, r"schedule: .*vectors"),
        ({"vectors": "2"}, r"schedule: expected vectors of at least 1 and .*, got '2'"),
        ({"block_channels": 0}, r"schedule: expected block_channels"),
        ({"strip": -1}, r"schedule: expected strip"),
        ({"strip": 2**63}, r"schedule: expected strip"),
        ({"prefetch": 1}, r"schedule: expected prefetch to be true or false, got 1"),
        ({"stream": None}, r"schedule: expected stream"),
        ({"tile": 3}, r"schedule: expected the fields path, rows, .*, got 'tile'"),
    ],
)
def test_schedules_that_are_refused(packed, changes, message):
    own = packed.plan(SMALL.input_shape)
    schedule = {**own.schedule, "path": "loose", **changes}
    with pytest.raises(ValueError, match=message):
        packed.plan(SMALL.input_shape, schedule=schedule)
    with pytest.raises(ValueError, match=message):
        compute(SMALL, packed, schedule)
    assert list(kept_plans(packed).values()) == [own]


@pytest.mark.parametrize("isa", _core.isas())
def test_aligned_path_where_it_does_not_apply(isa, monkeypatch):
    monkeypatch.setenv("PACKEDCONV_ISA", isa)
    # The kernel reaches past a vector.
    case = Case((1, 2, 3, 60), (3, 2, 1, 16), {"dilation": 3})
    packed = weight_of(case)
    schedules = schedules_of(packed, case)
    assert {schedule["path"] for schedule in schedules} == {"loose"}
    with pytest.raises(ValueError, match=r"schedule: .* got path aligned"):
        packed.plan(case.input_shape, schedule={**schedules[0], "path": "aligned"}, **case.options)


def test_what_is_no_schedule(packed):
    schedule = packed.plan(SMALL.input_shape).schedule
    del schedule["strip"]
    with pytest.raises(ValueError, match="schedule: expected the field strip"):
        packed.plan(SMALL.input_shape, schedule=schedule)
    with pytest.raises(TypeError, match="schedule: expected a dict, got str"):
        packed.plan(SMALL.input_shape, schedule="loose")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_shape": 4}, TypeError, r"input_shape: expected a sequence of ints, got 4"),
        ({"input_shape": (1, 4, 9.0, 11)}, TypeError, r"input_shape: expected a sequence of ints"),
        ({"input_shape": (4, 9)}, ValueError, r"input_shape: expected \(N, IC, H, W\) or"),
        ({"input_shape": (1, 4, 9, -1)}, ValueError, r"input_shape: expected sizes"),
        ({"input_shape": (1, 4, 9, 2**63)}, ValueError, r"input_shape: expected sizes"),
        ({"input_shape": (1, 3, 9, 11)}, ValueError, r"input: expected 4 channels .*got 3"),
        ({"input_shape": (1, 4, 2, 11)}, ValueError, r"input: expected a padded height"),
        ({"input_shape": (1, 4, 2**62, 9)}, ValueError, r"64-bit indices"),
        ({"input_shape": (2**40, 4, 2**20, 2**20)}, ValueError, r"input_shape: expected fewer th"),
        ({"input_shape": (2**42, 4, 2**10, 2**7)}, ValueError, r"input_shape: .* 2\^61 elements"),
        ({"stride": 0}, ValueError, r"stride: expected at least 1"),
        ({"padding": "full"}, ValueError, r"padding: expected"),
        ({"dilation": 0.5}, TypeError, r"dilation: expected"),
        ({"groups": 4}, ValueError, r"groups: expected a divisor"),
        ({"threads": 0}, ValueError, r"threads: expected 1 to 2\^31 - 1, got 0"),
        ({"threads": 2**31}, ValueError, r"threads: expected"),
        ({"threads": True}, TypeError, r"threads: expected an int"),
    ],
)
def test_arguments_that_are_refused(packed, changes, error, message):
    arguments = {"input_shape": SMALL.input_shape, **changes}
    with pytest.raises(error, match=message):
        packed.plan(**arguments)
    with pytest.raises(error, match=message):
        packed.autotune(**arguments)


# Autotune.


class Race:
    """Candidates that take the seconds given for each, on a clock of their own."""

    def __init__(self, monkeypatch, seconds, preparing=0.0):
        self.seconds, self.preparing = seconds, preparing
        self.now, self.runs, self.dropped = 0.0, [0] * len(seconds), []
        monkeypatch.setattr(autotune, "_clock", lambda: self.now)

    def prepare(self, index):
        self.now += self.preparing

        def run():
            assert index not in self.dropped
            self.runs[index] += 1
            taken = self.seconds[index]
            self.now += taken(self.runs[index]) if callable(taken) else taken

        return run

    def fastest(self, end):
        return autotune.fastest(len(self.seconds), self.prepare, self.dropped.append, end)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ([1e-3], 0),
        ([1e-3, 2e-3, 5e-4, 1e-3], 2),
        ([1e-3, 0.98e-3], 0),
        ([1e-3, 0.96e-3], 1),
        ([1e-6, 2e-7, 1e-5], 1),
    ],
)
def test_fastest_of_candidates(monkeypatch, seconds, best):
    race = Race(monkeypatch, seconds)
    assert race.fastest(1.0) == (best, len(seconds) > 1)
    assert race.now <= 1.0


def test_slow_candidates_are_dropped_early(monkeypatch):
    race = Race(monkeypatch, [1e-3, 3e-3, 1.2e-3, 0.9e-3])
    assert race.fastest(1.0) == (3, True)
    assert race.dropped == [1, 2]
    assert race.runs[1] == 3
    assert race.runs[2] < 10 < race.runs[3]


def test_a_slow_default_is_timed_to_the_end(monkeypatch):
    race = Race(monkeypatch, [1e-3, 1e-4])
    assert race.fastest(1.0) == (1, True)
    assert race.dropped == []
    assert race.runs[0] > 10


def test_medians_decide_and_not_single_samples(monkeypatch):
    # Fast now and then, and slow now and then.
    race = Race(
        monkeypatch,
        [
            lambda run: 1e-3 if run % 9 else 5e-2,
            lambda run: 1.05e-3 if run % 9 else 1e-5,
            lambda run: 0.9e-3 if run % 9 else 5e-2,
        ],
    )
    assert race.fastest(2.0) == (2, True)


def test_too_little_time_leaves_the_default(monkeypatch):
    race = Race(monkeypatch, [0.4, 0.1, 0.1], preparing=0.1)
    assert race.fastest(1.0) == (0, False)
    assert race.runs == [3, 0, 0]


def test_a_look_at_each_is_no_comparison(monkeypatch):
    race = Race(monkeypatch, [0.1, 0.09])
    assert race.fastest(0.7) == (0, False)
    # What is far slower at the first look needs no second.
    race = Race(monkeypatch, [0.1, 0.2])
    assert race.fastest(1.0) == (0, True)


@pytest.mark.parametrize("end", [0.05, 0.3, 1.0, 3.0])
def test_time_is_kept(monkeypatch, end):
    race = Race(monkeypatch, [1e-2, 1.1e-2] + [1.2e-2] * 60, preparing=5e-3)
    assert race.fastest(end)[0] == 0
    # One candidate's first executions may pass half of the time.
    assert race.now <= end + 0.05


def choose(monkeypatch, index):
    """Have autotune find that the schedule of this index is fastest."""

    def fastest(count, prepare, drop, end):
        chosen = index % count
        for candidate in range(count):
            prepare(candidate)()
            if candidate not in (0, chosen):
                drop(candidate)
        return chosen, True

    monkeypatch.setattr(autotune, "fastest", fastest)


def tuned(monkeypatch, packed, case=SMALL, threads=1, index=-1):
    """The plan that autotune returns when it finds the last schedule fastest."""
    with monkeypatch.context() as patch:
        choose(patch, index)
        return packed.autotune(case.input_shape, threads=threads, **case.options)


def test_autotune_keeps_what_it_finds(packed, monkeypatch):
    own = packed.plan(SMALL.input_shape, **SMALL.options)
    found = tuned(monkeypatch, packed)
    last = schedules_of(packed, SMALL)[-1]
    assert found.schedule == last != own.schedule
    assert found.why.startswith("fastest of those that autotune timed; ")
    assert packed.schedules == {found.key: last}
    assert packed.plan(SMALL.input_shape, **SMALL.options) is found
    expected, bound = reference_and_bound(image_of(SMALL), packed, None, None, SMALL.options)
    result = conv2d(image_of(SMALL), packed, **SMALL.options)
    assert bool(((result - expected).abs() <= bound).all())
    # Other calls, and other numbers of threads, have their own.
    assert packed.plan(SMALL.input_shape, threads=2, **SMALL.options).schedule != last
    assert "autotune" not in packed.plan((2, 4, 9, 11), **SMALL.options).why
    # And what is kept is replaced by what is found later.
    again = tuned(monkeypatch, packed, index=0)
    assert again.schedule == own.schedule
    assert again.why.startswith("no other that autotune timed was 3 % faster; ")
    assert packed.schedules == {found.key: own.schedule}


def test_conv2d_executes_what_autotune_kept(packed, monkeypatch, executed):
    found = tuned(monkeypatch, packed)
    executed.clear()
    found.core.core = None
    with pytest.raises(AttributeError):
        conv2d(image_of(SMALL), packed, **SMALL.options)


def test_autotune_for_real(packed):
    state = torch.get_rng_state()
    found = packed.autotune(SMALL.input_shape, seconds=0.5, **SMALL.options)
    assert bool((torch.get_rng_state() == state).all())
    assert found.schedule in schedules_of(packed, SMALL)
    assert packed.schedules == {found.key: found.schedule}
    assert packed.plan(SMALL.input_shape, **SMALL.options) is found


def test_autotune_runs_on_the_threads_asked_for(packed, executed):
    found = packed.autotune(SMALL.input_shape, threads=2, seconds=0.02)
    assert set(executed) == {2}
    assert found.threads == 2


def test_autotune_of_no_image(packed):
    found = packed.autotune((0, 4, 9, 11), seconds=0.02)
    assert found.schedule in schedules_of(packed, Case((0, 4, 9, 11), ()))


def test_too_little_time_keeps_nothing(packed, monkeypatch):
    own = packed.plan(SMALL.input_shape, **SMALL.options)
    assert packed.autotune(SMALL.input_shape, seconds=1e-9, **SMALL.options) is own
    assert packed.schedules == {}
    assert "autotune" not in own.why
    # What was found earlier stays.
    found = tuned(monkeypatch, packed)
    assert packed.autotune(SMALL.input_shape, seconds=1e-9, **SMALL.options) is found
    assert packed.schedules == {found.key: found.schedule}


def test_seconds_may_be_of_any_real_type(packed):
    found = packed.autotune(SMALL.input_shape, seconds=np.float32(0.02), **SMALL.options)
    assert found.schedule in schedules_of(packed, SMALL)


def test_autotune_without_memory_for_its_input(packed):
    with pytest.raises(MemoryError, match=r"input: no memory for a tensor of shape \(\d+, 4, 9"):
        packed.autotune((1 << 50, 4, 9, 11), seconds=0.02)
    assert packed.schedules == {}


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_seconds_that_are_refused(packed, seconds, error):
    with pytest.raises(error, match=r"seconds: expected a (positive )?number"):
        packed.autotune(SMALL.input_shape, seconds=seconds)
    assert packed.schedules == {}


def interrupted(function, at, error):
    """The function, of which one call raises."""
    calls = []

    def call(*arguments):
        calls.append(1)
        if len(calls) == at:
            raise error
        return function(*arguments)

    return call


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (autotune, "_clock"),
        (autotune, "_timed"),
        (autotune, "_median"),
        (plan, "compiled"),
        (plan, "CpuPlan"),
        (plan, "core_arguments"),
        (PackedWeight, "_keep_schedule"),
    ],
)
def test_interrupted_autotune_leaves_the_weight_as_it_was(packed, monkeypatch, owner, name, error):
    packed.plan(SMALL.input_shape, **SMALL.options)
    other = tuned(monkeypatch, packed, Case((1, 4, 5, 5), SMALL.weight_shape))
    before = packed.schedules
    ticks = iter(range(10**6))
    monkeypatch.setattr(autotune, "_clock", lambda: next(ticks) * 1e-3)
    own = packed.plan(SMALL.input_shape, **SMALL.options).schedule
    points = 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name), points + 1, error))
            try:
                packed.autotune(SMALL.input_shape, seconds=0.4, **SMALL.options)
            except error:
                points += 1
            else:
                break
        assert packed.schedules == before
        left = packed.plan(SMALL.input_shape, **SMALL.options)
        assert left.schedule == own
        assert "autotune" not in left.why
    assert points > 0
    assert len(packed.schedules) == 2
    assert packed.plan((1, 4, 5, 5)) is other


def test_interrupt_at_the_end_leaves_no_plan_of_another_schedule(packed, monkeypatch):
    packed.plan(SMALL.input_shape, **SMALL.options)
    with monkeypatch.context() as patch:
        patch.setattr(plan._Plans, "add", interrupted(plan._Plans.add, 1, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tuned(monkeypatch, packed)
    found = packed.plan(SMALL.input_shape, **SMALL.options)
    assert packed.schedules == {found.key: found.schedule}


# Schedules stay with the weight.


@pytest.fixture
def tuned_weight(packed, monkeypatch):
    tuned(monkeypatch, packed)
    tuned(monkeypatch, packed, threads=2)
    assert len(packed.schedules) == 2
    return packed


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda packed: pickle.loads(pickle.dumps(packed)),
        lambda packed: saved_and_loaded(packed),
    ],
)
def test_copies_keep_the_schedules(tuned_weight, copied):
    other = copied(tuned_weight)
    assert other == tuned_weight
    assert other.schedules == tuned_weight.schedules
    assert not other._derived
    found = other.plan(SMALL.input_shape, **SMALL.options)
    assert found.schedule == schedules_of(other, SMALL)[-1]
    assert found.why.startswith("autotune chose it, perhaps on another processor; ")


def saved_and_loaded(packed):
    path = pathlib.Path(os.environ["PYTEST_TMP"]) / "layer.packed"
    packed.save(path)
    return PackedWeight.load(path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def test_copies_are_apart(tuned_weight):
    other = copy.copy(tuned_weight)
    for key in tuned_weight.schedules:
        tuned_weight._keep_schedule(key, {})
    assert {} not in other.schedules.values()


def test_schedules_are_copies(tuned_weight):
    tuned_weight.schedules.clear()
    next(iter(tuned_weight.schedules.values()))["rows"] = 0
    assert len(tuned_weight.schedules) == 2
    assert all(schedule["rows"] for schedule in tuned_weight.schedules.values())


def test_equality_ignores_the_schedules(tuned_weight):
    assert weight_of(SMALL) == tuned_weight
    assert repr(weight_of(SMALL)) == repr(tuned_weight)


def test_kept_schedule_that_the_build_does_not_have(packed):
    """A file of another build: its layer is computed, and the plan says so."""
    own = packed.plan(SMALL.input_shape, **SMALL.options)
    kept = {own.key: {**own.schedule, "path": "loose", "rows": 77}}
    other = PackedWeight(packed.words, packed.offsets, packed.shape, schedules=kept)
    found = other.plan(SMALL.input_shape, **SMALL.options)
    assert found.schedule == own.schedule
    assert found.why.startswith("not as autotune chose (")
    assert other.schedules == kept
    expected = conv2d(image_of(SMALL), packed, **SMALL.options)
    assert torch.equal(conv2d(image_of(SMALL), other, **SMALL.options), expected)


def test_schedules_of_another_weight_are_refused(tuned_weight):
    smaller = pack(torch.ones(6, 3, 3, 3))
    with pytest.raises(ValueError, match="schedules: expected an input of 3 channels"):
        PackedWeight(
            smaller.words, smaller.offsets, smaller.shape, schedules=tuned_weight.schedules
        )


# The module.


@pytest.fixture
def layer():
    return SparseConv2d(
        weight_of(Case((), (6, 2, 3, 4))),
        stride=(2, 1),
        padding=(1, 3),
        dilation=(1, 2),
        groups=2,
        activation="relu",
    )


def test_plan_of_a_module(layer):
    found = layer.plan((1, 4, 9, 11), threads=1)
    image = random_tensor(1, 4, 9, 11)
    assert tuple(layer(image).shape) == found.key.output_shape
    assert list(kept_plans(layer.packed).values()) == [found]
    schedule = {**found.schedule, "path": "naive"}
    assert layer.plan((1, 4, 9, 11), schedule=schedule).schedule["path"] == "naive"


def test_autotune_of_a_module_is_in_its_state(layer, monkeypatch):
    choose(monkeypatch, -1)
    found = layer.autotune((4, 9, 11), threads=1, seconds=0.1)
    assert layer.plan((4, 9, 11)) is found
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.packed.schedules == {found.key: found.schedule}
    fresh = SparseConv2d(weight_of(Case((), (6, 2, 3, 4)), seed=9), groups=2)
    fresh.load_state_dict(layer.state_dict())
    assert fresh.packed.schedules == {found.key: found.schedule}
