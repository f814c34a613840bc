"""Bugs planted in the kernels' source, each of which the emulation has to show."""

import functools
import re
import shutil
import typing

import pytest
from emulation import (
    CSRC,
    THREAD,
    Build,
    Case,
    StoppedError,
    build_program,
    run_cases,
    skip_without,
)
from odd_layers import (
    LAYERS,
    ONE_BLOCK,
    TINY_LAYERS,
    is_right,
    little_memory_for_column,
    little_memory_for_paper,
    new_call,
    run_right,
)

pytestmark = pytest.mark.usefixtures("one_thread")

COLUMN, COLUMN_PLAN = "cuda/column_kernel.cuh", "cuda/column_plan.cpp"
PAPER, PAPER_PLAN = "cuda/paper_kernel.cuh", "cuda/paper_plan.cpp"
PROGRAM = "emulated_conv2d"
# What shows a bug, and the build that it shows in.
FLAGS = {
    "values": ("-O1",),
    "divergence": ("-O1",),
    "address": ("-O1", "-g1", "-fsanitize=address"),
    "race": THREAD,
}


class Bug(typing.NamedTuple):
    name: str
    file: str
    text: str  # occurs once
    planted: str
    shown_by: str


BUGS = [
    Bug(
        "column: halo overrun, a row below the image",
        COLUMN,
        "row >= 0 && row < plan.in_height && column >= 0",
        "row >= 0 && row <= plan.in_height && column >= 0",
        "address",
    ),
    Bug(
        "column: halo overrun, a column beside the image",
        COLUMN,
        "row_inside && column >= 0 && column < plan.in_width",
        "row_inside && column >= 0 && column <= plan.in_width",
        "address",
    ),
    Bug(
        "column: a row of the tile too many, over the weights",
        COLUMN,
        "copies = lines * kCopies",
        "copies = (lines + 1) * kCopies",
        "race",
    ),
    Bug(
        "column: tile one row short, not filled",
        COLUMN,
        "lines = channels * plan.stored_rows;",
        "lines = channels * plan.stored_rows - 1;",
        "values",
    ),
    Bug(
        "column: shared memory one row short",
        COLUMN_PLAN,
        "plan->shared_bytes = 4 * (tiles + staged);",
        "plan->shared_bytes = 4 * (tiles + staged - config.pitch);",
        "address",
    ),
    Bug(
        "column: missing first barrier",
        COLUMN,
        "        wait_copies<0>();\n      }\n      __syncthreads();\n",
        "        wait_copies<0>();\n      }\n",
        "race",
    ),
    Bug(
        "column: missing second barrier",
        COLUMN,
        "      }\n      __syncthreads();\n      if (!overlap && next.item",
        "      }\n      if (!overlap && next.item",
        "race",
    ),
    Bug(
        "column: missing barrier before the next part of the weights",
        COLUMN,
        "__syncthreads();\n          start_staging(",
        "start_staging(",
        "race",
    ),
    Bug(
        "column: missing barrier behind the next part of the weights",
        COLUMN,
        "          wait_copies<0>();\n          __syncthreads();\n",
        "          wait_copies<0>();\n",
        "race",
    ),
    Bug(
        "column: divergent barrier",
        COLUMN,
        "      }\n      __syncthreads();\n      if (!overlap && next.item",
        "      }\n      if (threadIdx.x < 64) __syncthreads();\n      if (!overlap && next.item",
        "divergence",
    ),
    Bug(
        "column: missing wait, one buffer",
        COLUMN,
        "      } else {\n        wait_copies<0>();\n      }\n",
        "      }\n",
        "values",
    ),
    Bug(
        "column: missing wait, two buffers",
        COLUMN,
        "        wait_copies<1>();\n",
        "        wait_copies<2>();\n",
        "values",
    ),
    Bug(
        "column: missing wait for the next part of the weights",
        COLUMN,
        "          wait_copies<0>();\n          __syncthreads();\n",
        "          __syncthreads();\n",
        "values",
    ),
    Bug(
        "paper: halo overrun, beside the image",
        PAPER,
        "static_cast<unsigned>(position - begin) < count",
        "static_cast<unsigned>(position - begin) <= count",
        "address",
    ),
    Bug(
        "paper: halo overrun, beside the tile",
        PAPER,
        "line < lines && column < tile.columns()",
        "line < lines && column <= tile.columns()",
        "address",
    ),
    Bug(
        "paper: tile one row short, not filled",
        PAPER,
        "lines = channels * tile.rows();",
        "lines = channels * tile.rows() - 1;",
        "values",
    ),
    Bug(
        "paper: shared memory one row short",
        PAPER_PLAN,
        "paper.shared_bytes = paper.channels_per_block * channel_floats *",
        "paper.shared_bytes = (paper.channels_per_block * channel_floats - paper.tile_columns) *",
        "address",
    ),
    Bug(
        "paper: missing first barrier",
        PAPER,
        "    __syncthreads();  // Line 9\n",
        "",
        "race",
    ),
    Bug(
        "paper: missing second barrier",
        PAPER,
        "    if (first > 0) __syncthreads();\n",
        "",
        "race",
    ),
    Bug(
        "paper: divergent barrier",
        PAPER,
        "    __syncthreads();  // Line 9\n",
        "    if (rows_inside > 0) __syncthreads();  // Line 9\n",
        "divergence",
    ),
]


def replace(path, pattern, text):
    """Replace what matches, once."""
    changed, count = re.subn(pattern, lambda _: text, path.read_text("utf-8"))
    assert count == 1, f"{path.name}: expected one {pattern!r}, got {count}"
    path.write_text(changed, "utf-8")


@pytest.fixture(scope="session")
def few_kernels(tmp_path_factory):
    """A copy of csrc with two column kernels and one mapping, which compiles in seconds."""
    csrc = tmp_path_factory.mktemp("few_kernels") / "csrc"
    shutil.copytree(CSRC, csrc)
    replace(
        csrc / "cuda" / "column_config.h",
        r"(?<=PACKEDCONV_COLUMN_KERNELS\(X\) \\\n)(  X\(.*\n)+",
        "  X(8, 2, 72) X(4, 1, 40)\n",
    )
    kernels = (csrc / PAPER).read_text("utf-8")
    kept = {("columns", "8"), ("rows", "2"), ("warps", "2")}
    for axis, pattern in (
        ("columns", r"    case (\d+): return paper_kernel_for<\d+>\(plan\);\n"),
        ("rows", r"    case (\d+): return paper_kernel_for<kColPerWarp, \d+>\(plan\);\n"),
        ("warps", r"    case (\d+): return paper_kernel<kColPerWarp, kRows, \d+>;\n"),
    ):
        assert len(re.findall(pattern, kernels)) >= 3
        kernels = re.sub(
            pattern,
            lambda match, axis=axis: match.group() if (axis, match.group(1)) in kept else "",
            kernels,
        )
    (csrc / PAPER).write_text(kernels, "utf-8")
    return csrc


@pytest.fixture(scope="session")
def without_bug(few_kernels, tmp_path_factory):
    """Builds `few_kernels` with given flags."""

    @functools.lru_cache(maxsize=None)
    def build(flags):
        skip_without(flags)
        folder = tmp_path_factory.mktemp("without_bug")
        build_program(folder, flags, PROGRAM, few_kernels)
        return Build(folder, few_kernels)

    return build


def cases_for(kernel, shown_by):
    """Layers and cases that reach every barrier, copy and wait of a kernel."""
    layers = [TINY_LAYERS[0], TINY_LAYERS[2]] + ([] if shown_by == "race" else [LAYERS[0]])
    cases = []
    if kernel == "paper":
        mapping = (8, 2, 2, 1)
        for layer in layers:
            for limits in (ONE_BLOCK, little_memory_for_paper(mapping, 3)):
                cases.append((layer, Case(new_call(layer), "paper", mapping, limits)))
        return cases
    for layer in layers:
        for buffers in (1, 2):
            for config in ((4, 1, 40, 32, 4, 1, buffers, 1), (8, 2, 72, 32, 4, 2, buffers, 2)):
                for limits in (ONE_BLOCK, little_memory_for_column(config, layer, 3, 200)):
                    cases.append((layer, Case(new_call(layer), "column", config, limits)))
    return cases


@pytest.mark.parametrize("shown_by", FLAGS)
def test_without_a_bug_all_is_right(without_bug, shown_by):
    program = without_bug(FLAGS[shown_by]).folder / PROGRAM
    run_right(program, cases_for("column", shown_by) + cases_for("paper", shown_by))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_shown(without_bug, tmp_path, bug):
    flags = FLAGS[bug.shown_by]
    right = without_bug(flags)
    csrc = tmp_path / "csrc"
    shutil.copytree(right.csrc, csrc)
    replace(csrc / bug.file, re.escape(bug.text), bug.planted)
    program = build_program(tmp_path / "build", flags, PROGRAM, csrc, like=right)
    cases = cases_for(bug.name.split(":")[0], bug.shown_by)
    if bug.shown_by in ("address", "race"):
        found = {
            "address": "AddressSanitizer: heap-buffer-overflow",
            "race": "ThreadSanitizer: (data race|SEGV)",
        }
        with pytest.raises(StoppedError, match=found[bug.shown_by]):
            run_cases(program, [case for _, case in cases])
        return
    results = run_cases(program, [case for _, case in cases])
    if bug.shown_by == "divergence":
        assert any("divergent barrier" in result.sentence for result in results)
        return
    assert not all(is_right(layer, result.output) for (layer, _), result in zip(cases, results))
