"""Instructions per FMA of every kernel: compiled, disassembled, the main loop counted.

Needs no GPU. What a machine has no compiler or disassembler for is left out with the reason.
"""

import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv import config as configuration
from packedconv.evidence import nvrtc, sass
from packedconv.evidence.tabular import Group
from packedconv.layer import Layer
from packedconv.packed import pack_array
from packedconv.script import CheckError
from packedconv.weights import make_weight

ARCHITECTURES = (80, 90, 53)
# What csrc/CMakeLists.txt compiles with, in a release build.
FLAGS = ("-O3", "-DNDEBUG", "-std=c++14", "--expt-relaxed-constexpr")
PACKAGES = "nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump"
SEED = 1  # of the weights that tiles are picked for

# Template parameters of the kernels that are tabulated. The general kernel is not: it reads its
# input from global memory.
KERNELS = {
    "column_kernel": ("column", ("rows_per_thread", "column_groups", "pitch")),
    "paper_kernel": ("paper", ("col_per_warp", "rows_per_thread", "warps_per_block")),
    "paper_kernel_any_shape": ("paper, any shape", ("col_per_warp", "rows_per_thread")),
}
PARAMETERS = ("col_per_warp", "rows_per_thread", "warps_per_block", "column_groups", "pitch")
COLUMNS = [
    *("architecture", "kernel", *PARAMETERS),
    *("instructions_per_fma", "others_per_nonzero", "shared_loads_per_fma"),
    *("fma_per_nonzero", "nonzeros_per_iteration", "instructions", "fma", "input_loads"),
    *("weight_shared_loads", "weight_global_loads", "other_instructions", "branches"),
    *("registers", "stack_bytes", "local_bytes", "picked", "compiler", "disassembler", "missing"),
]
_OF_THE_LOOP = (
    "Per FMA",
    "Others per nonzero",
    "Shared loads per FMA",
    "Others in the loop",
)
_WHOLE = [
    *PARAMETERS,
    *("fma_per_nonzero", "nonzeros_per_iteration", "instructions", "fma", "input_loads"),
    *("weight_shared_loads", "weight_global_loads", "branches"),
    *("registers", "stack_bytes", "local_bytes"),
]


class MissingToolError(RuntimeError):
    """No compiler or disassembler for an architecture; says how to get one."""


class Point(NamedTuple):
    """A layer of a device at one sparsity, and the column kernel that the tile choice picks
    for it (None: another kernel runs there)."""

    device: str
    architecture: int
    out_channels: int
    sparsity: float
    kernel: tuple[int, int, int] | None

    @property
    def key(self) -> str:
        return f"{self.device} {self.out_channels} {self.sparsity:.2f}"


class Code(NamedTuple):
    """Kernels of an architecture as text, and what made it.

    missing: why there is no disassembly, empty where there is one.
    """

    disassembly: str
    resources: str
    compiler: str
    disassembler: str
    missing: str = ""


def table(root: pathlib.Path, points: Sequence[Point] = ()) -> pd.DataFrame:
    """COLUMNS, one row per architecture and instantiation. `missing` says why nothing is counted:
    without a disassembler rows have registers and spilled bytes alone, without a compiler there
    is one row for the architecture.

    Raises CheckError when the compiler or the disassembler fails, or the code is not understood.
    """
    frames = []
    for architecture in ARCHITECTURES:
        try:
            code = machine_code(root, architecture)
        except MissingToolError as error:
            rows = [{"architecture": architecture, "missing": str(error)}]
        else:
            rows = count_kernels(architecture, code, points)
        frames.append(pd.DataFrame(rows, columns=COLUMNS))
    frame = pd.concat([part.astype(object) for part in frames], ignore_index=True)
    frame[_WHOLE] = frame[_WHOLE].astype("Int64")
    return frame


def read_table(path: str) -> pd.DataFrame:
    """A table that was written as CSV. Raises ValueError for another one's columns."""
    frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    if list(frame.columns) != COLUMNS:
        raise ValueError(f"{path}: expected columns {COLUMNS}, got {list(frame.columns)}")
    frame[_WHOLE] = frame[_WHOLE].astype("Int64")
    for name in ("picked", "missing", "kernel", "other_instructions"):
        frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    return frame


def count_kernels(
    architecture: int, code: Code, points: Sequence[Point] = ()
) -> list[dict[str, Any]]:
    """A row for every tabulated kernel in the code."""
    used = sass.resources(code.resources)
    loops = {
        name: sass.main_loop(found) for name, found in sass.functions(code.disassembly).items()
    }
    rows = []
    for name in used if code.missing else loops:
        kernel, parameters = kernel_of(name)
        if kernel is None:
            continue
        if name not in used:
            raise CheckError(f"sm_{architecture}, {name}: expected its resource usage, got none")
        per_nonzero = parameters["rows_per_thread"] * parameters.get("column_groups", 1)
        counted = {"missing": code.missing}
        if not code.missing:
            counted = _counted(f"sm_{architecture}, {name}", loops[name], per_nonzero)
        picked = [
            point.key
            for point in points
            if kernel == "column"
            and (point.architecture, point.kernel) == (architecture, tuple(parameters.values()))
        ]
        rows.append(
            {
                "architecture": architecture,
                "kernel": kernel,
                **parameters,
                "fma_per_nonzero": per_nonzero,
                **counted,
                **used[name]._asdict(),
                "picked": "; ".join(picked),
                "compiler": code.compiler,
                "disassembler": code.disassembler,
            }
        )
    if not rows:
        raise CheckError(f"sm_{architecture}: expected kernels in the code, got none")
    return sorted(rows, key=lambda row: (row["kernel"], *(row.get(name, 0) for name in PARAMETERS)))


def kernel_of(name: str) -> tuple[str | None, dict[str, int]]:
    """Kernel and template parameters of a mangled name; None for what is not tabulated.

    Raises CheckError for a tabulated kernel with other parameters.
    """
    match = re.match(r"_ZN10packedconv\d+([a-z_]*kernel[a-z_]*)I((?:L[a-z]\d+E)+)E", name)
    if match is None or match[1] not in KERNELS:
        return None, {}
    kernel, names = KERNELS[match[1]]
    values = [int(value) for value in re.findall(r"L[a-z](\d+)E", match[2])]
    if len(values) != len(names):
        raise CheckError(f"{name}: expected template parameters {names}, got {values}")
    return kernel, dict(zip(names, values, strict=True))


def machine_code(root: pathlib.Path, architecture: int) -> Code:
    """Compile csrc/cuda for an architecture and disassemble it.

    Raises MissingToolError without a compiler, CheckError when a tool fails.
    """
    cuobjdump = _tool("cuobjdump")
    if cuobjdump is None:
        raise MissingToolError(f"no cuobjdump: pip install {PACKAGES}")
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(pathlib.Path(folder) / "kernels.cubin")
        compiler = compile_kernels(root, architecture, cubin)
        resources = _run([cuobjdump, "-res-usage", cubin])
        try:
            nvdisasm = disassembler(architecture)
        except MissingToolError as error:
            return Code("", resources, compiler, "", missing=str(error))
        text = _run([nvdisasm, "-c", "-novliw", cubin])
        return Code(text, resources, compiler, "nvdisasm " + _version(nvdisasm))


def compile_kernels(root: pathlib.Path, architecture: int, cubin: str) -> str:
    """Compile the kernels to machine code in the file `cubin`; returns the compiler's name.

    nvcc where it knows the architecture, else NVRTC. Raises MissingToolError without both,
    CheckError when the one that is there fails.
    """
    nvcc = find_nvcc()
    if nvcc is not None and f"sm_{architecture}" in _run([nvcc, "--list-gpu-code"]).split():
        source = root / "csrc" / "cuda" / "conv2d.cu"
        _run([nvcc, "-cubin", f"-arch=sm_{architecture}", *FLAGS, str(source), "-o", cubin])
        return "nvcc " + _version(nvcc)
    if architecture >= 80:
        raise MissingToolError(
            f"no CUDA compiler for sm_{architecture}: install a CUDA toolkit from 11.8 on, and "
            "put its nvcc into PATH or set CUDACXX=/path/to/nvcc"
        )
    try:
        code = nvrtc.compile_kernels(architecture)
    except nvrtc.NotInstalledError as error:
        raise MissingToolError(f"no CUDA compiler for sm_{architecture}: {error}") from None
    except nvrtc.CompilationError as error:
        raise CheckError(f"{nvrtc.version()} failed for sm_{architecture}: {error}") from None
    pathlib.Path(cubin).write_bytes(code)
    return nvrtc.version()


def find_nvcc() -> str | None:
    """The CUDA compiler: CUDACXX, else nvcc in PATH or in a toolkit's folder."""
    if os.environ.get("CUDACXX"):
        return shutil.which(os.environ["CUDACXX"])
    folders = [os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME")]
    candidates = ["nvcc", *(os.path.join(path, "bin", "nvcc") for path in folders if path)]
    return next(filter(None, map(shutil.which, [*candidates, "/usr/local/cuda/bin/nvcc"])), None)


def disassembler(architecture: int) -> str:
    """An nvdisasm that knows the architecture. Raises MissingToolError without one."""
    found = _tools("nvdisasm")
    for path in found:
        if f"'SM{architecture}'" in _run([path, "--help"]):
            return path
    if not found:
        raise MissingToolError(f"no nvdisasm: pip install {PACKAGES}")
    versions = ", ".join(dict.fromkeys(map(_version, found)))
    raise MissingToolError(
        f"nvdisasm {versions} does not know sm_{architecture}: put the nvdisasm of a CUDA toolkit "
        "from 10.2 to 12.9 into PATH"
    )


def tile_choices(root: pathlib.Path) -> list[Point]:
    """What the tile choice picks for every layer of the GPUs in config/devices, one device of
    each family, at the sparsities of config/config.yaml. Needs the built extension."""
    from packedconv import _core

    sparsities = configuration.load_yaml(root / "config" / "config.yaml")["sparsities"]
    points = []
    for device in gpu_devices(root).values():
        gpu = device["gpu"]
        architecture = round(10 * float(gpu["compute_capability"]))
        limits = (
            architecture,
            gpu["multiprocessors"],
            gpu["shared_memory_per_block_bytes"],
            gpu["shared_memory_per_multiprocessor_bytes"],
        )
        for layer in layers_of_device(device):
            for sparsity in sparsities:
                facts = _plan_facts(_core, layer, sparsity, limits)
                kernel = None
                if facts is not None:
                    kernel = tuple(facts[name] for name in KERNELS["column_kernel"][1])
                points.append(
                    Point(device["family"], architecture, layer.out_channels, sparsity, kernel)
                )
    return points


def gpu_devices(root: pathlib.Path) -> dict[str, dict]:
    """The first device file of every family of GPUs."""
    found: dict[str, dict] = {}
    for name in configuration.device_names(root):
        device = configuration.load_device(root, name)
        if device.get("gpu"):
            found.setdefault(device["family"], device)
    return found


def layers_of_device(device: Mapping[str, Any]) -> list[Layer]:
    """The layers of a device file, one per number of output channels."""
    fields = {key: value for key, value in device["layers"].items() if key != "out_channels"}
    return [
        Layer(name=f"oc{count}", out_channels=count, **fields)
        for count in device["layers"]["out_channels"]
    ]


def column_text(row: Mapping[str, Any]) -> str:
    """An instantiation of the column kernel in words."""
    return f"R {row['rows_per_thread']}, column groups {row['column_groups']}, pitch {row['pitch']}"


def shown(frame: pd.DataFrame) -> list[Group]:
    """The table as a reader sees it, one part per architecture."""
    parts = []
    for architecture, rows in frame.groupby("architecture", sort=False):
        missing = is_missing(frame, architecture)
        rows = rows[rows["kernel"].isin(("column", "paper"))]
        if rows.empty:
            nothing = pd.DataFrame({"Kernel": ["none compiled"], "Reason": [missing]})
            parts.append(Group(f"sm_{architecture}", "", nothing))
            continue
        rows = rows.sort_values("picked", key=lambda picked: picked == "", kind="stable")
        columns = {
            "Kernel": rows["kernel"],
            "Configuration": [_configuration(row) for row in rows.to_dict("records")],
            "Per FMA": rows["instructions_per_fma"].map("{:.2f}".format),
            "Others per nonzero": rows["others_per_nonzero"].map("{:.2f}".format),
            "Shared loads per FMA": rows["shared_loads_per_fma"].map("{:.2f}".format),
            "Registers": rows["registers"],
            "Spilled bytes": rows["stack_bytes"] + rows["local_bytes"],
            "Others in the loop": rows["other_instructions"],
            "Picked for": [_picked_text(text, frame) for text in rows["picked"]],
        }
        intro = f"{rows['compiler'].iloc[0]}, {rows['disassembler'].iloc[0]}."
        if missing:
            for name in _OF_THE_LOOP:
                del columns[name]
            intro = f"{rows['compiler'].iloc[0]}. No instructions counted: {missing}."
        parts.append(Group(f"sm_{architecture}", intro, pd.DataFrame(columns)))
    return parts


def notes(frame: pd.DataFrame) -> list[str]:
    """What is counted, and how far the picked instantiations go."""
    lines = [
        "Counted in the machine code, nothing measured: one iteration of the loop over nonzeros "
        "(of an unrolled loop and what is left over, the unrolled one). Filling the tile, reading "
        "lists' bounds and storing the output are outside of it.",
        "Per FMA: all instructions over FMAs. Others per nonzero: instructions beside FMAs and "
        "shared loads of the input. Spilled bytes: stack and local memory of a thread.",
        f"Compiled with {' '.join(FLAGS)}. Picked for: the layers of config/devices at the "
        f"sparsities of config/config.yaml, weights of seed {SEED}.",
    ]
    for architecture, rows in frame.groupby("architecture", sort=False):
        picked = rows[rows["picked"].fillna("") != ""]
        if len(picked):
            spilled = (picked["stack_bytes"] + picked["local_bytes"]).max()
            text = f"sm_{architecture}: the picked column kernels spill {spilled} bytes"
            if not is_missing(frame, architecture):
                text += (
                    f" and take at most {picked['instructions_per_fma'].max():.2f} instructions "
                    f"per FMA, {picked['others_per_nonzero'].max():.2f} others per nonzero"
                )
            lines.append(text + ".")
    branched = frame[frame["branches"].fillna(0) > 0]
    if len(branched):
        lines.append(
            f"{len(branched)} loops hold branches; what they jump over is counted as executed."
        )
    if "paper, any shape" in set(frame["kernel"].dropna()):
        lines.append(
            "The CSV has the paper's kernel for other shapes than 3×3 at stride 1, too: its tile "
            "is no constant, which costs instructions."
        )
    return lines


def _plan_facts(core: Any, layer: Layer, sparsity: float, limits: tuple) -> dict | None:
    """Facts of the column kernel's plan, None where the choice falls on another kernel."""
    # Ones in place of the values: only positions matter, and none is too small for FP16.
    positions = (make_weight(layer, sparsity, SEED) != 0).astype(np.float32)
    packed = pack_array(positions)
    plan = core.cuda_plan(
        layer.input_shape,
        layer.output_shape,
        packed.words,
        packed.offsets,
        (layer.kernel_size, layer.kernel_size),
        (layer.stride, layer.stride),
        (layer.padding, layer.padding),
        (1, 1),
        1,
        limits,
    )
    return plan.facts if plan.kernel == "column" else None


def _counted(name: str, loop: sass.Loop | None, per_nonzero: int) -> dict[str, Any]:
    """The columns of a main loop. Raises CheckError unless it holds whole nonzeros."""
    if loop is None or loop.fma % per_nonzero:
        raise CheckError(
            f"{name}: expected a loop with a multiple of {per_nonzero} FMAs that loads from "
            f"shared memory, got {loop}"
        )
    nonzeros = loop.fma // per_nonzero
    others = ", ".join(f"{opcode} {count}" for opcode, count in loop.others.items())
    return {
        **{key: value for key, value in loop._asdict().items() if key != "others"},
        "instructions_per_fma": loop.instructions / loop.fma,
        "others_per_nonzero": (loop.instructions - loop.fma - loop.input_loads) / nonzeros,
        "shared_loads_per_fma": loop.shared_loads / loop.fma,
        "nonzeros_per_iteration": nonzeros,
        "other_instructions": others,
    }


def _configuration(row: Mapping[str, Any]) -> str:
    if row["kernel"] == "column":
        return column_text(row)
    return (
        f"COL_PER_WARP {row['col_per_warp']}, R {row['rows_per_thread']}, "
        f"{row['warps_per_block']} warps"
    )


def _picked_text(picked: str, frame: pd.DataFrame) -> str:
    """Where an instantiation is picked, in words: `a100: all; tegra-x1: OC 32 at S 0.98`."""
    keys = [key for text in frame["picked"].dropna() for key in text.split("; ") if key]
    found: dict[str, dict[str, list[str]]] = {}
    for key in filter(None, picked.split("; ")):
        device, channels, sparsity = key.split(" ")
        found.setdefault(device, {}).setdefault(channels, []).append(sparsity)
    parts = []
    for device, by_channels in found.items():
        if sum(map(len, by_channels.values())) == sum(key.startswith(f"{device} ") for key in keys):
            parts.append(f"{device}: all")
            continue
        listed = [
            f"OC {channels} at S " + ", ".join(values) for channels, values in by_channels.items()
        ]
        parts.append(f"{device}: " + "; ".join(listed))
    return "; ".join(parts)


def _tools(name: str) -> list[str]:
    """Paths of a CUDA tool: of the package, beside nvcc, in PATH, of PyTorch's compiler."""
    folders = sorted(pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    nvcc = find_nvcc()
    if nvcc is not None:
        folders.append(pathlib.Path(nvcc).resolve().parent)
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folders.append(
            pathlib.Path(triton.submodule_search_locations[0], "backends", "nvidia", "bin")
        )
    candidates = [shutil.which(str(folder / name)) for folder in folders]
    return list(dict.fromkeys(filter(None, [*candidates, shutil.which(name)])))


def _tool(name: str) -> str | None:
    return next(iter(_tools(name)), None)


def _version(path: str) -> str:
    match = re.search(r"\bV(\d+(?:\.\d+)+)", _run([path, "--version"]))
    return match[1] if match else "of unknown version"


def _run(command: Sequence[str]) -> str:
    """What a command prints. Raises CheckError with its messages when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(
            f"{command[0]} failed with status {done.returncode}: {' '.join(command)}\n"
            f"{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def is_missing(frame: pd.DataFrame, architecture: int) -> str:
    """Why there are no counts of an architecture; empty where there are."""
    rows = frame[frame["architecture"] == architecture]
    if rows.empty:
        return f"the table has no sm_{architecture}"
    reason = rows["missing"].iloc[0]
    return reason if isinstance(reason, str) and not _is_nan(reason) else ""


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
