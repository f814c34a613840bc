#!/usr/bin/env python3
"""Check that the code that also runs on a Jetson Nano keeps to Python 3.6 and PyTorch 1.10.

These are its newest, so the files of DEVICE_SIDE may use only Python 3.6, its standard
library, numpy, what PyTorch 1.10 has of torch, and one another.
"""

import argparse
import ast
import glob
import os
import subprocess
import sys
from collections.abc import Iterator

# The one list of what runs on the device (globs, relative to the root folder).
DEVICE_SIDE = [
    "python/packedconv/__init__.py",
    "python/packedconv/layer.py",
    "python/packedconv/files.py",
    "python/packedconv/arguments.py",
    "python/packedconv/packed.py",
    "python/packedconv/packed_file.py",
    "python/packedconv/conv.py",
    "python/packedconv/cpu.py",
    "python/packedconv/plan.py",
    "python/packedconv/schedule.py",
    "python/packedconv/autotune.py",
    "python/packedconv/advice.py",
    "python/packedconv/calibration.py",
    "python/packedconv/probes.py",
    "python/packedconv/cuda.py",
    "python/packedconv/ops.py",
    "python/packedconv/module.py",
    "python/packedconv/roofline.py",
    "python/packedconv/weights.py",
    "python/packedconv/reference.py",
    "python/packedconv/device.py",
    "python/packedconv/script.py",
    "python/packedconv/run_folder.py",
    "python/packedconv/bundle.py",
    "python/packedconv/run_names.py",
    "python/packedconv/collect.py",
    "python/packedconv/remote_agent.py",
    "python/packedconv/settings.py",
    "python/packedconv/samples_file.py",
    "python/packedconv/seal.py",
    "python/packedconv/bench/*.py",
    "python/packedconv/doctor/findings.py",
    "python/packedconv/doctor/gpu.py",
    "python/packedconv/doctor/machine.py",
    "python/packedconv/doctor/network.py",
    "scripts/stamp.py",
    "scripts/weights.py",
    "scripts/check.py",
    "scripts/ceilings.py",
    "scripts/bench.py",
    "scripts/ablation.py",
    "scripts/fixed_cost.py",
    "scripts/layers.py",
    "scripts/ladder.py",
    "scripts/collect.py",
    "scripts/bundle.py",
    "scripts/import_results",
]
THIRD_PARTY = {"numpy", "torch"}
# Used where PyTorch has custom ops (2.4 and later), and checked by its own SUPPORTED.
NEWER_TORCH_FILES = {"python/packedconv/ops.py"}
# What the others may name of torch: all of it was seen in PyTorch 1.10.2.
TORCH_NAMES = {
    "torch.Generator",
    "torch.Tensor",
    "torch.__config__.show",
    "torch.__version__",
    "torch.autograd.graph",
    "torch.backends.cuda.matmul",
    "torch.backends.cudnn",
    "torch.backends.cudnn.version",
    "torch.backends.mkldnn.is_available",
    "torch.channels_last",
    "torch.contiguous_format",
    "torch.cuda",
    "torch.cuda.Event",
    "torch.cuda.current_stream",
    "torch.cuda.device",
    "torch.cuda.device_count",
    "torch.cuda.empty_cache",
    "torch.cuda.get_device_properties",
    "torch.cuda.is_available",
    "torch.cuda.max_memory_allocated",
    "torch.cuda.memory_allocated",
    "torch.cuda.memory_reserved",
    "torch.cuda.reset_peak_memory_stats",
    "torch.cuda.set_device",
    "torch.cuda.synchronize",
    "torch.device",
    "torch.dtype",
    "torch.empty",
    "torch.empty_like",
    "torch.float16",
    "torch.float32",
    "torch.float64",
    "torch.from_numpy",
    "torch.full",
    "torch.get_num_threads",
    "torch.inference_mode",
    "torch.int32",
    "torch.is_grad_enabled",
    "torch.isnan",
    "torch.mm",
    "torch.nn.Conv2d",
    "torch.nn.Module",
    "torch.nn.functional.conv2d",
    "torch.nn.parameter.is_lazy",
    "torch.no_grad",
    "torch.ones",
    "torch.preserve_format",
    "torch.rand",
    "torch.set_num_threads",
    "torch.strided",
    "torch.version.cuda",
    "torch.where",
    "torch.zeros",
    "torch.zeros_like",
}
# Methods and properties of tensors that PyTorch 1.10 has not.
NEWER_TENSOR_NAMES = {
    "adjoint",
    "is_cpu",
    "is_nested",
    "mH",
    "mT",
    "scatter_reduce",
    "untyped_storage",
}


def device_side_files(root: str) -> list[str]:
    """Paths of the device-side files, relative to `root`.

    Raises FileNotFoundError for an entry of the list that names nothing.
    """
    files = []
    for pattern in DEVICE_SIDE:
        found = sorted(glob.glob(os.path.join(root, pattern)))
        if not found:
            raise FileNotFoundError(f"DEVICE_SIDE names {pattern}, which does not exist")
        files.extend(os.path.relpath(path, root) for path in found)
    return files


def module_name(path: str) -> str:
    """Importable name of a file under python/."""
    name = os.path.splitext(os.path.relpath(path, "python"))[0].replace(os.sep, ".")
    return name.removesuffix(".__init__")


def required(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that are not optional (inside a try)."""
    optional = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        for statement in block.body
        for node in ast.walk(statement)
    }
    return (node for node in ast.walk(tree) if id(node) not in optional)


def imports(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of every import that is not optional."""
    for node in required(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", [alias.name for alias in node.names]


def import_problems(root: str, files: list[str]) -> list[str]:
    """One line for every import of what the device does not have."""
    ours = {module_name(path) for path in files} | {"packedconv._core"}
    problems = []
    for path in files:
        with open(os.path.join(root, path), encoding="utf-8") as stream:
            tree = ast.parse(stream.read(), path)
        for line, module, names in imports(tree):
            top = module.split(".")[0]
            if top == "packedconv":
                wanted = {module} | {
                    f"{module}.{name}" for name in names if is_module(root, f"{module}.{name}")
                }
                problems.extend(
                    f"{path}:{line}: imports {name}, which is not device-side"
                    for name in sorted(wanted - ours)
                )
            elif top not in sys.stdlib_module_names and top not in THIRD_PARTY:
                problems.append(f"{path}:{line}: imports {top}, which the device does not have")
    return problems


def dotted(node: ast.AST) -> str:
    """ "torch.cuda.device" for the node of that expression; empty for one of another form."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return base and f"{base}.{node.attr}"


def torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a file names of torch, optional uses apart."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in required(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = dotted(node)
            if name.startswith("torch."):
                yield node.lineno, name
    for line, module, names in imports(tree):
        if module.split(".")[0] == "torch":
            if module != "torch":
                yield line, module
            for name in names:
                yield line, f"{module}.{name}"


def torch_problems(root: str, files: list[str]) -> list[str]:
    """One line for every use of torch that PyTorch 1.10 may not have."""
    problems = []
    for path in files:
        if path in NEWER_TORCH_FILES:
            continue
        with open(os.path.join(root, path), encoding="utf-8") as stream:
            tree = ast.parse(stream.read(), path)
        problems.extend(
            f"{path}:{line}: uses {name}, which is not among the names known to be in PyTorch "
            "1.10; add it to TORCH_NAMES if it is there, or probe with getattr"
            for line, name in torch_names(tree)
            if name not in TORCH_NAMES
        )
        problems.extend(
            f"{path}:{node.lineno}: uses .{node.attr}, which tensors of PyTorch 1.10 have not"
            for node in required(tree)
            if isinstance(node, ast.Attribute) and node.attr in NEWER_TENSOR_NAMES
        )
    return problems


def is_module(root: str, name: str) -> bool:
    stem = os.path.join(root, "python", *name.split("."))
    return os.path.exists(stem + ".py") or os.path.isdir(stem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    )
    root = parser.parse_args().root
    try:
        files = device_side_files(root)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = import_problems(root, files) + torch_problems(root, files)
    for problem in problems:
        print(problem)
    vermin = os.path.join(os.path.dirname(sys.executable), "vermin")
    command = [vermin, "--target=3.6-", "--no-tips", "--violations", *files]
    status = subprocess.run(command, cwd=root, check=False).returncode
    return 1 if problems or status else 0


if __name__ == "__main__":
    sys.exit(main())
