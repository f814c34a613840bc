"""Which files of the package a Python file imports."""

import ast
import functools
import threading
from pathlib import Path

PACKAGE = Path(__file__).parent
# CPython 3.11 counts the depth of all threads that parse at once in one place, and gives up.
_PARSING = threading.Lock()


def imported_modules(path: str | Path) -> set[Path]:
    """Files of this package that a Python file imports, directly or through others.

    Imports anywhere in a file count; those by a computed name do not. A file is read once.
    """
    found: set[Path] = set()
    waiting = [Path(path)]
    while waiting:
        new = _direct_imports(waiting.pop()) - found
        found |= new
        waiting += new
    return found


@functools.cache
def _direct_imports(path: Path) -> frozenset[Path]:
    text = path.read_text(encoding="utf-8")
    with _PARSING:
        tree = ast.parse(text)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        modules = ((PACKAGE.parent / Path(*name.split("."))).with_suffix(".py") for name in names)
        found |= {module for module in modules if module.is_file()}
    return frozenset(found)
