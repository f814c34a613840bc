"""What scripts/artifact does once the environment stands: its verbs, as Snakemake and pytest calls.

Started in the root folder of the repository.
"""

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

CONFIG_FILES = {"all": [], "smoke": ["config/smoke.yaml"]}
SLOW_TESTS = "python/tests/slow"


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
        if argument in ("--configfile", "--configfiles"):
            return [*arguments[: index + 1], *files, *arguments[index + 1 :]]
    return [*arguments, *(["--configfile", *files] if files else [])]


def is_dry_run(arguments: Sequence[str]) -> bool:
    """Whether Snakemake will only say what it would do."""
    return any(argument in ("-n", "--dry-run", "--dryrun") for argument in arguments)


def run(command: Sequence[str]) -> int:
    """Run a command in the foreground and return its exit status, 128 + n for signal n."""
    sys.stdout.flush()
    process = subprocess.Popen(command)
    # Ctrl-C reaches the child by itself; what is sent to the launcher alone is passed on.
    handlers = {signal.SIGINT: signal.SIG_IGN}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = lambda received, _: process.send_signal(received)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def run_snakemake(arguments: Sequence[str]) -> int:
    """Run Snakemake; when it leaves the folder locked, the last line says what unlocks it."""
    status = run(snakemake_command(arguments))
    if status and glob.glob(".snakemake/locks/*"):
        print(
            "artifact: the folder is locked, by a Snakemake at work in it or by one that was"
            " killed. Wait for the first; after a kill, run: scripts/artifact --unlock",
            file=sys.stderr,
        )
    return status


def run_tests(arguments: Sequence[str]) -> int:
    status = run_snakemake(["build"])
    if status:
        return status
    # Test processes share the cores, so threads that wait must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A file's tests stay together, since they share what takes long to make.
    return run([sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile", *arguments])


def run_slow(arguments: Sequence[str]) -> int:
    """The slow suite: one test at a time, since it measures and takes whole machines."""
    named = any(argument.startswith(SLOW_TESTS) for argument in arguments)
    asked = [*([] if named else [SLOW_TESTS]), *arguments]
    return run_snakemake(["build"]) or run([sys.executable, "-m", "pytest", *asked])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = arguments[0]
    if verb == "test":
        return run_tests(arguments[1:])
    if verb == "slow":
        return run_slow(arguments[1:])
    if verb not in CONFIG_FILES:
        return run_snakemake(arguments)
    from packedconv import announce  # a pass-through call has no use for what it imports

    try:
        plan = announce.plan(CONFIG_FILES[verb], arguments[1:])
    except ValueError as error:
        print(f"artifact: error: {error}", file=sys.stderr)
        return 2
    print(announce.describe(plan))
    status = run_snakemake(arguments)
    if status == 0 and not is_dry_run(arguments):
        print(announce.where_to_look(plan))
    return status


if __name__ == "__main__":
    sys.exit(main())
