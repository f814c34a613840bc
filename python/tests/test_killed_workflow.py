"""Measurements that are killed, started in two clones at once, or have to share the cores with the
workflow: nothing finished is lost, and nothing is disturbed."""

import hashlib
import json
import os
import signal
import subprocess
import time

import psutil
import pytest
from checkout import (
    LISTED_WARM,
    RUN,
    SLOW_EXECUTIONS,
    Checkout,
    layers_being_measured,
    wait_for,
)


def kill(process: subprocess.Popen, whole_group: bool) -> None:
    """Kill Snakemake alone, or with all that it started, and return once it has ended."""
    if whole_group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


@pytest.mark.parametrize("whole_group", [False, True], ids=["snakemake", "group"])
def test_kill_during_a_measurement(tmp_path, whole_group):
    checkout = Checkout(tmp_path / "packedconv", executions=SLOW_EXECUTIONS)
    bench = checkout.results / "bench"
    target = str((checkout.results / "samples.csv").relative_to(checkout.folder))
    process = checkout.start(target)

    def finished():
        return {path.stem for path in bench.glob("oc*.csv")}

    # The next layer at work means that the workflow has taken note of the first.
    wait_for(lambda: finished() and layers_being_measured(checkout.folder) - finished(), process)
    finished_layers = {path.name: path.read_bytes() for path in bench.glob("oc*.csv")}
    assert len(finished_layers) == 1
    kill(process, whole_group)

    assert checkout.run(target, "--unlock").returncode == 0
    done = checkout.run(target)
    assert done.returncode == 0, done.stdout
    for name, content in finished_layers.items():
        assert (bench / name).read_bytes() == content
    assert not layers_being_measured(checkout.folder)
    assert checkout.run(target, "-n").stdout.count("Nothing to be done") == 1
    check_complete(checkout)


def test_snakemake_leaves_the_cores_to_a_measurement(tmp_path):
    """While many jobs wait, and after many have ended."""
    checkout = Checkout(tmp_path / "packedconv", executions=SLOW_EXECUTIONS)
    process = checkout.start("all")
    wait_for(lambda: layers_being_measured(checkout.folder), process)
    workflow = psutil.Process(process.pid)
    try:
        (measuring,) = (
            child
            for child in workflow.children(recursive=True)
            if child.name().startswith("python") and "scripts/bench.py" in child.cmdline()
        )
        measuring.suspend()
        time.sleep(1)  # what it does once, after the start of a job
        before = workflow.cpu_times()
        time.sleep(5)
        after = workflow.cpu_times()
    finally:
        kill(process, whole_group=True)
    assert after.user + after.system - before.user - before.system < 0.2


@pytest.mark.parametrize("whole_group", [False, True], ids=["snakemake", "group"])
def test_kill_during_a_listed_measurement(tmp_path, whole_group):
    """A layer of the tables that was measured stays; the one at work is measured again."""
    checkout = Checkout(tmp_path / "packedconv", executions=SLOW_EXECUTIONS // 8)
    folder, script = checkout.results / "layers", "scripts/layers.py"
    targets = [str((folder / f"{name}.csv").relative_to(checkout.folder)) for name in LISTED_WARM]
    process = checkout.start(*targets)

    def finished():
        return {path.stem for path in folder.glob("[!.]*.csv")}

    wait_for(
        lambda: finished() and layers_being_measured(checkout.folder, script) - finished(), process
    )
    finished_layers = {path.name: path.read_bytes() for path in folder.glob("[!.]*.csv")}
    assert len(finished_layers) == 1
    kill(process, whole_group)

    assert checkout.run(*targets, "--unlock").returncode == 0
    done = checkout.run(*targets)
    assert done.returncode == 0, done.stdout
    for name, content in finished_layers.items():
        assert (folder / name).read_bytes() == content
    assert finished() == set(LISTED_WARM)
    assert not layers_being_measured(checkout.folder, script)
    assert checkout.run(*targets, "-n").stdout.count("Nothing to be done") == 1


def check_complete(checkout: Checkout) -> None:
    """The samples are whole, and none is left of a half-written file."""
    lines = (checkout.results / "samples.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 2 * 2 * SLOW_EXECUTIONS
    for path in checkout.results.glob("bench/oc*.json"):
        facts = json.loads(path.read_text())
        content = path.with_suffix(".csv").read_bytes()
        assert facts["samples_sha256"] == hashlib.sha256(content).hexdigest()


def test_two_clones_never_measure_at_once(tmp_path):
    checkouts = [
        Checkout(tmp_path / name, executions=SLOW_EXECUTIONS) for name in ("first", "second")
    ]
    target = f"results/cpu/{RUN}/samples.csv"
    processes = [checkout.start(target) for checkout in checkouts]
    for process in processes:
        assert process.wait() == 0
    facts = [
        json.loads(path.read_text())
        for checkout in checkouts
        for path in checkout.results.glob("bench/oc*.json")
    ]
    intervals = sorted((fact["before"]["monotonic"], fact["after"]["monotonic"]) for fact in facts)
    assert len(intervals) == 4
    for (_, ended), (started, _) in zip(intervals, intervals[1:], strict=False):
        assert ended <= started
