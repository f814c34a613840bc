"""The workflow is stopped at every stage, in every way, and called again.

Each time its script is held when a file is written and not yet named: what a stop at the worst
moment leaves. What was finished before stays as it is; what was at work is made again.
"""

import hashlib
import json
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
    return f"{stem}.csv", f"{stem}.md", f"{stem}.tex", f"{stem}.html"


STAGES = {
    "build": Stage("scripts/stamp.py", 1, ("build/extension.json",)),
    "settings": Stage("scripts/settings.py", 1, (f"{RESULTS}/settings.json",)),
    "weights": Stage(
        "scripts/weights.py", 2, tuple(f"{RESULTS}/weights/oc8.{end}" for end in ("npz", "json"))
    ),
    "check": Stage("scripts/check.py", 2, pair(f"{RESULTS}/check/oc8"), same=False),
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
    "digits": Stage(
        "scripts/digits.py", 2, (f"{RESULTS}/digits.npz", f"{RESULTS}/digits.json"), same=False
    ),
    "bundle": Stage("scripts/bundle.py", 1, (f"bundles/cpu-{RUN}.tar.gz",)),
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
    """A checkout where all stages are done, but for the build, which it has from elsewhere."""
    checkout = Checkout(tmp_path_factory.mktemp("finished") / "packedconv")
    small_extended(checkout)
    done = checkout.run(*(stage.outputs[0] for stage in list(STAGES.values())[1:]))
    assert done.returncode == 0, done.stdout
    return checkout


def unbuilt(folder):
    """A checkout that builds for the CPU alone, which takes half a minute."""
    checkout = Checkout(folder)
    lists = folder / "csrc" / "CMakeLists.txt"
    text = lists.read_text()
    lists.write_text(text.replace("set(PACKEDCONV_CUDA AUTO", "set(PACKEDCONV_CUDA OFF"))
    assert lists.read_text() != text
    return checkout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    checkout = unbuilt(tmp_path_factory.mktemp("built") / "packedconv")
    done = checkout.run("build")
    assert done.returncode == 0, done.stdout
    return checkout


def wait_until_alone(checkout, seconds=120):
    deadline = time.monotonic() + seconds
    while processes_in(checkout.folder):
        assert time.monotonic() < deadline, f"still at work: {processes_in(checkout.folder)}"
        time.sleep(0.05)


def kept(checkout, stage):
    """Files that a stop at this stage has nothing to do with."""
    outputs = {checkout.folder / name for name in stage.outputs}
    return {
        path: found
        for path, found in files(checkout.results, checkout.figures).items()
        # How long jobs took changes, and an archive grows.
        if path not in outputs and not {"times", "archive"} & {*path.parts}
    }


def stop(checkout, hold, process, number, whole_group):
    """Send the signal, and return once nothing of the workflow is at work."""
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    if number == signal.SIGTERM and not whole_group:
        # It finishes the job at work, and starts no other.
        log = checkout.folder / "run.log"
        wait_for(lambda: "Will exit after finishing" in log.read_text(), process)
    elif whole_group:
        assert process.wait(timeout=60) != 0
    hold.let_go()
    process.wait(timeout=60)
    wait_until_alone(checkout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STAGES)
def test_stopped_and_called_again(request, tmp_path, name, way):
    checkout = request.getfixturevalue("built" if name == "build" else "finished")
    stage, (number, whole_group) = STAGES[name], WAYS[way]
    outputs = [checkout.folder / output for output in stage.outputs]
    if stage.same:
        # Other stages may have been measured again.
        done = checkout.run(*stage.outputs)
        assert done.returncode == 0, done.stdout
    first = {path: path.read_bytes() for path in outputs}
    before = kept(checkout, stage)
    for path in outputs:
        path.unlink()

    hold = Hold(tmp_path / "hold", stage.script, stage.file)
    process = hold.start(checkout, *stage.outputs)
    try:
        stop(checkout, hold, process, number, whole_group)
        for path in outputs:
            assert not path.exists() or is_whole(path), f"{path} is half written"
        assert kept(checkout, stage) == before
        text = (checkout.folder / "run.log").read_text()
        assert "Traceback" not in text, text
    finally:
        # Other tests go on with this checkout.
        hold.let_go()
        again = last = checkout.run(*stage.outputs)
        if again.returncode:
            checkout.run(*stage.outputs, "--unlock")
            last = checkout.run(*stage.outputs)

    assert last.returncode == 0, last.stdout
    if number == signal.SIGKILL:
        assert again.returncode != 0
        assert "unlock" in again.stdout
    else:
        assert again.returncode == 0, again.stdout
    for path in outputs:
        assert is_whole(path)
        if stage.same:
            assert path.read_bytes() == first[path]
    assert kept(checkout, stage) == before
    assert "Nothing to be done" in checkout.run(*stage.outputs, "-n").stdout


def test_killed_while_compiling(tmp_path):
    """What was compiled is not compiled again, and the module is the one that is stamped."""
    checkout = unbuilt(tmp_path / "packedconv")
    process = checkout.start("build")
    folder = checkout.folder / "build" / "extension"

    def compiled():
        """Objects that are whole, as ninja records them."""
        log = folder / ".ninja_log"
        lines = log.read_text().splitlines() if log.exists() else []
        fields = [line.split("\t") for line in lines]
        paths = {folder / field[3] for field in fields if len(field) == 5}
        return {path: path.stat().st_mtime_ns for path in paths if path.suffix == ".o"}

    wait_for(compiled, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_alone(checkout)
    assert not (checkout.folder / "build" / "extension.json").exists()
    before = compiled()

    assert checkout.run("build", "--unlock").returncode == 0
    done = checkout.run("build")
    assert done.returncode == 0, done.stdout
    after = compiled()
    assert len(after) > len(before)
    assert {path: after[path] for path in before} == before
    (module,) = (checkout.folder / "python" / "packedconv").glob("_core.*.so")
    stamp = json.loads((checkout.folder / "build" / "extension.json").read_text())
    assert stamp["sha256"] == hashlib.sha256(module.read_bytes()).hexdigest()
    assert stamp["cuda"] is None
