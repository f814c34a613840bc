"""One of two results that are compared, under the name that it has in this checkout."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from packedconv.evidence.samples import (
    Results,
    clock_notes,
    dense_layouts,
    distribution,
    file_error,
    listed,
)

# Conditions that say what a machine is; others say what was run on it.
HARDWARE = "hardware"
LAYOUT = "dense layout"


class Side(NamedTuple):
    """A set of results, named <device>.<run> after its folder.

    results: its run is that of the folder. measured_as: the run's name where it was measured,
        which results that were brought here keep in their files.
    """

    name: str
    results: Results
    measured_as: str

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.results.settings["device"]["kind"]

    @property
    def hardware(self) -> str:
        """The model of the processor or GPU; the device's title where no facts name it."""
        key = "cpu" if self.kind == "cpu" else "gpu"
        for facts in self.results.facts.values():
            for found in (facts.get("comparable", {}), facts.get("machine", {})):
                if found.get(key):
                    return str(found[key])
        return self.results.title

    @property
    def busy(self) -> list[int]:
        """Output channels of the layers that were timed while the machine was busy."""
        layers = self.results.layers
        return sorted(layers[name].out_channels for name in self.results.peaks["busy_layers"])

    @property
    def disturbances(self) -> list[str]:
        """Sentences on a busy machine and on clocks that moved; nothing where all was quiet."""
        sentences = clock_notes(self.results.facts) if self.kind == "cuda" else []
        if self.busy:
            where = f"OC {listed(self.busy)}"
            sentences.insert(
                0, f"The machine was busy with something else while {where} was timed."
            )
        return sentences

    @property
    def conditions(self) -> dict[str, str]:
        """Under which times were taken, in words, by name; what is not recorded is not there."""
        results, settings = self.results, self.results.settings
        protocol = settings["protocol"]
        facts: dict[str, Any] = next(iter(results.facts.values()), {})
        machine, alike = facts.get("machine", {}), facts.get("comparable", {})
        stamp, commit = facts.get("stamp", {}), machine.get("commit") or {}
        on_cpu = self.kind == "cpu"
        variables = {
            name: value for name, value in alike.get("environment", {}).items() if value is not None
        }
        found = {
            HARDWARE: self.hardware,
            "threads": listed(sorted(results.samples["threads"].unique())) if on_cpu else "",
            "instruction set": alike.get("isa") if on_cpu else "",
            "protocol": f"{protocol['rounds']} rounds of {protocol['executions']} executions",
            "warm-up executions": protocol["warmup_executions"],
            "seed": settings["seed"],
            "weights": distribution(settings["weights"]),
            "inputs": distribution(settings["inputs"]),
            "contenders": settings.get("contenders"),
            LAYOUT: dense_layouts(results.samples) if on_cpu else "",
            "PyTorch": alike.get("torch") or machine.get("torch"),
            "packedconv": " ".join(
                filter(None, [machine.get("extension", {}).get("version"), _commit(commit)])
            ),
            "compiled kernels": str(stamp.get("sha256", ""))[:8],
            "compiler": " ".join(
                filter(None, [stamp.get("compiler"), stamp.get("flags", "").strip()])
            ),
            "driver": alike.get("driver"),
            "CUDA": alike.get("cuda"),
            "cuDNN": alike.get("cudnn"),
            "OpenMP": listed(alike.get("openmp_libraries", [])) if on_cpu else "",
            "environment": (
                listed(f"{name}={value}" for name, value in variables.items()) or "none"
            )
            if alike
            else "",
            "NumPy": machine.get("numpy"),
            "Python": machine.get("python"),
            "system": machine.get("system"),
            "Linux": machine.get("kernel"),
            "C library": machine.get("libc"),
        }
        return {name: str(value) for name, value in found.items() if value not in (None, "")}


def load_side(folder: str | Path) -> Side:
    """Load results/<device>/<run>/ as a side of a comparison.

    Raises FileNotFoundError or ValueError as `Results.load`, and ValueError where the folder is
    named for another device than the one that was measured.
    """
    folder = Path(folder)
    device, run = folder.absolute().parts[-2:]
    results = Results.load(folder)
    if results.device != device:
        raise file_error(
            folder / "settings.json",
            "device",
            f"{device}, as its folder is named",
            results.device,
            f"keep it in results/{results.device}/",
        )
    settings = {**results.settings, "run": run}
    return Side(f"{device}.{run}", dataclasses.replace(results, settings=settings), results.run)


def differing(left: Side, right: Side) -> dict[str, tuple[str, str]]:
    """Conditions that both sides recorded and that differ, as (left, right), by name.

    Of dense layouts those of the numbers of output channels that both have.
    """
    ours, theirs = left.conditions, right.conditions
    found = {
        name: (value, theirs[name])
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    }
    if LAYOUT in found:
        del found[LAYOUT]
        layouts = [_layouts(side) for side in (left, right)]
        others = [
            channels
            for channels, layout in layouts[0].items()
            if layouts[1].get(channels, layout) != layout
        ]
        for channels in others:
            found[f"{LAYOUT} of OC {channels}"] = tuple(one[channels] for one in layouts)
    return found


def _layouts(side: Side) -> dict[int, str]:
    """The dense layout of each number of output channels."""
    dense = side.results.samples.query("implementation == 'dense'")
    return dict(zip(dense["out_channels"], dense["layout"], strict=True))


def _commit(commit: dict[str, Any]) -> str:
    if not commit.get("id"):
        return ""
    return f"({commit['id'][:8]}{', modified' if commit.get('modified') else ''})"
