"""What a run will do, said before it starts: its steps, about how long, what it can decide.

Imports no torch: it is to be read at once.
"""

import argparse
import glob
import json
import os
import pathlib
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml

from packedconv import config as configuration
from packedconv import imported
from packedconv.bundle import ORIGIN
from packedconv.device import DeviceError, cpu_title, require, usable_cores
from packedconv.doctor.machine import BUSY_SHARE, LOOK_SECONDS, measuring
from packedconv.evidence import claims, published
from packedconv.roofline import dense_flops
from packedconv.samples_file import IMPLEMENTATIONS, REQUIRED_IMPLEMENTATIONS
from packedconv.settings import contenders_of, layers_of

# Rough costs: good for "about", never for a result.
COMPILATION_SECONDS = 30.0
CUDA_COMPILATION_SECONDS = 60.0  # more, where there is a CUDA compiler
ANALYSIS_SECONDS = 60.0
LAYER_SECONDS = 15.0  # of a layer: starting processes, weights, the check, trial executions
SPARSE_SHARE = 0.3  # a sparse execution, in dense ones
DENSE_SHARE = 1.0  # of a matrix product's rate, that a dense convolution reaches
# On a GPU: of the stated FP32 peak, that an execution reaches, whatever the contender; the
# least that a pair of events spans and that a switch of contender costs; and what the
# ablation and the fixed-cost experiment take of a layer beside its comparison.
GPU_SHARE = 1.0
PAIR_SECONDS = 0.002
SWITCH_SECONDS = 0.02
EXPERIMENT_SECONDS = 60.0

ANSWERS = {
    "decidable": "decide {}",
    "analogue": "show an analogue of {}, which decides nothing about the paper",
    "not": "say nothing about {}",
}


class Machine(NamedTuple):
    """The machine at hand: memory and disk in bytes, share of the CPUs in use."""

    title: str
    cpus: int
    cores: int
    memory: int
    free_memory: int
    free_disk: int
    in_use: float


class Plan(NamedTuple):
    """A run about to start.

    settings: as settings.json. steps: seconds by step. measured: whether they come from an
    earlier run on this machine. decidable: what this device can say of each statement of
    the paper, as claims.decidable.
    """

    settings: Mapping[str, Any]
    machine: Machine
    steps: Mapping[str, float]
    measured: bool
    decidable: Mapping[str, str]
    # What keeps this machine from measuring, where that is known by now.
    hindrance: str = ""
    # The process that measures on this device now, for which this run will wait.
    holder: int | None = None
    # Of an imported run its name in this checkout and where it comes from, as `imported.Run`.
    imported_as: str = ""
    origin: Mapping[str, Any] | None = None

    @property
    def run(self) -> str:
        """Name of the run in this checkout."""
        return self.imported_as or self.settings["run"]

    @property
    def figures(self) -> str:
        """Folder that the run renders into."""
        return "figures" if self.run == configuration.DEFAULT_RUN else f"figures/{self.run}"


def plan(config_files: Sequence[str], arguments: Sequence[str], root: str = ".") -> Plan:
    """The plan of `snakemake all` with these configuration files and further arguments.

    Raises ValueError for a configuration that the workflow would refuse.
    """
    folder = pathlib.Path(root)
    settings, name, origin = imported.find_run(
        merged_config(config_files, arguments, folder), folder
    )
    device = settings["device"]
    seconds = 0.0 if origin else stored_seconds(settings, folder)
    measured = seconds is not None
    if not measured:
        seconds = benchmark_seconds(settings, dense_rate(device))
    built = (folder / "build/extension.json").exists()
    return Plan(
        settings=settings,
        machine=machine(folder),
        steps={
            "compilation": 0.0 if built else compilation_seconds(),
            "benchmark": seconds,
            "analysis": ANALYSIS_SECONDS,
        },
        measured=measured,
        decidable=claims.decidable(
            published.load(str(folder / "config/paper.yaml")), device["family"], settings
        ),
        hindrance=hindrance(device) if built and not origin else "",
        holder=None if origin else measuring([device["name"]]).get(device["name"]),
        imported_as=name if origin else "",
        origin=origin,
    )


def compilation_seconds() -> float:
    """About how long the build takes on two cores; longer where it finds a CUDA compiler."""
    cuda = shutil.which(os.environ.get("CUDACXX") or "nvcc") is not None
    return COMPILATION_SECONDS + cuda * CUDA_COMPILATION_SECONDS


def hindrance(device: Mapping[str, Any]) -> str:
    """Why this machine cannot measure a GPU's device file; empty where it can, and for a CPU."""
    if device["kind"] == "cpu":
        return ""
    try:
        require(device)
    except DeviceError as error:
        return str(error)
    return ""


def merged_config(
    config_files: Sequence[str], arguments: Sequence[str], root: pathlib.Path
) -> dict[str, Any]:
    """The configuration that Snakemake will see for these arguments.

    Of an option given twice Snakemake takes the last one.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-C", nargs="*", default=[])
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[])
    options, _ = parser.parse_known_args(arguments)
    merged = configuration.load_yaml(root / "config/config.yaml")
    for path in (*config_files, *options.configfile):
        _update(merged, _configuration_file(path, root))
    for entry in options.config:
        key, _, value = entry.partition("=")
        _update(merged, {key: _value(value)})
    return merged


def _configuration_file(path: str, root: pathlib.Path) -> Mapping[str, Any]:
    """What a file of --configfile holds. Raises ValueError where it is no configuration."""
    try:
        found = configuration.load_yaml(root / path) or {}
    except OSError as error:
        raise ValueError(
            f"--configfile: {path}: {error.strerror}; paths are relative to {root}"
        ) from None
    if not isinstance(found, Mapping):
        raise ValueError(
            f"--configfile: {path}: expected a mapping of keys to values, got "
            f"{type(found).__name__}; config/README.md has the keys"
        )
    return found


def _value(text: str) -> Any:
    """A value of --config as Snakemake reads it: inside a list, numbers stay text."""
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return yaml.load(text, Loader=yaml.BaseLoader)


def _update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Merge as Snakemake does: mappings key by key, anything else replaced."""
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _update(target[key], value)
        else:
            target[key] = value


def machine(root: pathlib.Path) -> Machine:
    memory = psutil.virtual_memory()
    return Machine(
        title=cpu_title(),
        cpus=len(os.sched_getaffinity(0)),
        cores=usable_cores(),
        memory=memory.total,
        free_memory=memory.available,
        free_disk=shutil.disk_usage(root).free,
        in_use=psutil.cpu_percent(interval=LOOK_SECONDS) / 100,
    )


def matrix_rate() -> float:
    """FLOP/s of matrix products on all cores, from a twentieth of a second: a rough speed.

    The matrix is too small to be shared among threads, whose waiting would be measured on a
    busy machine.
    """
    size = 64
    matrix = np.ones((size, size), dtype=np.float32)
    best = float("inf")
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return usable_cores() * 2 * size**3 / best


def dense_rate(device: Mapping[str, Any]) -> float:
    """FLOP/s of a dense convolution on a device, roughly: of a CPU by a trial, of a GPU by what
    its device file states."""
    if device["kind"] == "cpu":
        return DENSE_SHARE * matrix_rate()
    return GPU_SHARE * (device["peak_flops"] or 1e13)


def sides(settings: Mapping[str, Any]) -> float:
    """What is timed at one sparsity, in dense convolutions."""
    if settings["device"]["kind"] == "cpu":
        return 1 + SPARSE_SHARE
    if contenders_of(settings) == "paper-protocol":
        return len(REQUIRED_IMPLEMENTATIONS)
    return len(IMPLEMENTATIONS)


def work(settings: Mapping[str, Any]) -> float:
    """Dense FLOP that a benchmark is worth, all contenders included."""
    protocol = settings["protocol"]
    executions = protocol["rounds"] * (protocol["warmup_executions"] + protocol["executions"])
    share = sides(settings) * len(settings["sparsities"])
    return executions * share * sum(dense_flops(layer) for layer in layers_of(settings))


def benchmark_seconds(settings: Mapping[str, Any], flops_per_second: float) -> float:
    """About how long a benchmark takes on a machine of this dense rate."""
    return max(work(settings) / flops_per_second, _least_seconds(settings)) + starting(settings)


def starting(settings: Mapping[str, Any]) -> float:
    """Seconds of a benchmark that do not grow with its rounds and executions."""
    seconds = LAYER_SECONDS
    if settings["device"]["kind"] != "cpu" and contenders_of(settings) == "all":
        seconds += EXPERIMENT_SECONDS
    return seconds * len(settings["layers"])


def _least_seconds(settings: Mapping[str, Any]) -> float:
    """What pairs of events and switches of contender take on a GPU, however fast it is."""
    if settings["device"]["kind"] == "cpu":
        return 0.0
    protocol = settings["protocol"]
    blocks = protocol["rounds"] * sides(settings) * len(settings["sparsities"])
    each = SWITCH_SECONDS + PAIR_SECONDS * protocol["executions"]
    return len(settings["layers"]) * blocks * each


def stored_seconds(settings: Mapping[str, Any], root: pathlib.Path) -> float | None:
    """How long it takes by the largest earlier run of this device, or None without one."""
    device = settings["device"]["name"]
    runs = []
    for path in glob.glob(str(root / "results" / device / "*" / "steps.csv")):
        # An imported run was measured on another machine.
        if os.path.exists(os.path.join(os.path.dirname(path), ORIGIN)):
            continue
        try:
            with open(path, encoding="utf-8") as stream:
                rows = dict(line.strip().split(",") for line in stream if line.strip())
            with open(os.path.join(os.path.dirname(path), "settings.json")) as stream:
                earlier = json.load(stream)
            started = starting(earlier)
            runs.append((work(earlier), max(0.0, float(rows["benchmark"]) - started)))
        except (OSError, ValueError, KeyError):
            continue
    if not runs or max(runs)[0] < work(settings) / 20:
        return None  # a much smaller run says little about this one
    earlier_work, seconds = max(runs)
    return seconds * work(settings) / earlier_work + starting(settings)


def about(seconds: float) -> str:
    """A duration as a reader wants it: half a minute at least, whole minutes above two."""
    minutes = seconds / 60
    if minutes < 0.75:
        return "under 1 min"
    return f"about {round(minutes)} min"


def describe(plan: Plan) -> str:
    """The announcement, a text of a screen."""
    settings, here = plan.settings, plan.machine
    protocol = settings["protocol"]
    gigabytes = 1e-9
    compilation = about(plan.steps["compilation"]) if plan.steps["compilation"] else "done"
    lines = [
        f"Run {plan.run} on device {settings['device']['name']}, seed {settings['seed']}:"
        f" {about(sum(plan.steps.values()))}"
        + (" by an earlier run here." if plan.measured else " by a rough guess."),
        f"  compilation  {compilation}",
        f"  benchmark    {_benchmark(plan)}{len(settings['layers'])} layers,"
        f" {len(settings['sparsities'])} sparsities, {protocol['rounds']} rounds of"
        f" {protocol['executions']} executions, checked before they are timed",
        *_on_a_gpu(settings),
        f"  analysis     {about(plan.steps['analysis'])}: figures, tables, audit, claims",
        "Steps that are finished already are not repeated. Below, Snakemake counts them"
        f"{_each_layer(plan)}. What steps print is in logs/.",
        f"Machine: {here.title}, {here.cpus} CPUs ({here.cores} cores),"
        f" {here.free_memory * gigabytes:.1f} of {here.memory * gigabytes:.1f} GB memory free,"
        f" {here.free_disk * gigabytes:.0f} GB disk free, {here.in_use:.0%} of the CPUs in use",
    ]
    if plan.hindrance:
        lines.append(f"Warning: nothing can be measured: {plan.hindrance}")
    if plan.holder is not None:
        lines.append(
            f"Warning: process {plan.holder} measures on this device; measuring here waits until it"
            " has ended."
        )
    if here.in_use > BUSY_SHARE and plan.origin is None:
        lines.append(
            f"Warning: the machine is busy ({here.in_use:.0%} of its CPUs are in use);"
            " times measured now will be off."
        )
    lines.append(f"Of the paper's {len(plan.decidable)} statements, a run on this device can")
    for answer, title in ANSWERS.items():
        ids = [identity for identity, found in plan.decidable.items() if found == answer]
        lines.append(f"  {title.format(len(ids))}{':' if ids else '.'}")
        lines.extend(_indented(", ".join(ids)))
    lines.append("Why, statement by statement: scripts/artifact doctor")
    return "\n".join(lines)


def _benchmark(plan: Plan) -> str:
    """How long measuring takes, or that an imported run is only read."""
    if plan.origin is None:
        return f"{about(plan.steps['benchmark'])}: "
    processor = plan.origin.get("machine", {}).get("cpu") or "an unknown processor"
    return (
        f"none here: imported, measured as run {plan.origin['run']} on a machine with {processor};"
        "\n               "
    )


def _each_layer(plan: Plan) -> str:
    """About how long one of the layers takes, where any is measured."""
    if plan.origin is not None:
        return ""
    seconds = plan.steps["benchmark"] / len(plan.settings["layers"])
    return f"; timing a layer takes {about(seconds)}"


def _on_a_gpu(settings: Mapping[str, Any]) -> list[str]:
    """What a benchmark on a GPU compares; nothing for a CPU."""
    if settings["device"]["kind"] == "cpu":
        return []
    if contenders_of(settings) == "paper-protocol":
        return ["               the paper's kernel against PyTorch's default, nothing else"]
    return [
        "               two sparse kernels against PyTorch's default, FP32, TF32, FP16 and"
        " channels last;",
        "               then every mapping of the paper's kernel, and what nonzeros do not explain",
    ]


def _indented(text: str) -> list[str]:
    margin = "    "
    return textwrap.wrap(
        text, 96, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def where_to_look(plan: Plan) -> str:
    """What to open once a run has ended well."""
    device, run = plan.settings["device"]["name"], plan.run
    contenders = ""
    if plan.settings["device"]["kind"] != "cpu":
        contenders = f" Contenders: {plan.figures}/{device}/contenders.md."
    return (
        f"Done. Verdicts: {plan.figures}/claims.md and {plan.figures}/audit.md.{contenders}"
        f" Figures and tables: {plan.figures}/ (this device: {plan.figures}/{device}/)."
        f" Measurements: results/{device}/{run}/. What is what: figures/README.md."
    )
