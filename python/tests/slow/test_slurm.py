"""Measuring on a Slurm cluster: a real one, of virtual nodes on this machine."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from checkout import RUN, SLOW_EXECUTIONS, Checkout, layers_being_measured
from virtual_slurm import CPUS, GPU, VirtualSlurm, missing

from packedconv.cluster import PLUGIN
from packedconv.device import cpu_title

REASON = missing() or (
    "" if importlib.util.find_spec(PLUGIN) else "no executor (envs/requirements-slurm.txt)"
)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

# A second device that this machine is: the same processor by the name that it reports.
SECOND = "cpu-by-name"
REQUESTS = f"""
common: {{runtime: 60, mem_mb: 1000}}
devices:
  cpu: {{partition: main, node: n1}}
  {SECOND}: {{partition: main, gres: "gpu:{GPU}:1"}}
  h200: {{partition: nowhere}}
"""
# Calls of the command; and what needs the device, of what the target `device` makes on a CPU.
STARTED: list[subprocess.Popen] = []
ON_DEVICE = {"check", "ceilings", "bench"}


class ClusterCheckout(Checkout):
    """A checkout whose measurements are jobs of a virtual cluster."""

    def __init__(self, folder, cluster, executions=2):
        super().__init__(folder, executions)
        self.cluster = cluster
        devices = folder / "config" / "devices"
        text = (devices / "cpu.yaml").read_text().replace("name: cpu\n", f"name: {SECOND}\n")
        assert SECOND in text
        (devices / f"{SECOND}.yaml").write_text(f'{text}\nmatch: "{cpu_title()}"\n')
        (folder / "profiles" / "slurm" / "devices.yaml").write_text(REQUESTS)

    def start_cluster(self, *arguments, log="cluster.out"):
        with open(self.folder / log, "w") as stream:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "packedconv.launch", "cluster", *arguments),
                    *("--slurm-init-seconds-before-status-checks", "2"),
                    *("--configfile", str(self.config)),
                ],
                cwd=self.folder,
                env={**self.cluster.environment(), "PYTHONPATH": str(self.folder / "python")},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        STARTED.append(process)
        return process

    def call(self, *arguments):
        """Exit status and output of a call of cluster."""
        status = self.start_cluster(*arguments).wait()
        return status, (self.folder / "cluster.out").read_text()

    def facts(self, device):
        folder = self.folder / "results" / device / RUN
        return [json.loads(path.read_text()) for path in sorted(folder.glob("bench/oc*.json"))]


def seconds(stamp):
    return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))


def rule_of(job):
    return re.fullmatch(r"rule_(\w+?)(_wildcards_.*)?", job["Comment"])[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    def stop(*_):
        raise KeyboardInterrupt

    # What ends the tests is to end the cluster and all that uses it, too.
    before = signal.signal(signal.SIGTERM, stop)
    started = VirtualSlurm(tmp_path_factory.mktemp("slurm"))
    yield started
    for process in STARTED:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    started.stop()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def measured(cluster, tmp_path_factory):
    """A checkout after one call for two devices that are there and one that Slurm rejects."""
    checkout = ClusterCheckout(tmp_path_factory.mktemp("measured") / "packedconv", cluster)
    checkout.status, checkout.said = checkout.call("--devices", "cpu", SECOND, "h200")
    checkout.jobs = cluster.jobs()
    return checkout


def test_a_rejected_device_is_named_in_the_words_of_slurm_and_the_rest_finish(measured):
    assert measured.status == 1, measured.said
    assert "[h200] rejected: sbatch: error: invalid partition specified: nowhere" in measured.said
    table = {line.split()[0]: line.split()[1:3] for line in measured.said.splitlines()[-9:] if line}
    assert table["cpu"] == table[SECOND] == [RUN, "done"]
    assert table["h200"] == [RUN, "rejected"]
    assert "h200: sbatch: error: invalid partition specified: nowhere" in measured.said
    assert not (measured.folder / "results" / "h200").exists()


def test_what_was_measured_is_rendered(measured):
    for device in ("cpu", SECOND):
        assert (measured.folder / "results" / device / RUN / "samples.csv").exists()
        for figure in ("fig2", "fig5", "fig6", "fig7", "fig8"):
            assert (measured.figures / device / f"{figure}.pdf").stat().st_size > 0
    # Of the first device: what is there once for a run.
    assert (measured.figures / "claims.md").stat().st_size > 0
    assert (measured.figures / "table5.md").stat().st_size > 0


def test_only_measuring_went_to_the_cluster(measured):
    by_rule = sorted(rule_of(job) for job in measured.jobs)
    assert by_rule == sorted(2 * ["ceilings", *2 * ["check"], *2 * ["bench"]])
    assert set(by_rule) == ON_DEVICE
    assert {job["JobState"] for job in measured.jobs} == {"COMPLETED"}


def test_jobs_had_a_node_for_themselves_and_never_overlapped_on_it(measured):
    nodes = {"cpu": "n1", SECOND: "n2"}
    spans = {}
    for device, node in nodes.items():
        jobs = [job for job in measured.jobs if f"packedconv-{device}-{RUN}_" in job["JobName"]]
        assert len(jobs) == 5
        for job in jobs:
            assert (job["NodeList"], job["ReqNodeList"]) == (node, node)
            assert job["OverSubscribe"] == "NO"
            assert job.get("TresPerNode") == (f"gres:gpu:{GPU}:1" if node == "n2" else None)
            assert (job["NumCPUs"], job["CPUs/Task"]) == (str(CPUS), str(CPUS))
        spans[device] = sorted((seconds(job["StartTime"]), seconds(job["EndTime"])) for job in jobs)
        for (_, ended), (started, _) in zip(spans[device], spans[device][1:], strict=False):
            assert ended <= started
        # A measurement had all CPUs of its node, whatever the threads of its rule are.
        assert {fact["machine"]["allowed_cpus"] for fact in measured.facts(device)} == {CPUS}
    # And the two devices were measured at the same time.
    first, second = spans.values()
    assert max(first[0][0], second[0][0]) < min(first[-1][1], second[-1][1])


def test_the_second_call_does_nothing(measured):
    status, said = measured.call("--devices", "cpu", SECOND)
    assert status == 0, said
    assert said.count("Nothing to be done") == 4  # the build, two devices, all
    assert len(measured.cluster.jobs()) == len(measured.jobs)


def test_results_of_the_cluster_are_up_to_date_without_it(measured):
    for device in ("cpu", SECOND):
        planned = measured.planned_rules("all", "--config", f"device={device}")
        assert not planned & {*ON_DEVICE, "weights", "collect", "device_figure", "build"}


def test_a_job_that_is_rejected_later_does_not_stop_the_rest(measured):
    status, said = measured.call(
        *("--devices", "cpu", "--config", "run=later"),
        *("--set-resources", "bench:slurm_partition='nowhere'"),
    )
    assert status == 1, said
    assert "cpu: sbatch: error: invalid partition specified: nowhere" in said
    results = measured.folder / "results" / "cpu" / "later"
    assert sorted(path.name for path in results.glob("check/*.csv")) == ["oc12.csv", "oc8.csv"]
    assert (results / "ceilings.csv").exists()
    assert not (results / "samples.csv").exists()


def test_a_run_stays_on_its_node(measured):
    path = measured.folder / "profiles" / "slurm" / "devices.yaml"
    path.write_text(REQUESTS.replace("node: n1", "node: n2"))
    try:
        status, said = measured.call("--devices", "cpu")
    finally:
        path.write_text(REQUESTS)
    assert status == 1
    assert f"expected node n1, on which run {RUN} began, got node n2" in said


def wait_for(condition, process, limit=1200):
    deadline = time.monotonic() + limit
    while not condition():
        assert process.poll() is None, "the call ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_cancelled_jobs_are_repeated_and_finished_ones_kept(cluster, tmp_path):
    checkout = ClusterCheckout(tmp_path / "packedconv", cluster, executions=SLOW_EXECUTIONS)
    bench = checkout.results / "bench"

    def finished():
        return {path.stem for path in bench.glob("oc*.csv")}

    def at_work():
        return {
            job["JobId"]
            for job in cluster.jobs()
            if job["JobState"] == "RUNNING" and rule_of(job) == "bench"
        }

    # A job is cancelled at work.
    process = checkout.start_cluster("--devices", "cpu")
    wait_for(lambda: finished() and layers_being_measured(checkout.folder) - finished(), process)
    kept = {path.name: path.read_bytes() for path in bench.glob("oc*.csv")}
    assert len(kept) == 1
    (job,) = at_work()
    cluster.ask("scancel", job)
    assert process.wait() == 1
    said = (checkout.folder / "cluster.out").read_text()
    assert f"cpu: SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in said
    assert {path.name: path.read_bytes() for path in bench.glob("oc*.csv")} == kept

    # The call itself is asked to end: it takes its job along.
    process = checkout.start_cluster("--devices", "cpu")
    wait_for(at_work, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    assert cluster.ask("squeue", "--noheader", "--states=PENDING,RUNNING").stdout == ""
    assert {path.name: path.read_bytes() for path in bench.glob("oc*.csv")} == kept

    # The call dies: what it left in the queue is named, and not measured beside.
    process = checkout.start_cluster("--devices", "cpu")
    wait_for(at_work, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (job,) = at_work()
    status, said = checkout.call("--devices", "cpu")
    assert status == 1
    assert "[cpu] rejected: jobs of an earlier call are still in the queue" in said
    assert f"scancel {job}" in said
    cluster.ask("scancel", job)
    deadline = time.monotonic() + 60
    while cluster.ask("squeue", "--noheader").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)

    status, said = checkout.call("--devices", "cpu")
    assert status == 0, said
    assert {name: (bench / name).read_bytes() for name in kept} == kept
    assert finished() == {"oc8", "oc12"}
    assert (checkout.figures / "claims.md").exists()
