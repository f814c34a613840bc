"""Which files of the package a Python file imports."""

import ast
import threading
from pathlib import Path

PACKAGE = Path(__file__).parent
# CPython 3.11 counts the depth of all threads that parse at once in one place, and gives up.
_PARSING = threading.Lock()


def imported_modules(path: str | Path) -> set[Path]:
    """Files of this package that a Python file imports, directly or through others.

    Imports anywhere in a file count; those by a computed name do not.
    """
    found: set[Path] = set()
    waiting = [Path(path)]
    while waiting:
        text = waiting.pop().read_text(encoding="utf-8")
        with _PARSING:
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                module = (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py")
                if module.is_file() and module not in found:
                    found.add(module)
                    waiting.append(module)
    return found
