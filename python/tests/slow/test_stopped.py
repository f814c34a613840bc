"""The workflow is stopped at every stage, in every way, and called again.

Each time its script is held when a file is written and not yet named: what a stop at the worst
moment leaves. What was finished before stays as it is; what was at work is made again.
"""

import itertools
import os
import signal
import time
from typing import NamedTuple

import pytest
from checkout import RUN, Checkout, wait_for
from held import Hold, files, is_whole, processes_in, small_extended

RESULTS, FIGURES = f"results/cpu/{RUN}", f"figures/{RUN}"


class Stage(NamedTuple):
    """A rule: its script, held before the `file`-th of its outputs gets its name.

    same: whether the outputs are the same on every run.
    """

    script: str
    file: int
    outputs: tuple[str, ...]
    same: bool = True


def pair(stem):
    return f"{stem}.csv", f"{stem}.json"


def trio(stem):
    return f"{stem}.pdf", f"{stem}.png", f"{stem}.csv"


def table(stem):
    return f"{stem}.csv", f"{stem}.md", f"{stem}.tex"


STAGES = {
    "build": Stage("scripts/stamp.py", 1, ("build/extension.json",), same=False),
    "settings": Stage("scripts/settings.py", 1, (f"{RESULTS}/settings.json",)),
    "weights": Stage(
        "scripts/weights.py", 2, tuple(f"{RESULTS}/weights/oc8.{end}" for end in ("npz", "json"))
    ),
    "check": Stage("scripts/check.py", 1, (f"{RESULTS}/check/oc8.csv",)),
    "ceilings": Stage("scripts/ceilings.py", 2, pair(f"{RESULTS}/ceilings"), same=False),
    "bench": Stage("scripts/bench.py", 2, pair(f"{RESULTS}/bench/oc8"), same=False),
    "collect": Stage(
        "scripts/collect.py",
        2,
        tuple(f"{RESULTS}/{name}" for name in ("samples.csv", "errors.csv", "peaks.json")),
    ),
    "figure": Stage("scripts/fig5_speedup.py", 2, trio(f"{FIGURES}/cpu/fig5")),
    "claims": Stage("scripts/claims.py", 2, table(f"{FIGURES}/claims")),
    "layers": Stage("scripts/layers.py", 2, pair(f"{RESULTS}/layers/t_oc16_n2"), same=False),
    "ladder": Stage("scripts/ladder.py", 2, pair(f"{RESULTS}/ladder/t_oc8_n1"), same=False),
    "extended": Stage(
        "scripts/extended.py", 2, pair(f"{RESULTS}/crossover/t_crossover_oc8_n1"), same=False
    ),
    "numerics": Stage("scripts/numerics.py", 2, pair(f"{RESULTS}/numerics"), same=False),
}
WAYS = {
    "terminated": (signal.SIGTERM, False),
    "group-terminated": (signal.SIGTERM, True),
    "interrupted": (signal.SIGINT, True),
    "killed": (signal.SIGKILL, False),
    "group-killed": (signal.SIGKILL, True),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A checkout where all stages are done."""
    checkout = Checkout(tmp_path_factory.mktemp("finished") / "packedconv")
    small_extended(checkout)
    done = checkout.run(*(stage.outputs[0] for stage in STAGES.values()))
    assert done.returncode == 0, done.stdout
    return checkout


def wait_until_alone(checkout, seconds=120):
    deadline = time.monotonic() + seconds
    while processes_in(checkout.folder):
        assert time.monotonic() < deadline, f"still at work: {processes_in(checkout.folder)}"
        time.sleep(0.05)


def kept(checkout, stage):
    """Files that a stop at this stage has nothing to do with."""
    folders = (checkout.results, checkout.figures, checkout.folder / "build")
    outputs = {checkout.folder / name for name in stage.outputs}
    return {
        path: found
        for path, found in files(*folders).items()
        # Compiling begins anew, and how long jobs took changes.
        if path not in outputs and not {"times", "archive", "extension"} & {*path.parts}
    }


@pytest.mark.parametrize(
    ("name", "way"), itertools.product(STAGES, WAYS), ids=lambda value: str(value)
)
def test_stopped_and_called_again(finished, tmp_path, name, way):
    stage, (number, whole_group) = STAGES[name], WAYS[way]
    outputs = [finished.folder / output for output in stage.outputs]
    first = {path: path.read_bytes() for path in outputs}
    for path in outputs:
        path.unlink()
    before = kept(finished, stage)

    hold = Hold(tmp_path / "hold", stage.script, stage.file)
    process = hold.start(finished, *stage.outputs)
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    if number == signal.SIGTERM and not whole_group:
        # It finishes the job at work, and starts no other.
        log = finished.folder / "run.log"
        wait_for(lambda: "Will exit after finishing" in log.read_text(), process)
    elif whole_group:
        process.wait(timeout=60)
        assert process.returncode != 0
    hold.let_go()
    process.wait(timeout=60)
    wait_until_alone(finished)

    for path in outputs:
        assert not path.exists() or is_whole(path), f"{path} is half written"
    assert kept(finished, stage) == before
    text = (finished.folder / "run.log").read_text()
    assert "Traceback" not in text, text

    again = finished.run(*stage.outputs)
    if number == signal.SIGKILL:
        assert again.returncode != 0
        assert "unlock" in again.stdout
        unlocked = finished.run(*stage.outputs, "--unlock")
        assert unlocked.returncode == 0, unlocked.stdout
        again = finished.run(*stage.outputs)
    assert again.returncode == 0, again.stdout
    for path in outputs:
        assert is_whole(path)
        if stage.same:
            assert path.read_bytes() == first[path]
    assert kept(finished, stage) == before
    assert "Nothing to be done" in finished.run(*stage.outputs, "-n").stdout
