"""The machine is not the one that the results are of: nothing is mixed up, and nothing lost."""

import hashlib
import json
import os
import shutil
import subprocess

import pytest
from bundled import write_run
from checkout import RUN, wait_for
from held import TARGETS, Hold, copy_of, files, processes_in

from packedconv.bench.steps import keep_in_archive
from packedconv.device import devices
from packedconv.seal import sealed_text

SAMPLES = f"results/cpu/{RUN}/samples.csv"


@pytest.fixture
def checkout(measured_run, tmp_path):
    return copy_of(measured_run, tmp_path / "packedconv")


def remove(checkout, layer):
    """A layer has yet to be measured."""
    for name in (f"bench/{layer}.csv", f"bench/{layer}.json", "samples.csv"):
        (checkout.results / name).unlink()


@pytest.fixture
def no_gpu():
    if any(device.kind == "cuda" for device in devices()):
        pytest.skip("there is a GPU")


def test_a_gpu_that_is_not_there(checkout, no_gpu):
    """Named without results: a refusal before anything is measured."""
    before = files(checkout.results)
    done = checkout.run(f"figures/{RUN}/h200/fig5.pdf", "--config", "device=h200")
    assert done.returncode != 0
    assert "device: expected" in done.stdout
    assert "H200" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list((checkout.folder / "results" / "h200").rglob("*.csv"))
    assert files(checkout.results) == before


def test_a_gpu_that_is_gone_loses_no_measurement(checkout, no_gpu):
    """Results that this workflow measured on it, which is asked to measure them again.

    Snakemake removes what a job is to make before it starts, and the job fails.
    """
    folder = write_run(checkout.folder / "results", device="h200", run=RUN)
    measured = {}
    for name in ("ceilings", "bench/oc8", "bench/oc12"):
        paths = [folder / f"{name}.{suffix}" for suffix in ("json", "csv")]
        measured |= files(*{path.parent for path in paths})
        digest = hashlib.sha256(paths[1].read_bytes()).hexdigest()
        keep_in_archive([str(path) for path in paths], digest)
    (folder / "settings.json").unlink()
    targets = [f"figures/{RUN}/h200/fig5.pdf", f"results/h200/{RUN}/ceilings.csv"]
    done = checkout.run("--keep-going", *targets, "--config", "device=h200")
    assert done.returncode != 0
    assert "device: expected" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (folder / "ceilings.csv").exists()
    left = {found.digest for found in files(folder).values()}
    assert {
        found.digest
        for path, found in measured.items()
        if path.name.startswith("ceilings.") or path.parent.name == "bench"
    } <= left


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs, to take one away")
@pytest.mark.skipif(
    shutil.which("taskset") is None, reason="no taskset: apt-get install util-linux"
)
def test_a_cpu_that_is_gone(checkout):
    """Layers on two CPUs and one on one CPU are no run."""
    remove(checkout, "oc12")
    first = checkout.results / "bench" / "oc8.csv"
    before = first.read_bytes()
    one = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(
        ["taskset", "--cpu-list", one, *checkout.command(SAMPLES)],
        cwd=checkout.folder,
        env=checkout.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    assert "expected one" in text
    assert "measure the older layers again" in text
    assert first.read_bytes() == before
    assert not (checkout.folder / SAMPLES).exists()
    for path in (checkout.results / "bench").glob("oc12.*"):
        path.unlink()
    done = checkout.run(SAMPLES)
    assert done.returncode == 0, done.stdout


def test_a_layer_of_another_machine(checkout):
    path = checkout.results / "bench" / "oc12.json"
    facts = json.loads(path.read_text())
    facts["comparable"]["cpu"] = "Another CPU"
    path.write_text(sealed_text(facts))
    before = files(checkout.figures)
    done = checkout.run(*TARGETS)
    assert done.returncode != 0
    assert "expected one comparable for all layers" in done.stdout
    assert "Another CPU" in done.stdout
    assert "measure the older layers again" in done.stdout
    assert files(checkout.figures) == before


# Two at once.


def test_two_runs_in_one_folder(checkout, tmp_path):
    """The second is told to wait; the first goes on as if nothing had been."""
    remove(checkout, "oc12")
    hold = Hold(tmp_path / "hold", "scripts/bench.py", 1)
    first = hold.start(checkout, SAMPLES)
    second = checkout.run(SAMPLES)
    assert second.returncode != 0
    assert "unlock" in second.stdout
    assert "no other Snakemake process" in second.stdout
    hold.let_go()
    assert first.wait(timeout=120) == 0
    assert "Nothing to be done" in checkout.run(SAMPLES, "-n").stdout


def test_a_job_that_outlived_its_snakemake_is_waited_for(checkout, tmp_path):
    """The measurement goes on alone; a new run waits for it, and none overlaps."""
    remove(checkout, "oc12")
    hold = Hold(tmp_path / "hold", "scripts/bench.py", 1)
    first = hold.start(checkout, SAMPLES)
    first.kill()
    first.wait()
    assert processes_in(checkout.folder), "the job ended with Snakemake"
    assert checkout.run(SAMPLES, "--unlock").returncode == 0
    second = checkout.start(SAMPLES, log="second.log")
    log = checkout.folder / "second.log"
    holder = (tmp_path / "hold" / "at_work").read_text()
    wait_for(lambda: f"waiting for process {holder}" in log.read_text(), second)
    hold.let_go()
    assert second.wait(timeout=120) == 0, log.read_text()
    # Both measurements are kept, one as the run's.
    archive = checkout.results / "bench" / "archive"
    assert len(list(archive.glob("oc12-*.csv"))) >= 2
    facts = json.loads((checkout.results / "bench" / "oc12.json").read_text())
    assert facts["layer"]["out_channels"] == 12
    assert "Nothing to be done" in checkout.run(SAMPLES, "-n").stdout
