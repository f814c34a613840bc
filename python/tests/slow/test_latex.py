"""Every LaTeX file that the workflow writes goes through pdflatex."""

import shutil
import subprocess

import pytest
from checkout import Checkout

PDFLATEX = shutil.which("pdflatex")
PACKAGES = ("array", "booktabs", "longtable", "geometry")
# What figures/README.md says that a document needs; a landscape page for the widest tables.
DOCUMENT = r"""\documentclass{article}
\usepackage[a2paper,landscape,margin=2cm]{geometry}
\usepackage{array,booktabs,longtable}
\begin{document}
%s
\end{document}
"""


def missing():
    """Why nothing can be compiled here; empty where it can."""
    if PDFLATEX is None:
        return "no pdflatex: apt-get install texlive-latex-base texlive-latex-recommended"
    for package in PACKAGES:
        found = subprocess.run(
            ["kpsewhich", f"{package}.sty"], stdout=subprocess.DEVNULL, check=False
        )
        if found.returncode:
            return f"no LaTeX package {package}: apt-get install texlive-latex-recommended"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def compiled(folder, body):
    """The log of two passes over a document, which has to go through, and its PDF."""
    (folder / "all.tex").write_text(DOCUMENT % body, encoding="utf-8")
    for _ in range(2):
        done = subprocess.run(
            [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        text = done.stdout.decode("utf-8", errors="replace")
        assert done.returncode == 0, text[-3000:]
    return text, folder / "all.pdf"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Every .tex of a small run, by name."""
    checkout = Checkout(tmp_path_factory.mktemp("latex") / "packedconv")
    done = checkout.run("all", "figures/instructions.tex")
    assert done.returncode == 0, done.stdout
    found = {path.name: path for path in (checkout.folder / "figures").rglob("*.tex")}
    names = ["appendix", "audit", "claims", "instructions", *(f"table{i}" for i in range(1, 7))]
    assert {f"{name}.tex" for name in names} <= set(found)
    return found


def test_all_go_through_in_one_document(tables, tmp_path):
    for name, path in tables.items():
        shutil.copy2(path, tmp_path / name)
    body = "\n\\clearpage\n".join(rf"\input{{{name}}}" for name in sorted(tables))
    log, pdf = compiled(tmp_path, body)
    assert pdf.stat().st_size > 50_000
    # A character that the font lacks is left out with no more than this line.
    assert "Missing character" not in log
    assert "multiply defined" not in log
    assert "undefined references" not in log


def test_the_appendix_fits_a_page_of_one_column(tables, tmp_path):
    shutil.copy2(tables["appendix.tex"], tmp_path)
    text = DOCUMENT.replace("a2paper,landscape", "a4paper").replace("longtable", "url")
    (tmp_path / "page.tex").write_text(text % r"\input{appendix}", encoding="utf-8")
    done = subprocess.run(
        [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "page.tex"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=False,
    )
    log = done.stdout.decode("utf-8", errors="replace")
    assert done.returncode == 0, log[-3000:]
    widths = [line for line in log.splitlines() if line.startswith("Overfull")]
    # In points; an unbreakable word may stand out a little.
    assert [line for line in widths if float(line.split("(")[1].split("pt")[0]) > 15] == []


def test_a_document_that_does_not_go_through_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="Undefined control sequence"):
        compiled(tmp_path, r"\notacommand")
