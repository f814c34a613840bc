"""docs/terms.md: every file that it names exists, and has the names that stand after it."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8")


def entries():
    """(term, file, names) for every file in the last column."""
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or cells[-1] == "where":
            continue
        for place in cells[-1].strip(" |").split("; "):
            path, *names = re.findall(r"`([^`]+)`", place)
            found.append((cells[0].strip("| "), path, names))
    return found


def defines(path, text, name):
    """Whether a file defines a name, rather than using or mentioning it."""
    word = re.escape(name)
    if path.endswith((".py", ".pyi")):
        return re.search(
            rf"^\s*(?:def|class) {word}\b|^\s*(?:self\.)?{word}\s*(?::|=[^=])", text, re.MULTILINE
        )
    if path.endswith(".yaml"):
        return re.search(rf"^\s*{word}:", text, re.MULTILINE)
    # C and C++: a function, a field or a variable outside a comment.
    code = re.sub(r"//.*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    return re.search(rf"\b{word}\b", code)


def test_page_has_its_sections():
    assert len(entries()) > 90
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert len(titles) == 5


@pytest.mark.parametrize(("term", "path", "names"), entries(), ids=lambda value: str(value)[:40])
def test_names_are_where_the_page_says(term, path, names):
    file = ROOT / path
    assert file.is_file(), f"{term}: no file {path}"
    text = file.read_text(encoding="utf-8")
    assert [name for name in names if not defines(path, text, name)] == [], f"{term}: {path}"


def test_a_name_that_is_only_mentioned_does_not_count():
    assert not defines("a.py", "# bound is gone\nx = other(bound)\n", "bound")
    assert defines("a.py", "def bound(x):\n    pass\n", "bound")
    assert defines("a.py", "class A:\n    bound: int\n", "bound")
    assert not defines("a.yaml", "note: family\n", "family")
    assert not defines("a.h", "int x;  // slices\n", "slices")
    assert not defines("a.h", "/* slices,\n slices */ int x;\n", "slices")
    assert defines("a.h", "/* a */ // b\nint slices;\n", "slices")


def test_every_symbol_of_the_model_is_there():
    """Its symbols, its equations, and the fields of a configured layer."""
    for symbol in ("N", "IC, OC", "H, W", "K, K_h, K_w", "COL_PER_WARP"):
        assert f"| {symbol} |" in PAGE
    for number in range(1, 9):
        assert f"equation {number})" in PAGE, number
    schema = yaml.safe_load((ROOT / "config/schema/layers.schema.yaml").read_text())
    fields = set(re.findall(r"`(\w+)`", PAGE))
    assert set(schema["properties"]) - {"groups", "dilation"} <= fields
