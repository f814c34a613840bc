"""What a measuring job asks of Slurm: a device's request, the node that it gets, and the words with
which Slurm rejects it.
"""

import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from packedconv.config import load_yaml, validate

DEVICES_FILE = "profiles/slurm/devices.yaml"
PROFILE = "profiles/slurm"
# Where a request does not say.
DEFAULTS = {"exclusive": True, "runtime": 60, "mem_mb": 16000, "options": ""}
# Commands that submit, watch and look up jobs.
COMMANDS = ("sbatch", "squeue", "scontrol")


class SlurmError(RuntimeError):
    """Slurm rejects a job; the text has Slurm's own words."""


class Pending(NamedTuple):
    """A job that waits: its number, what it is, and the reason that Slurm gives."""

    job: str
    comment: str
    reason: str


def load_requests(path: pathlib.Path, root: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What jobs ask for, by device, from a file as profiles/slurm/devices.example.yaml.

    Raises ValueError where the file is missing or wrong.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: expected what a job on this cluster asks for, by device, found no file; "
            f"cp {PROFILE}/devices.example.yaml {DEVICES_FILE}, and edit it (docs/clusters.md)"
        )
    content = load_yaml(path)
    validate(content, root / "config" / "schema" / "slurm.schema.yaml", str(path))
    common = {**DEFAULTS, **(content.get("common") or {})}
    return {name: {**common, **(own or {})} for name, own in content["devices"].items()}


def require_commands() -> None:
    """Raise ValueError where this machine is no submit host of a Slurm cluster."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise ValueError(
            f"Slurm: expected {', '.join(COMMANDS)} in PATH, found no {', '.join(missing)}; "
            "call this where you submit jobs (a login node)"
        )


def extra_options(request: Mapping[str, Any], node: str | None) -> list[str]:
    """Options of sbatch that Snakemake has no resource for, the node last."""
    return [
        *(["--exclusive"] if request["exclusive"] else []),
        # All jobs of one call of Snakemake have one name: one of them at a time.
        "--dependency=singleton",
        *request["options"].split(),
        *([f"--nodelist={node}"] if node else []),
    ]


def resources(request: Mapping[str, Any], node: str, cpus: int) -> dict[str, Any]:
    """The request as resources of Snakemake jobs, on one node, with that many of its CPUs."""
    named = {
        "slurm_account": request.get("account"),
        "slurm_partition": request.get("partition"),
        "qos": request.get("qos"),
        "constraint": request.get("constraint"),
        "gres": request.get("gres"),
        "runtime": request["runtime"],
        "mem_mb": request["mem_mb"],
        "cpus_per_task": cpus,
        "slurm_extra": " ".join(extra_options(request, node)),
    }
    return {key: value for key, value in named.items() if value is not None}


def resource_arguments(wanted: Mapping[str, Any]) -> list[str]:
    """Resources as the arguments of Snakemake's --default-resources, which are expressions."""
    return [f"{key}={value!r}" for key, value in wanted.items()]


def sbatch_options(request: Mapping[str, Any], node: str | None, cpus: int | None) -> list[str]:
    """The request as options of sbatch."""
    named = {
        "account": request.get("account"),
        "partition": request.get("partition"),
        "qos": request.get("qos"),
        "constraint": request.get("constraint"),
        "gres": request.get("gres"),
        "time": request["runtime"],
        "mem": request["mem_mb"],
        "cpus-per-task": cpus,
    }
    return [
        "--ntasks=1",
        *(f"--{key}={value}" for key, value in named.items() if value is not None),
        *extra_options(request, node),
    ]


def node_for(request: Mapping[str, Any], node: str | None = None, cpus: int | None = None) -> str:
    """The node on which Slurm would start such a job first, without submitting one.

    node: the only one that will do. Raises SlurmError where Slurm would start it nowhere.
    """
    options = sbatch_options(request, node, cpus)
    said = _say(["sbatch", "--test-only", *options, "--wrap", "true"])
    found = re.search(r"on nodes? (\S+) in partition", said)
    if not found:
        raise SlurmError(f"sbatch --test-only names no node: {said}")
    return found[1]


def cpus_of(node: str) -> int:
    """CPUs of a node that jobs can have. Raises SlurmError for an unknown node."""
    said = _say(["scontrol", "--oneliner", "show", "node", node])
    # Newer versions tell those that are kept for the system from the rest.
    found = re.search(r"\bCPUEfctv=(\d+)", said) or re.search(r"\bCPUTot=(\d+)", said)
    if not found:
        raise SlurmError(f"scontrol names no CPUs of {node}: {said}")
    return int(found[1])


def jobs_of(prefix: str, folder: pathlib.Path) -> list[str]:
    """Numbers of jobs in the queue, or at work, whose name has this prefix, sent from a folder."""
    said = _say(["squeue", "--me", "--noheader", "--format=%i|%j|%Z"])
    rows = [line.strip().split("|", 2) for line in said.splitlines() if line.count("|") >= 2]
    return [job for job, name, sent in rows if _is_of(prefix, name) and sent == str(folder)]


def pending(prefix: str) -> list[Pending]:
    """Jobs whose name has this prefix that wait, and why. Empty where Slurm does not answer."""
    try:
        said = _say(["squeue", "--me", "--noheader", "--states=PENDING", "--format=%i|%j|%k|%r"])
    except SlurmError:
        return []
    rows = [line.strip().split("|", 3) for line in said.splitlines() if line.count("|") >= 3]
    return [
        Pending(job, comment, reason) for job, name, comment, reason in rows if _is_of(prefix, name)
    ]


def _is_of(prefix: str, name: str) -> bool:
    """Whether a job has this prefix, to which Snakemake's executor adds one id for all."""
    return name.rpartition("_")[0] == prefix


def _say(command: Sequence[str]) -> str:
    """What a command of Slurm prints, on both streams. Raises SlurmError with it on failure."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    said = done.stdout.strip()
    if done.returncode:
        raise SlurmError(said or f"{command[0]}: exit status {done.returncode}")
    return said
