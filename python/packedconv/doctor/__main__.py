"""scripts/artifact doctor: what this machine has and lacks, and what it can decide.

It runs no measurement and changes nothing. Exit status 1 when something required is missing.
"""

import argparse
import os
import re
import shutil
import sys
import typing

from packedconv.bench import gpu_state
from packedconv.doctor import gpu, machine, network
from packedconv.doctor.findings import MISSING, OK, WARNING, Finding, line

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
DEVICE = "device"  # the finding on a device that no file describes
# Columns of the matrix where the terminal does not say, its least and its most.
_COLUMNS, _LEAST, _MOST = 120, 90, 150


def arguments(given: typing.Optional[typing.Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/artifact doctor", description=__doc__)
    parser.add_argument(
        *("--config", "-C"),
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="as of scripts/artifact all: --config device=h200",
    )
    parser.add_argument(
        *("--configfile", "--configfiles"),
        nargs="+",
        default=[],
        metavar="FILE",
        help="as of scripts/artifact all: --configfile config/smoke.yaml",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the claim matrix there, too")
    parser.add_argument(
        "--set-up",
        action="store_true",
        help="make .venv first, which the claim matrix needs: once, a few minutes, with network",
    )
    # What the launcher has found, whose own checks come first.
    parser.add_argument("--missing", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--environment",
        choices=("made", "outdated", "missing"),
        default="made",
        help=argparse.SUPPRESS,
    )
    return parser.parse_args(given)


def device_name(options: argparse.Namespace, root: str = ROOT) -> str:
    """The device that the options name, as Snakemake will read them. No YAML is at hand."""
    found = ""
    files = [os.path.join("config", "config.yaml"), *options.configfile]
    for path in files:
        try:
            with open(os.path.join(root, path), encoding="utf-8") as stream:
                match = re.search(r"^device: *[\"']?([\w.-]+)", stream.read(), re.MULTILINE)
        except OSError as error:
            sys.exit(
                f"artifact: error: --configfile: expected a file that can be read, got {error}"
            )
        found = match.group(1) if match else found
    for entry in options.config:
        if entry.startswith("device="):
            found = entry[len("device=") :]
    return found


def findings(options: argparse.Namespace) -> typing.Iterator[Finding]:
    """The checks, one after another."""
    files = gpu.device_files(os.path.join(ROOT, "config", "devices"))
    name = device_name(options)
    if name not in files:
        yield Finding(
            MISSING,
            DEVICE,
            f"no file config/devices/{name}.yaml",
            "--config " + " or ".join(f"device={known}" for known in sorted(files)),
        )
        name = "cpu"
    yield environment(options.environment)
    if options.environment != "made":
        yield network.package_index()
    yield machine.memory()
    found = gpu.gpus()
    yield gpu.judge_gpus(found, files[name], files.values())
    if files[name].match in found.titles:
        yield gpu_clock(found.titles.index(files[name].match))
    yield gpu.cuda_compiler(files[name], found)
    holders = machine.measuring(sorted(files))
    yield machine.measurement(holders)
    yield machine.cpus()
    yield machine.load()
    yield from machine.clocks(list(holders.values()))


def environment(state: str) -> Finding:
    if state == "made":
        return Finding(OK, "environment", ".venv, from envs/requirements.lock")
    found = "no .venv yet"
    if state == "outdated":
        found = ".venv is unfinished, or from another envs/requirements.lock or folder"
    return Finding(
        WARNING,
        "environment",
        found,
        "scripts/artifact doctor --set-up (any other verb does it too)",
    )


def gpu_clock(index: int) -> Finding:
    """What the driver says of a GPU's clock now."""
    state = gpu_state.read_state(str(index))
    found = gpu_state.describe_clocks([state])
    if state["temperature_c"] is not None:
        found += ", {:g} °C".format(state["temperature_c"])
    if gpu_state.throttled([state]):
        return Finding(WARNING, "GPU clock", found, "nvidia-smi -q -d PERFORMANCE, to see why")
    return Finding(OK, "GPU clock", found)


def main(given: typing.Optional[typing.Sequence[str]] = None) -> int:
    options = arguments(given)
    missing, warnings, known = options.missing, 0, True
    for finding in findings(options):
        print(line(finding), flush=True)
        missing += finding.state == MISSING
        warnings += finding.state == WARNING
        known = known and (finding.name, finding.state) != (DEVICE, MISSING)
    # Of an unknown device it would only be refused once more.
    if options.environment == "made" and known:
        missing += not show_matrix(options)
    print()
    print(summary(options, missing, warnings))
    return 1 if missing else 0


def show_matrix(options: argparse.Namespace) -> bool:
    """Print the claim matrix, and write it where that is asked for; whether both went well."""
    # Only here: the checks have to run where nothing is set up.
    from packedconv.doctor import matrix

    try:
        found = matrix.matrix(workflow_arguments(options), ROOT)
        if options.csv:
            matrix.write(found, options.csv)
    except (OSError, ValueError) as error:
        print(f"artifact: error: {error}", file=sys.stderr)
        return False
    columns = shutil.get_terminal_size((_COLUMNS, 24)).columns
    print()
    print(matrix.describe(found, min(max(columns, _LEAST), _MOST)))
    if options.csv:
        print(f"As a table: {options.csv}")
    return True


def workflow_arguments(options: argparse.Namespace) -> typing.List[str]:
    """The options that `scripts/artifact all` takes too."""
    found = []  # type: typing.List[str]
    for name in ("config", "configfile"):
        if getattr(options, name):
            found += ["--" + name, *getattr(options, name)]
    return found


def summary(options: argparse.Namespace, missing: int, warnings: int) -> str:
    """The last line: whether all is there, and what to call next."""
    rest = " ".join(["", *workflow_arguments(options)])
    noted = f" {warnings} {'warning' if warnings == 1 else 'warnings'}."
    if missing:
        matrix = "" if options.environment == "made" else " The claim matrix comes after that."
        return (
            f"Not ready: {missing} missing, marked above with what mends it.{noted}{matrix}"
            f" Then again: scripts/artifact doctor{rest}"
        )
    if options.environment != "made":
        return (
            f"Ready to be set up.{noted} The claim matrix needs .venv: scripts/artifact doctor"
            f" --set-up{rest} makes it (once, a few minutes, from the network) and shows it."
        )
    # It is a run of its own, so of the options only the device.
    name = device_name(options)
    device = "" if name == device_name(arguments([])) else f" --config device={name}"
    return (
        f"Ready.{noted} Next: scripts/artifact smoke{device} (minutes), then"
        f" scripts/artifact all{rest}"
    )


if __name__ == "__main__":
    sys.exit(main())
