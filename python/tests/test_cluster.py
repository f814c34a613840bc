"""Several devices of a cluster: requests, nodes and the call, with stand-ins for Slurm's commands.

A real Slurm is in slow/test_slurm.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from packedconv import cluster, slurm
from packedconv.config import device_names

ROOT = Path(__file__).parents[2]
PROFILE = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
NODE = "NodeName=n1 CPUAlloc=0 CPUTot=128 State=IDLE"
STARTS = "sbatch: Job 7 to start at 2026-01-01T00:00:00 using 1 processors on nodes {} in partition"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts stand-ins for commands of Slurm into PATH; each prints a text and ends as it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def put(name, text, status=0):
        path = folder / name
        path.write_text(f"#!/bin/sh\necho \"$@\" >>{folder}/calls\ncat <<'END'\n{text}\nEND\n")
        with path.open("a") as stream:
            stream.write(f"exit {status}\n")
        path.chmod(0o755)
        return folder / "calls"

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in slurm.COMMANDS:
        put(name, "")
    return put


def requests(tmp_path, text):
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    return slurm.load_requests(path, ROOT)


def test_a_device_has_what_is_common_and_its_own(tmp_path):
    found = requests(
        tmp_path,
        "common: {account: a, runtime: 30}\ndevices: {cpu: , h200: {runtime: 90, gres: 'gpu:1'}}",
    )
    assert found["cpu"] == {**slurm.DEFAULTS, "account": "a", "runtime": 30}
    assert found["h200"] == {**slurm.DEFAULTS, "account": "a", "runtime": 90, "gres": "gpu:1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: {cpu: {partitions: p}}", "partitions"),
        ("devices: {cpu: {gres: 'gpu:a b'}}", "gpu:a b"),
        ("devices: {cpu: {node: 'n[1-2]'}}", "node"),
        ("devices: {}", "devices"),
        ("device: {}", "devices"),
        ("devices: [", "expected YAML"),
    ],
)
def test_a_wrong_file_is_one_clear_message(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        requests(tmp_path, text)


def test_no_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match=r"cp profiles/slurm/devices\.example\.yaml"):
        slurm.load_requests(tmp_path / "devices.yaml", ROOT)


def test_the_example_is_valid_and_names_devices_that_there_are():
    found = slurm.load_requests(ROOT / "profiles/slurm/devices.example.yaml", ROOT)
    assert set(found) <= set(device_names(ROOT))


def test_the_profile_asks_for_what_a_request_without_words_asks_for():
    wanted = slurm.resources(slurm.DEFAULTS, "n1", 1)
    stated = dict(PROFILE["default-resources"])
    assert stated.pop("cpus_per_task") == -1
    assert stated.pop("slurm_extra") + " --nodelist=n1" == f"'{wanted['slurm_extra']}".replace(
        " --nodelist", "' --nodelist"
    )
    assert stated == {key: wanted[key] for key in stated}


REQUEST = {
    **slurm.DEFAULTS,
    **{"account": "a", "partition": "p", "qos": "q", "constraint": "x&y", "gres": "gpu:h200:1"},
    **{"runtime": 5, "mem_mb": 10, "options": "--reservation=r"},
}


def test_sbatch_and_snakemake_are_asked_for_the_same():
    """Every option of sbatch is among those that the executor makes of the resources."""
    submit = pytest.importorskip("snakemake_executor_plugin_slurm.submit_string")
    utils = pytest.importorskip("snakemake_executor_plugin_slurm.utils")
    validation = pytest.importorskip("snakemake_executor_plugin_slurm.validation")
    wanted = slurm.resources(REQUEST, "gpu-c", 8)

    class Resources(dict):
        __getattr__ = dict.__getitem__

    class Job:
        resources = Resources(wanted)
        threads = 1_000_000

    validation.validate_slurm_extra(Job)
    values = dict.fromkeys(("run_uuid", "slurm_logfile", "comment_str", "workdir"), "x")
    values |= {"account": "-A a", "partition": "-p p"}
    line = submit.get_submit_command(Job, values) + utils.set_gres_string(Job)
    longer = {"-A ": "--account=", "-p ": "--partition=", "-C ": "--constraint=", "-t ": "--time="}
    for short, long in {**longer, "--mem ": "--mem="}.items():
        line = line.replace(f" {short}", f" {long}")
    submitted = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {line}"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    tested = slurm.sbatch_options(REQUEST, "gpu-c", 8)
    # A GPU's job has one task without being asked.
    assert set(tested) - {"--ntasks=1"} <= set(submitted)
    assert "1000000" not in line


def test_resources_are_expressions_of_snakemake():
    arguments = slurm.resource_arguments({"slurm_partition": "p", "runtime": 5})
    assert arguments == ["slurm_partition='p'", "runtime=5"]


def test_jobs_are_alone_on_their_node_unless_told():
    assert "--exclusive" in slurm.sbatch_options(slurm.DEFAULTS, "n1", None)
    shared = slurm.sbatch_options({**slurm.DEFAULTS, "exclusive": False}, "n1", None)
    assert "--exclusive" not in shared
    assert "--dependency=singleton" in shared
    # The executor takes "-c " for an option of its own, also at the end of a node's name.
    assert shared[-1] == "--nodelist=n1"


def test_the_node_is_the_one_that_slurm_names(commands):
    calls = commands("sbatch", STARTS.format("n3"))
    assert slurm.node_for(REQUEST) == "n3"
    assert "--test-only" in calls.read_text()
    assert "--nodelist" not in calls.read_text()
    commands("scontrol", NODE)
    assert slurm.cpus_of("n1") == 128
    commands("scontrol", NODE.replace("CPUTot", "CPUEfctv=126 CPUTot"))
    assert slurm.cpus_of("n1") == 126


def test_a_rejection_has_the_words_of_slurm(commands):
    commands("sbatch", "allocation failure: Invalid account", status=1)
    with pytest.raises(slurm.SlurmError, match="allocation failure: Invalid account"):
        slurm.node_for(REQUEST)


def test_jobs_of_another_folder_or_device_are_not_ours(commands, tmp_path):
    rows = [f"7|packedconv-cpu-paper_1|{tmp_path}", "8|packedconv-cpu-paper_2|elsewhere"]
    rows += [f"9|packedconv-h200-paper_1|{tmp_path}", f"10|packedconv-cpu-paper2_1|{tmp_path}"]
    commands("squeue", "\n".join(rows))
    assert slurm.jobs_of("packedconv-cpu-paper", tmp_path) == ["7"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["--config", "device=h200"]),
        (["-n"], ["-n", "--config", "device=h200"]),
        (["--config", "seed=2", "-n"], ["--config", "device=h200", "seed=2", "-n"]),
        (["-C", "seed=2"], ["-C", "device=h200", "seed=2"]),
        (["--config=seed=2", "-n"], ["--config", "device=h200", "seed=2", "-n"]),
    ],
)
def test_the_device_joins_the_configuration_of_the_call(arguments, expected):
    assert cluster.with_device("h200", arguments) == expected


# Stands for Snakemake: what it does depends on the device, and it waits for a Ctrl-C when told.
FAKE_SNAKEMAKE = """
import os, sys, time
target = sys.argv[1]
device = [word[7:] for word in sys.argv if word.startswith("device=")][-1]
with open("calls", "a") as stream:
    stream.write(" ".join(sys.argv[1:]) + chr(10))
if target == "device" and device == "tegra-x1":
    print("SLURM sbatch failed. The error message was 'sbatch: error: QOSMaxSubmitJob'.")
    sys.exit(1)
if os.path.exists(f"wait-{device}-{target}"):
    try:
        open(f"{device}-{target}", "w").close()
        while os.path.exists(f"wait-{device}-{target}"):
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("Terminating processes on user request")
        sys.exit(1)
"""
CODE = """
import sys
from packedconv import cluster
cluster.SNAKEMAKE = (sys.executable, "fake.py")
cluster.PLUGIN = "yaml"
sys.exit(cluster.main(["--requests", "devices.yaml", "--devices", "cpu", "h200", *sys.argv[1:]]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, commands):
    """A checkout with a stand-in for Snakemake, and a cluster that takes every job."""
    commands("sbatch", STARTS.format("n3"))
    commands("scontrol", NODE)
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / "fake.py").write_text(FAKE_SNAKEMAKE)
    (tmp_path / "devices.yaml").write_text("devices: {cpu: , h200: , tegra-x1: }")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "SNAKEMAKE", (sys.executable, "fake.py"))
    monkeypatch.setattr(cluster, "PLUGIN", "yaml")
    return tmp_path


def call(*arguments):
    return cluster.main(["--requests", "devices.yaml", *arguments])


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def test_devices_are_built_once_measured_each_and_rendered_once(folder, capfd):
    assert call("--devices", "h200", "cpu", "--config", "seed=2") == 0
    build, first, second, rendered = calls(folder)
    assert build.startswith("build ")
    assert {line.split()[0] for line in (first, second)} == {"device"}
    for device, line in zip(["cpu", "h200"], sorted([first, second], key=len), strict=True):
        assert f"--config device={device} seed=2 " in line
        assert "--nolock" in line
        assert f"--slurm-jobname-prefix packedconv-{device}-seed2 " in line
        assert "cpus_per_task=128" in line
        assert "--nodelist=n3'" in line
    # With the lock of the folder, and of the device that was named first.
    assert rendered.startswith("all --workflow-profile profiles/slurm --config device=h200 ")
    assert "--nolock" not in rendered
    assert "done" in capfd.readouterr().out


def test_a_device_that_fails_does_not_stop_the_others(folder, capfd):
    assert call() == 1
    assert [line.split()[0] for line in calls(folder)][-1] == "all"
    said = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[2] for line in said.splitlines() if "  paper  " in line}
    assert rows == {"cpu": "done", "h200": "done", "tegra-x1": "failed"}
    assert "tegra-x1: sbatch: error: QOSMaxSubmitJob" in said
    assert "QOSMaxSubmitJob" in (folder / "logs/tegra-x1/paper/cluster.log").read_text()


def test_nothing_is_rendered_where_nothing_was_measured(folder, commands, capfd):
    commands("sbatch", "sbatch: error: invalid partition specified: p", status=1)
    assert call("--devices", "cpu") == 1
    assert [line.split()[0] for line in calls(folder)] == ["build"]
    assert "cpu: sbatch: error: invalid partition specified: p" in capfd.readouterr().out


def test_a_dry_run_leaves_nothing(folder):
    assert call("--devices", "cpu", "-n") == 0
    assert [line.split()[0] for line in calls(folder)] == ["build", "device"]
    assert not (folder / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "a100"], "devices: expected some of cpu, h200, tegra-x1"),
        (["--config", "sed=2"], "'sed' was unexpected"),
        (["--requests", "none.yaml"], "found no file"),
    ],
)
def test_a_wrong_call_runs_nothing(folder, capsys, arguments, message):
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("artifact: error: ")
    assert message in error
    assert not (folder / "calls").exists()


def test_without_the_executor_it_says_what_installs_it(folder, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "PLUGIN", "no_such_module")
    assert call() == 2
    assert "pip install -r envs/requirements-slurm.txt" in capsys.readouterr().err


def test_without_slurm_it_says_where_to_call_it(folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(folder))
    assert call() == 2
    assert "a login node" in capsys.readouterr().err


def test_a_locked_folder_is_left_alone(folder, capsys):
    (folder / ".snakemake/locks").mkdir(parents=True)
    (folder / ".snakemake/locks/0.output.lock").touch()
    assert call("--devices", "cpu") == 2
    assert "scripts/artifact --unlock" in capsys.readouterr().err


def begun(folder, *stages, options=()):
    """A call for two devices, which is in these stages: <device>-<target>, each of which waits."""
    for stage in stages:
        (folder / f"wait-{stage}").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    wait_until(lambda: all((folder / stage).exists() for stage in stages))
    assert process.poll() is None
    return process


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stand_ins(folder):
    """Processes that stand for Snakemake in a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "fake.py" in process.cmdline() and os.path.samefile(process.cwd(), folder):
                found.append(process)
    return found


def test_an_interrupt_of_the_call_alone_stops_nothing(folder):
    process = begun(folder, "cpu-device", "h200-device")
    process.send_signal(signal.SIGINT)
    for stage in ("cpu-device", "h200-device"):
        (folder / f"wait-{stage}").unlink()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert calls(folder)[-1].split()[0] == "all"


def test_an_interrupt_ends_a_dry_run_with_the_device_at_work(folder):
    process = begun(folder, "cpu-device", options=["-n"])
    process.send_signal(signal.SIGINT)
    (stand_in,) = stand_ins(folder)
    stand_in.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert [line.split()[0] for line in calls(folder)] == ["build", "device"]


def test_two_calls_in_a_folder_do_not_meet_and_a_signal_reaches_all(folder, capsys):
    process = begun(folder, "cpu-device", "h200-device")
    assert call("--devices", "tegra-x1") == 2
    assert "found one at work" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 1
    assert said.count("Terminating processes on user request") == 2


def test_after_a_signal_nothing_is_rendered(folder):
    """Also where a device was done before."""
    process = begun(folder, "h200-device")
    wait_until(lambda: len(calls(folder)) == 3 and len(stand_ins(folder)) == 1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 1
    assert re.search(r"^cpu +paper +done ", said, re.MULTILINE)
    assert "was not rendered" in said
    assert [line.split()[0] for line in calls(folder)] == ["build", "device", "device"]


@pytest.mark.parametrize("stage", ["cpu-build", "cpu-all"])
def test_a_signal_reaches_what_is_not_of_one_device(folder, stage):
    process = begun(folder, stage)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate()
    assert process.returncode != 0
    assert time.monotonic() - began < 30
    assert calls(folder)[-1].split()[0] == stage.partition("-")[2]


def test_a_kill_leaves_the_folder_locked_while_devices_are_at_work(folder, capsys):
    process = begun(folder, "cpu-device", "h200-device")
    process.kill()
    process.wait()
    assert call("--devices", "tegra-x1") == 2
    said = capsys.readouterr().err
    assert "found one at work" in said
    left = stand_ins(folder)
    assert len(left) == 2
    assert all(str(stand_in.pid) in said for stand_in in left)
    for stand_in in left:
        stand_in.kill()
    process.stdout.close()
    for stage in ("cpu-device", "h200-device"):
        (folder / f"wait-{stage}").unlink()
    wait_until(lambda: call("--devices", "cpu") == 0)


def test_a_log_that_cannot_be_written_is_a_reason(folder, capfd):
    (folder / "logs/cpu/paper/cluster.log").mkdir(parents=True)
    assert call("--devices", "cpu", "h200") == 1
    said = capfd.readouterr().out
    assert "cpu: [Errno 21] Is a directory: 'logs/cpu/paper/cluster.log'" in said
    assert re.search(r"^h200 +paper +done ", said, re.MULTILINE)


def test_a_folder_of_logs_that_cannot_be_made_is_a_reason(folder, capfd):
    (folder / "logs").mkdir()
    (folder / "logs/cpu").touch()
    assert call("--devices", "cpu", "h200") == 1
    said = capfd.readouterr().out
    assert re.search(r"^cpu: \[Errno \d+\] .*logs/cpu", said, re.MULTILINE)
    assert re.search(r"^h200 +paper +done ", said, re.MULTILINE)


def test_a_node_that_cannot_be_read_is_no_other_node(folder, capfd):
    results, node = (folder / name for name in ("results/cpu/paper", "logs/cpu/paper"))
    results.mkdir(parents=True)
    (results / "ceilings.csv").touch()
    node.mkdir(parents=True)
    (node / "slurm-node.json").write_text("{")
    assert call("--devices", "cpu", "h200") == 1
    said = capfd.readouterr().out
    assert "slurm-node.json: expected the node that run paper began on" in said
    assert re.search(r"^h200 +paper +done ", said, re.MULTILINE)


@pytest.mark.parametrize("measured", ["bench/oc8.csv", "ceilings.csv"])
def test_a_run_stays_on_its_node_also_without_its_settings(folder, commands, measured, capfd):
    assert call("--devices", "cpu") == 0
    path = folder / "results/cpu/paper" / measured
    path.parent.mkdir(parents=True)
    path.touch()
    (folder / "devices.yaml").write_text("devices: {cpu: {node: n4}}")
    assert call("--devices", "cpu") == 1
    assert "expected node n3, on which run paper began, got node n4" in capfd.readouterr().out


# Prints which rules a profile for a cluster would submit.
SUBMITTED = """
import json
from pathlib import Path
from snakemake.api import SnakemakeApi
from snakemake.settings.types import OutputSettings, ResourceSettings

with SnakemakeApi(OutputSettings()) as api:
    resources = ResourceSettings(cores=1)
    workflow = api.workflow(resource_settings=resources, snakefile=Path("Snakefile"))._workflow
    local = {rule.name: rule.name in workflow._localrules for rule in workflow.rules}
    print(json.dumps(local))
"""


def test_only_what_needs_the_device_leaves_this_machine():
    done = subprocess.run(
        [sys.executable, "-c", SUBMITTED], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    local = json.loads(done.stdout.splitlines()[-1])
    assert {name for name in local if not local[name]} == {
        *("check", "ceilings", "bench", "ablation", "fixed_cost", "peers_layer"),
        *("listed_layer", "listed_ladder", "beyond_layer", "numerics", "digits"),
    }
    assert {"build", "collect", "panel"} <= {name for name in local if local[name]}
