"""A copy of the repository with a run of a few tiny layers, for tests of the workflow."""

import hashlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import torch  # noqa: F401  before the extension, so that both use its OpenMP library

from packedconv import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = "tiny"
TINY = """
run: {run}
sparsities: [0.90, 0.98]
protocol: {{rounds: 2, executions: {executions}, warmup_executions: 0, trial_executions: 1}}
layers:
  {{batch: 1, in_channels: 8, out_channels: [8, 12], height: 24, width: 24, kernel_size: 3,
   stride: 1, padding: 1}}
layer_tables: config/tiny_layers.yaml
"""
TINY_LAYERS = """
warm: {{rounds: 2, executions: {executions}, warmup_executions: 0, trial_executions: 1}}
cold: {{rounds: 2, executions: 2, warmup_executions: 0, trial_executions: 1, set_bytes: 65536}}
ladder: {{rounds: 2, executions: 2, warmup_executions: 0, trial_executions: 1}}
peers:
  rounds: 2
  executions: 2
  warmup_executions: 0
  trial_executions: 1
  parts:
    - sparsities: [0.9]
      layers:
        - {{name: t, batch: [1], in_channels: 8, out_channels: [8], height: 12, width: 9,
           kernel_size: 3, stride: 1, padding: 1}}
widest_spread: 100.0
repeats: 1
parts:
  - title: Tiny
    sparsities: [0.5, 0.9, 0.999]
    contenders: [sparse, dense, sparse_one_thread, sparse_bias_relu]
    layers:
      - {{name: t, batch: [2], in_channels: 16, out_channels: [16], height: 12, width: 9,
         kernel_size: 3, stride: 1, padding: 1, groups: 2}}
  - title: Lowest instruction set
    sparsities: [0.9]
    contenders: [sparse, dense]
    cold: false
    environment: {{PACKEDCONV_ISA: {isa}, ONEDNN_MAX_CPU_ISA: SSE41}}
    layers:
      - {{name: low, batch: [1], in_channels: 8, out_channels: [8], height: 12, width: 9,
         kernel_size: 3, stride: 1, padding: 1}}
rungs:
  - sparsities: [0.9]
    layers:
      - {{name: t, batch: [1], in_channels: 8, out_channels: [8], height: 12, width: 9,
         kernel_size: 3, stride: 1, padding: 1}}
"""
# Long enough that a signal finds a measurement at work.
SLOW_EXECUTIONS = 8000
# The layers of TINY_LAYERS with warm caches.
LISTED_WARM = ("t_oc16_n2", "low_oc8_n1")


class Checkout:
    """A copy of the repository with its own results and figures."""

    def __init__(self, folder: pathlib.Path, executions: int = 2) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.csv", "*.pdf", "*.png", "*.tex")
        for name in ("config", "csrc", "envs", "figures", "profiles", "python", "scripts"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy2(ROOT / "Snakefile", folder)
        shutil.copy2(ROOT / "README.md", folder)
        # Compiled already: copying keeps the times, so that the build is up to date.
        (folder / "build").mkdir()
        for name in ("extension.json", "build.tsv"):
            shutil.copy2(ROOT / "build" / name, folder / "build")
        self.config = folder / "tiny.yaml"
        self.config.write_text(TINY.format(run=RUN, executions=executions))
        self.layers = folder / "config" / "tiny_layers.yaml"
        self.layers.write_text(TINY_LAYERS.format(isa=_core.isas()[-1], executions=executions))

    @property
    def results(self) -> pathlib.Path:
        return self.folder / "results" / "cpu" / RUN

    @property
    def figures(self) -> pathlib.Path:
        return self.folder / "figures" / RUN

    def command(self, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "snakemake", "--cores", "2", *arguments),
            *("--configfile", str(self.config)),
        ]

    def environment(self, *paths: pathlib.Path) -> dict:
        search = os.pathsep.join(str(path) for path in (*paths, self.folder / "python"))
        return {**os.environ, "PYTHONPATH": search}

    def start(self, *arguments: str, log: str = "run.log") -> subprocess.Popen:
        with open(self.folder / log, "w") as stream:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *arguments: str, paths: tuple = ()) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(*paths),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def planned_rules(self, *arguments: str) -> set[str]:
        """Rules that a dry run would run."""
        done = self.run("-n", *arguments)
        assert done.returncode == 0, done.stdout
        table = done.stdout.partition("Job stats:")[2].splitlines()[3:]
        rules = itertools.takewhile(lambda line: not line.startswith("total"), table)
        return {line.split()[0] for line in rules}

    def contents(self, folder: pathlib.Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen, seconds: float = 240
) -> None:
    """Return once the condition holds while the process lives; fails where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the workflow ended before the signal"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def layers_being_measured(folder: pathlib.Path, script: str = "scripts/bench.py") -> set[str]:
    """Layers of the scripts at work in a folder."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                if script in command and os.readlink(entry / "cwd") == str(folder):
                    if "--layer" in command:
                        found.add(command[command.index("--layer") + 1])
                    else:
                        listed = json.loads(command[command.index("--experiment") + 1])
                        found.add(listed["layer"]["name"])
            except OSError:
                continue
    return found
