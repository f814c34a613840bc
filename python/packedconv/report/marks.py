"""Marks for Snakemake's report: which outputs it shows, where, and of those what is there.

Marks change nothing of what a workflow runs: Snakemake reads them when a report is asked for.
"""

import functools
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packedconv.report import contents
from packedconv.report.contents import Entry

PAGES = "docs/report"
# What a browser shows without help: of figures and of tables.
SUFFIXES = (".png", ".html")
# In figures/ itself, whatever run they are asked for with.
OF_NO_RUN = ("instructions", "bounds_", "mappings")


class Report:
    """The report of one run on one device.

    root: the repository. figures, results: the folders of the run, relative to it.
    """

    def __init__(self, root: str | Path, figures: str, results: str, device: str) -> None:
        self.root, self.figures, self.results, self.device = Path(root), figures, results, device
        self.missing: list[str] = []

    @property
    def asked(self) -> bool:
        """Whether this Snakemake is to write a report of what is there, and to run nothing.

        A Snakefile has no other way to know it. After a run everything is there.
        """
        options = [argument.partition("=")[0] for argument in sys.argv]
        return "--report" in options and "--report-after-run" not in options

    @functools.cached_property
    def entries(self) -> list[Entry]:
        return contents.load(self.root / PAGES / "contents.yaml")

    def marked(self, paths: Iterable[Any]) -> list[Any]:
        """The outputs of a rule, those marked that the report can show."""
        from snakemake.io import report

        return [
            report(
                path,
                caption=f"{PAGES}/result.rst",
                category=self.category,
                subcategory=self.subcategory,
                labels=self.labels,
            )
            if str(path).endswith(SUFFIXES)
            else path
            for path in paths
        ]

    def category(self, wildcards: Any, output: Sequence[str]) -> str:
        return self.entry(output[0]).category

    def subcategory(self, wildcards: Any, output: Sequence[str]) -> str:
        return self.entry(output[0]).subcategory

    def labels(self, wildcards: Any, output: Sequence[str]) -> dict[str, str]:
        """One label only: Snakemake 9 makes a toggle of a second one that has two values, and
        shows an empty page where a combination of the two labels is not there."""
        return {"result": self.entry(output[0]).title}

    def entry(self, path: str) -> Entry:
        """The entry of a figure or table. Raises ValueError for one that has none."""
        target = self.target(path)
        found = contents.find(self.entries, target)
        if found is None:
            raise ValueError(
                f"{path}: expected an entry {target} in {PAGES}/contents.yaml, found none; add it"
            )
        return found

    def target(self, path: str) -> str:
        """What a path below figures/ is called in the contents: `fig5a`, `cpu/fig5`."""
        stem = os.path.splitext(str(path))[0]
        for folder in (self.figures, "figures"):
            if stem.startswith(f"{folder}/"):
                return stem[len(folder) + 1 :]
        return stem

    def made(self, wanted: Iterable[str]) -> list[str]:
        """Figures and tables that are there, of this run, of this device and of CUDA kernels.

        What is wanted and not there is kept in `missing`, and said on stderr.
        """
        wanted = [path for path in map(str, wanted) if path.endswith(SUFFIXES)]
        # Of this run on other devices too, where their results are shown.
        others = [os.path.dirname(path) for path in wanted if path.startswith(f"{self.figures}/")]
        of_run = (self.figures, f"{self.figures}/{self.device}", *others)
        folders = dict.fromkeys((*of_run, "figures"))
        found = {}
        for folder in folders:
            for path in sorted((self.root / folder).glob("*.*")):
                name = f"{folder}/{path.name}"
                if path.suffix in SUFFIXES and self._belongs(name, of_run):
                    found[self.target(name)] = name
        # Snakemake wants all that is marked in the files which a result is made from.
        whole = {
            target: name
            for target, name in found.items()
            if all(need in found for need in self.entry(name).needs)
        }
        self.missing = [path for path in wanted if self.target(path) not in whole]
        if self.missing:
            print(self._message(), file=sys.stderr)
        return list(whole.values())

    def _belongs(self, path: str, of_run: Sequence[str]) -> bool:
        target = self.target(path)
        if contents.find(self.entries, target) is None:
            return False
        # In figures/ itself lies another run's, but for what no run measures.
        return os.path.dirname(path) in of_run or target.startswith(OF_NO_RUN)

    def _message(self) -> str:
        listed = "\n".join(f"  {path}" for path in self.missing)
        return (
            f"Not in the report, since it has not been made ({len(self.missing)}):\n{listed}\n"
            "Make it with the command that measured this run (snakemake --cores 1 all, with its"
            " --configfile and --config), and ask for the report again."
        )
