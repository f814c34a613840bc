"""What scripts/artifact does once the environment stands: its verbs, as Snakemake and pytest calls.

Started in the root folder of the repository.
"""

import functools
import glob
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

CONFIG_FILES = {"all": [], "smoke": ["config/smoke.yaml"]}
SLOW_TESTS = "python/tests/slow"
SNAKEFILE = pathlib.Path(__file__).resolve().parents[2] / "Snakefile"
# With these Snakemake looks, or tidies up, and runs no step.
LOOKING = (
    *("--unlock", "--touch", "-t", "--archive", "--lint", "--help", "-h", "--version", "-v"),
    *("--list", "--list-rules", "-l", "--list-target-rules", "--lt", "--list-input-changes"),
    *("--list-params-changes", "--list-changes", "--list-untracked", "--lu", "--summary", "-S"),
    *("--detailed-summary", "-D", "--dag", "--rulegraph", "--filegraph", "--d3dag"),
    *("--delete-all-output", "--delete-temp-output", "--cleanup-metadata", "--cm"),
    *("--li", "--lp", "--lc", "--cleanup-shadow", "--list-conda-envs", "--print-compilation"),
    *("--containerize", "--generate-unit-tests", "--export-cwl"),
)


def snakemake_command(arguments: Sequence[str]) -> list[str]:
    """The Snakemake call for a verb or for Snakemake's own arguments.

    Targets come first: --config and --configfile swallow what follows them.
    """
    first, *rest = arguments
    if first in CONFIG_FILES:
        command = ["all", *with_config_files(CONFIG_FILES[first], rest)]
    else:
        command = [first, *rest]
    chosen = any(
        argument in ("--jobs", "--cores")
        or argument.startswith(("-c", "-j", "--cores=", "--jobs="))
        for argument in command
    )
    return ["snakemake", *([] if chosen else ["--cores", "1"]), *command]


def with_config_files(files: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Arguments that read `files` before the configuration files which they name themselves.

    Of several --configfile options Snakemake takes the last one only, so there must be one.
    """
    for index, argument in enumerate(arguments):
        option, joined, first = argument.partition("=")
        if option in ("--configfile", "--configfiles"):
            named = [first] if joined else []
            return [*arguments[:index], option, *files, *named, *arguments[index + 1 :]]
    return [*arguments, *(["--configfile", *files] if files else [])]


def is_dry_run(arguments: Sequence[str]) -> bool:
    """Whether Snakemake will only say what it would do."""
    # Of short options in one word, those before -n that take no value.
    return any(
        argument in ("--dry-run", "--dryrun") or re.match(r"-[pkfFtv]*n", argument)
        for argument in arguments
    )


def runs_steps(arguments: Sequence[str]) -> bool:
    """Whether Snakemake is to run steps, or a dry run of them."""
    return not any(argument.partition("=")[0] in LOOKING for argument in arguments)


def is_unknown(word: str) -> bool:
    """Whether the first argument is neither a verb, nor a rule, nor a file or an option."""
    text = SNAKEFILE.read_text(encoding="utf-8")
    rules = re.findall(r"^\s*(?:rule|checkpoint) (\w+):", text, re.MULTILINE)
    return bool(re.fullmatch(r"[A-Za-z][\w-]*", word)) and word not in (*VERBS, *rules)


def run(command: Sequence[str]) -> int:
    """Run a command in the foreground and return its exit status, 128 + n for signal n.

    Also where it fails after a Ctrl-C and says otherwise.
    """
    sys.stdout.flush()
    process = subprocess.Popen(command)
    interrupts: list[int] = []
    # Ctrl-C reaches the child by itself; what is sent to the launcher alone is passed on.
    handlers: dict[int, Any] = {
        signal.SIGINT: lambda received, _: interrupts.append(received),
    }
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = lambda received, _: process.send_signal(received)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status and interrupts:
        return 128 + signal.SIGINT
    return status if status >= 0 else 128 - status


def run_snakemake(arguments: Sequence[str]) -> int:
    """Run Snakemake; when it fails, the last line says where to look and what comes next."""
    status = run(snakemake_command(arguments))
    if not status:
        return status
    if glob.glob(".snakemake/locks/*"):
        print(
            "artifact: the folder is locked, by a Snakemake at work in it or by one that was"
            " killed. Wait for the first; after a kill, run: scripts/artifact --unlock",
            file=sys.stderr,
        )
    elif is_unknown(arguments[0]):
        print(
            f"artifact: error: expected a verb or a target, got {arguments[0]}. Verbs: "
            "scripts/artifact --help; targets: README.md",
            file=sys.stderr,
        )
    else:
        print(
            "artifact: not finished. What stopped it is said above; what the steps printed is in"
            " logs/, and what this machine lacks: scripts/artifact doctor. Finished steps are kept:"
            " the same command goes on from there.",
            file=sys.stderr,
        )
    return status


def run_report(arguments: Sequence[str]) -> int:
    """Write Snakemake's report of what has been made; a first argument may name its file."""
    named = bool(arguments) and arguments[0].endswith((".html", ".zip"))
    path = arguments[0] if named else "report.html"
    status = run_snakemake(["--report", path, *arguments[named:]])
    if status == 0:
        print(
            f"{path}: {os.path.getsize(path) / 1e6:.1f} MB, one file. Open it in a browser; it"
            " needs no network. Begin with 1 Claims and audit."
        )
    return status


def run_tests(arguments: Sequence[str]) -> int:
    status = run_snakemake(["build"])
    if status:
        return status
    if not arguments:
        print("Tests: about half an hour on two cores.")
    # Test processes share the cores, so threads that wait must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A file's tests stay together, since they share what takes long to make. The order is that of
    # the tests, which puts the longest files first.
    distribution = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
    return run([sys.executable, "-m", "pytest", *distribution, *arguments])


def run_slow(arguments: Sequence[str]) -> int:
    """The slow suite: one test at a time, since it measures and takes whole machines."""
    named = any(argument.startswith(SLOW_TESTS) for argument in arguments)
    asked = [*([] if named else [SLOW_TESTS]), *arguments]
    return run_snakemake(["build"]) or run([sys.executable, "-m", "pytest", *asked])


def run_workflow(verb: str, arguments: Sequence[str]) -> int:
    """Say what a run will do, run it, and say where to look."""
    if not runs_steps(arguments):
        return run_snakemake([verb, *arguments])
    from packedconv import announce  # other verbs have no use for what it imports

    try:
        plan = announce.plan(CONFIG_FILES[verb], arguments)
    except ValueError as error:
        print(f"artifact: error: {error}", file=sys.stderr)
        return 2
    print(announce.describe(plan))
    status = run_snakemake([verb, *arguments])
    if status == 0 and not is_dry_run(arguments):
        print(announce.where_to_look(plan))
    return status


def run_cluster(arguments: Sequence[str]) -> int:
    """Measure devices of a cluster."""
    from packedconv import cluster  # other verbs have no use for what it imports

    return cluster.main(arguments)


# What takes the arguments behind each verb; anything else is Snakemake's.
VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "all": functools.partial(run_workflow, "all"),
    "smoke": functools.partial(run_workflow, "smoke"),
    "report": run_report,
    "cluster": run_cluster,
    "test": run_tests,
    "slow": run_slow,
}


def main(arguments: Sequence[str] | None = None) -> int:
    verb, *rest = sys.argv[1:] if arguments is None else arguments
    return VERBS[verb](rest) if verb in VERBS else run_snakemake([verb, *rest])


if __name__ == "__main__":
    sys.exit(main())
