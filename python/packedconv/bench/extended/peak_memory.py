"""The memory that an execution takes beside its inputs, weights and outputs.

Measured in a process of its own: `in_child` starts it, `main` is what it does.
"""

import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from packedconv.bench.contenders import UnavailableError

_STATUS, _CLEAR_REFS = "/proc/self/status", "/proc/self/clear_refs"
# In clear_refs: the peak becomes the resident size of now.
_RESET_PEAK = "5"
# Of mallopt, as in glibc's malloc.h: M_MMAP_THRESHOLD in bytes, M_MMAP_MAX in pieces.
_MAP_LARGE = ((-3, 2**17), (-4, 2**16))
# Importing torch takes seconds on a busy machine, drawing and packing weights some more.
TIMEOUT_SECONDS = 300
_CHILD = ("-m", __name__)


def peak_bytes(execute: Callable[[], object]) -> int:
    """How far the resident size of this process rises above what it is before an execution.

    Freed memory goes back to the system before, so that what is allocated counts even where the
    C library had it; from then on it maps what is large piece by piece, so that its own holes do
    not count. Pages of files that come in on the way, code mostly, do not count.
    Raises UnavailableError where the system does not tell (Linux 4.0 and later does).
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "malloc_trim") and hasattr(library, "mallopt")):
        raise UnavailableError("this C library has no malloc_trim")
    for parameter, value in _MAP_LARGE:
        library.mallopt(parameter, value)
    library.malloc_trim(0)
    try:
        pathlib.Path(_CLEAR_REFS).write_text(_RESET_PEAK)
        before = _status()
        execute()
        after = _status()
        rise = after["VmHWM"] - before["VmRSS"]
        files = after["RssFile"] - before["RssFile"]
    except (OSError, KeyError) as error:
        raise UnavailableError(f"the system does not tell the peak memory: {error!r}") from error
    return max(0, rise - max(0, files))


def in_child(request: dict[str, Any]) -> dict[str, Any]:
    """What `main` says of a request, from a fresh interpreter; {"skipped": reason} if nothing."""
    package = str(pathlib.Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        child = subprocess.run(
            [sys.executable, *_CHILD],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"took more than {TIMEOUT_SECONDS} s"}
    if child.returncode < 0:
        return {"skipped": f"ended by signal {-child.returncode}, as for want of memory"}
    if child.returncode > 0:
        return {"skipped": (child.stderr.strip().splitlines() or ["failed without a word"])[-1]}
    return json.loads(child.stdout)


def main() -> None:
    """Reads a request from the standard input, writes what a contender takes to the output.

    A request: settings, experiment (as text), threads, sparsity, contender, variant. The answer:
    working_bytes, the peak above the resident size before the contender's first execution with
    input, weights and output in place, which includes what the execution leaves behind for the
    next; held_bytes, those of input, weights and output.
    """
    import torch

    from packedconv.bench.cpu_experiments import Prepared
    from packedconv.bench.experiment import load_experiment
    from packedconv.bench.extended.baseline_contenders import build
    from packedconv.layer import sparsity_key

    request = json.load(sys.stdin)
    experiment = load_experiment(request["experiment"])
    experiment = experiment._replace(sparsities=[request["sparsity"]])
    key = sparsity_key(request["sparsity"])
    # Executed first: it starts the threads and loads what is loaded on demand.
    small = experiment.layer._replace(batch=1, in_channels=8, out_channels=8, height=16, width=16)
    with torch.inference_mode():
        for layer in (small, experiment.layer):
            prepared = Prepared(
                request["settings"], experiment._replace(layer=layer), request["threads"]
            )
            out = torch.full(layer.output_shape, 0.0)
            built = build(
                request["contender"],
                request["variant"],
                layer,
                prepared.image,
                prepared.packed[key],
                out,
            )
            working = peak_bytes(built.contender.execute)
    if built.allocates_output:
        working = max(0, working - out.nbytes)
    held = prepared.image.nbytes + built.weight_bytes + out.nbytes
    json.dump({"working_bytes": working, "held_bytes": held}, sys.stdout)


def _status() -> dict[str, int]:
    """Sizes of this process in bytes."""
    text = pathlib.Path(_STATUS).read_text()
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.M)}


if __name__ == "__main__":
    main()
