#!/usr/bin/env python3
"""Check that the code that also runs on a Jetson Nano keeps to Python 3.6.

Its stack is Python 3.6 with PyTorch 1.10, so the files of DEVICE_SIDE may use only
Python 3.6, its standard library, numpy, torch and one another.
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
    "python/packedconv/cuda.py",
    "python/packedconv/ops.py",
    "python/packedconv/module.py",
    "python/packedconv/roofline.py",
    "python/packedconv/weights.py",
    "python/packedconv/reference.py",
    "python/packedconv/device.py",
    "python/packedconv/script.py",
    "python/packedconv/settings.py",
    "python/packedconv/samples_file.py",
    "python/packedconv/bench/*.py",
    "scripts/stamp.py",
    "scripts/weights.py",
    "scripts/check.py",
    "scripts/ceilings.py",
    "scripts/bench.py",
    "scripts/ablation.py",
    "scripts/fixed_cost.py",
]
THIRD_PARTY = {"numpy", "torch"}


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


def imports(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of every import that is not optional (inside a try)."""
    optional = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in optional:
            continue
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
    problems = import_problems(root, files)
    for problem in problems:
        print(problem)
    vermin = os.path.join(os.path.dirname(sys.executable), "vermin")
    command = [vermin, "--target=3.6-", "--no-tips", "--violations", *files]
    status = subprocess.run(command, cwd=root, check=False).returncode
    return 1 if problems or status else 0


if __name__ == "__main__":
    sys.exit(main())
