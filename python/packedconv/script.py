"""What the measuring scripts share: arguments and one clear message on failure."""

import argparse
import errno
import os
import sys
import typing

from packedconv.device import DeviceError

OUT_OF_MEMORY = (
    "the layer does not fit into memory; set a smaller batch, or measure on a machine with more"
)


class CheckError(RuntimeError):
    """A result is wrong, or cannot be right."""


class _Tee:
    """A stream that also writes to a second one."""

    def __init__(self, first: typing.TextIO, second: typing.TextIO) -> None:
        self._streams = (first, second)

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        self.flush()
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def log_messages(path: str) -> None:
    """Write what goes to stderr to a file too, for as long as the process lives.

    A progress bar writes to the terminal alone (sys.__stderr__).
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    stream = open(path, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = typing.cast(typing.TextIO, _Tee(sys.stderr, stream))


def layer_parser(description: typing.Optional[str]) -> argparse.ArgumentParser:
    """A parser with --settings and --layer."""
    parser = settings_parser(description)
    parser.add_argument("--layer", required=True, help="name of the layer, such as oc64")
    return parser


def experiment_parser(description: typing.Optional[str]) -> argparse.ArgumentParser:
    """A parser for an experiment on a CPU: --settings, --experiment, --stamp, --out, --facts."""
    parser = settings_parser(description)
    parser.add_argument("--experiment", required=True, help="what to measure, in JSON")
    parser.add_argument("--stamp", required=True, help="stamp of the built extension, .json")
    parser.add_argument("--out", required=True, help="samples to write, .csv")
    parser.add_argument("--facts", required=True, help="facts to write, .json")
    return parser


def settings_parser(description: typing.Optional[str]) -> argparse.ArgumentParser:
    """A parser with --settings."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--settings", required=True, help="results/<device>/<run>/settings.json")
    return parser


def run(main: typing.Callable[[], None]) -> None:
    """Call a script's main; an expected failure becomes one message and exit status 1."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        sys.exit(f"error: {OUT_OF_MEMORY}")
    except ImportError as error:
        if error.name is None or not error.name.startswith("packedconv"):
            raise
        sys.exit("error: the extension is not built; build it first: snakemake --cores 1 build")
    except (CheckError, DeviceError, TypeError, ValueError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; free some space and run again" if full else ""
        sys.exit(f"error: {error}{hint}")
    except RuntimeError as error:
        # How torch says that memory ran out.
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        sys.exit(f"error: {OUT_OF_MEMORY}")
