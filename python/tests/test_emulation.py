"""What csrc/emulation promises, shown by the small kernels of csrc/tests/emulated_semantics.cpp."""

import math
import re
import subprocess

import pytest
from emulation import ADDRESS, BUILD, THREAD, build_program, build_sanitized, run_sanitized

NAME = "emulated_semantics"
THREADS = 64


def finish(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=["fibers", "threads"])
def program(request):
    """Calls a kernel by name in either back-end and returns what it printed."""
    flags = {"fibers": ["-O2"], "threads": ["-O2", "-DPACKEDCONV_EMULATION_THREADS", "-pthread"]}
    path = build_program(BUILD / f"emulated-{request.param}", flags[request.param], NAME)

    def call(name: str) -> str:
        return finish(
            subprocess.run([path, name], text=True, capture_output=True, check=False, timeout=60)
        )

    return call


@pytest.fixture
def address_sanitized():
    path = build_sanitized("emulated-address", ADDRESS, NAME)
    return lambda name: run_sanitized([str(path), name], timeout=60)


@pytest.fixture
def thread_sanitized():
    path = build_sanitized("emulated-thread", THREAD, NAME)
    return lambda name: run_sanitized([str(path), name], timeout=60)


def floats(text):
    return [float(value) for value in text.split()]


def exchanged():
    """What each thread adds up in `exchange` of two blocks."""
    return 2 * [4 * (THREADS - 1 - thread) + 1000 * (0 + 1 + 2 + 3) for thread in range(THREADS)]


# Threads, blocks and barriers.


def test_every_thread_of_every_block_runs_once(program):
    expected = [100 * block + thread for block in range(6) for thread in range(24)]
    assert floats(program("indices")) == expected


def test_barriers_order_writes_and_reads(program):
    assert floats(program("exchange")) == exchanged()


@pytest.mark.parametrize("which", ["before", "behind"])
def test_a_missing_barrier_gives_wrong_values(which):
    path = build_program(BUILD / "emulated-fibers", ["-O2"], NAME)
    done = subprocess.run(
        [path, f"exchange without barrier {which}"], text=True, capture_output=True, check=False
    )
    assert floats(finish(done)) != exchanged()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("return early", "thread (0, 0, 0) waits at line N, thread (5, 0, 0) returned"),
        (
            "return early, first thread",
            "thread (0, 0, 0) returned, thread (1, 0, 0) waits at line N",
        ),
        ("two barriers", "thread (0, 0, 0) waits at line N, thread (32, 0, 0) waits at line N"),
    ],
)
def test_a_divergent_barrier_stops_the_block(program, name, problem):
    block = 0 if name == "two barriers" else 1
    said = re.sub(r"line \d+", "line N", program(name))
    assert said == f"thrown: block ({block}, 0, 0): divergent barrier: {problem}\n"


def test_a_launch_after_a_stopped_block_is_right(program):
    assert floats(program("launch after a stopped block")) == exchanged()


# Shared memory and copies.


def test_shared_memory_is_nan_in_every_block(program):
    values = floats(program("first values"))
    assert len(values) == 2 * THREADS
    assert all(math.isnan(value) for value in values)


def test_copies_land_at_their_wait_and_not_before(program):
    values = [None if math.isnan(value) else value for value in floats(program("copy groups"))]
    assert [values[at : at + 4] for at in range(0, 20, 4)] == [
        [None, None, None, None],  # started
        [None, None, None, None],  # three groups may be pending
        [10, 11, None, None],  # one
        [10, 11, 12, None],  # none; the last copy is in no group
        [10, 11, 12, 13],
    ]


def test_a_copy_from_outside_is_zero_and_reads_nothing(program):
    assert floats(program("copy zeros")) == [0, 0, 0, 0]


def test_copies_are_aligned(program):
    assert program("copy") == "cudaSuccess\n"
    where = "thrown: block (0, 0, 0), thread (0, 0, 0): start_copy:"
    assert program("copy to an odd word") == f"{where} target is not a multiple of 4\n"
    assert program("copy from an odd word") == f"{where} source is not a multiple of 16\n"


# Launches.


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("of 1024 threads", "cudaSuccess"),
        ("of 1025 threads", "cudaErrorInvalidConfiguration"),
        ("of 33 x 32 threads", "cudaErrorInvalidConfiguration"),
        ("of 65 layers of threads", "cudaErrorInvalidConfiguration"),
        ("of no thread", "cudaErrorInvalidConfiguration"),
        ("of no block", "cudaErrorInvalidConfiguration"),
        ("of 2^31 blocks", "cudaErrorInvalidConfiguration"),
        ("of 65536 rows", "cudaErrorInvalidConfiguration"),
        ("of 65536 layers", "cudaErrorInvalidConfiguration"),
        ("of 65535 layers", "cudaSuccess"),
        ("with all shared memory", "cudaSuccess"),
        ("with too much shared memory", "cudaErrorInvalidValue"),
        ("on a smaller device", "cudaSuccess\ncudaErrorInvalidValue"),
    ],
)
def test_launch_limits(program, name, error):
    assert program(f"launch {name}") == f"{error}\n"


# Sanitizers.


@pytest.mark.parametrize(
    "name", ["indices", "exchange", "copy groups", "read", "two barriers", "return early"]
)
def test_address_sanitizer_accepts_fibers(address_sanitized, name):
    done = address_sanitized(name)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("name", "access", "function"),
    [
        ("read past the end", "READ of size 4", "touch"),
        ("write past the end", "WRITE of size 4", "touch"),
        ("write before the beginning", "WRITE of size 4", "touch"),
        ("copy past the target", "WRITE of size 4", "copy_from"),
        ("copy past the source", "READ of size 16", "copy_from"),
    ],
)
def test_address_sanitizer_finds_the_line(address_sanitized, name, access, function):
    done = address_sanitized(name)
    assert done.returncode == 99
    assert "heap-buffer-overflow" in done.stderr
    assert access in done.stderr
    stack = done.stderr.split(access)[1].split("located")[0]
    assert any(function in line and f"{NAME}.cpp:" in line for line in stack.splitlines())


@pytest.mark.parametrize("name", ["indices", "exchange", "two barriers", "return early"])
def test_thread_sanitizer_accepts_barriers(thread_sanitized, name):
    done = thread_sanitized(name)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("which", ["before", "behind"])
def test_thread_sanitizer_finds_a_missing_barrier(thread_sanitized, which):
    """Behind the reading it is a write after a read, which one barrier used again could hide."""
    done = thread_sanitized(f"exchange without barrier {which}")
    assert done.returncode == 99
    assert "data race" in done.stderr
