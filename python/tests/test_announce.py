"""What is said before a run starts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundled import write_run
from snakemake.cli import parse_config
from snakemake.utils import update_config

from packedconv import announce, bundle
from packedconv import config as configuration
from packedconv.device import DeviceError

ROOT = Path(__file__).parents[2]
SMOKE = ["config/smoke.yaml"]


def settings(*arguments, files=()):
    return configuration.resolve(announce.merged_config(files, arguments, ROOT), ROOT)


def test_default_run():
    assert settings()["run"] == "paper"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "seed=2"],
        ["-n", "--config", "seed=2", "--quiet"],
        ["-C", "seed=2"],
        ["--config", "seed=3", "--cores", "2", "--config", "seed=2"],
    ],
)
def test_config_on_the_command_line(arguments):
    assert settings(*arguments)["run"] == "seed2"
    assert settings(*arguments)["seed"] == 2


def test_configuration_files_merge_key_by_key(tmp_path):
    extra = tmp_path / "extra.yaml"
    extra.write_text("run: few\nprotocol: {rounds: 2}\n")
    found = settings("--configfile", str(extra))
    assert found["protocol"] == {**settings()["protocol"], "rounds": 2}
    assert settings("--config", "seed=7", files=SMOKE)["run"] == "smoke"


@pytest.mark.parametrize(
    "entry",
    [
        "seed=2",
        "seed=2.5",
        "run=few",
        "run=",
        "run=null",
        "key=True",
        "key=[0.90, x]",
        "key={b: 1}",
    ],
)
def test_values_are_read_as_snakemake_reads_them(entry):
    merged = announce.merged_config([], ["--config", entry], ROOT)
    base = announce.merged_config([], [], ROOT)
    update_config(base, parse_config([entry]))
    assert merged == base


def test_what_the_workflow_refuses_is_refused():
    with pytest.raises(ValueError, match="sead"):
        announce.plan([], ["--config", "sead=2"], ROOT)


def test_work_grows_with_the_protocol():
    base = settings()
    double = json.loads(json.dumps(base))
    double["protocol"].update(rounds=2 * base["protocol"]["rounds"], warmup_executions=0)
    base["protocol"]["warmup_executions"] = 0
    assert announce.work(double) == 2 * announce.work(base)
    assert announce.work(settings(files=SMOKE)) < announce.work(base) / 100


def test_rough_speed():
    assert 1e8 < announce.matrix_rate() < 1e14


def store(root, name, benchmark, found):
    folder = root / "results" / "cpu" / name
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(found))
    (folder / "steps.csv").write_text(f"step,seconds\ncompilation,40\nbenchmark,{benchmark}\n")


def test_an_earlier_run_gives_the_estimate(tmp_path):
    found = settings()
    assert announce.stored_seconds(found, tmp_path) is None
    store(tmp_path, "paper", 400, found)
    assert announce.stored_seconds(found, tmp_path) == pytest.approx(400)
    half = {**found, "layers": found["layers"][:3]}
    assert announce.stored_seconds(half, tmp_path) < 300


def test_an_imported_run_gives_no_estimate(tmp_path):
    store(tmp_path, "theirs", 400, settings())
    (tmp_path / "results/cpu/theirs/origin.json").write_text("{}")
    assert announce.stored_seconds(settings(), tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "few.yaml: No such file or directory; paths are relative to"),
        ("- run\n", "few.yaml: expected a mapping of keys to values, got list"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, message):
    path = tmp_path / "few.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        announce.merged_config([str(path)], [], ROOT)


def test_a_small_run_does_not_give_the_estimate_of_a_large_one(tmp_path):
    store(tmp_path, "smoke", 30, settings(files=SMOKE))
    assert announce.stored_seconds(settings(), tmp_path) is None


def test_damaged_results_do_not_stop_the_announcement(tmp_path):
    store(tmp_path, "paper", "soon", settings())
    assert announce.stored_seconds(settings(), tmp_path) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "under 1 min"), (50, "about 1 min"), (800, "about 13 min")]
)
def test_about(seconds, text):
    assert announce.about(seconds) == text


@pytest.fixture(scope="module")
def plan():
    return announce.plan(SMOKE, [], ROOT)


def test_description(plan):
    text = announce.describe(plan)
    for expected in ("Run smoke on device cpu, seed 1", "compilation", "benchmark", "analysis"):
        assert expected in text
    assert "2 layers, 3 sparsities, 3 rounds of 5 executions" in text
    assert "theory.table1" in text
    assert "a100.trend.speedup" in text
    assert "GB disk free" in text
    assert max(len(line) for line in text.splitlines()) <= 160


def test_statements_are_told_apart(plan):
    """A CPU decides the theory, and statements on the A100 at most in analogy."""
    assert set(plan.decidable.values()) <= set(announce.ANSWERS)
    assert plan.decidable["theory.table1"] == "decidable"
    # The smoke run has other layers and fewer executions than any statement is about.
    assert plan.decidable["a100.trend.speedup"] == "not"
    full = announce.plan([], [], ROOT)
    assert full.decidable["a100.trend.speedup"] == "analogue"
    assert full.decidable["nano.trend.speedup"] == "not"
    text = announce.describe(plan)
    for identity in plan.decidable:
        assert len(re.findall(rf"{re.escape(identity)}(?![.\w-])", text)) == 1


def test_busy_machine(plan):
    idle = plan._replace(machine=plan.machine._replace(in_use=0.05))
    busy = plan._replace(machine=plan.machine._replace(in_use=0.5))
    assert "busy" not in announce.describe(idle)
    assert "busy" in announce.describe(busy)


def test_a_measurement_that_this_run_waits_for(plan):
    assert "process 4242 measures" not in announce.describe(plan)
    waiting = announce.describe(plan._replace(holder=4242))
    assert "process 4242 measures on this device; measuring here waits" in waiting


GPU = ["--config", "device=a100-sxm4-40gb"]


@pytest.fixture(scope="module")
def gpu_plan():
    return announce.plan([], GPU, ROOT)


def test_contenders_of_a_gpu():
    assert "contenders" not in settings()
    assert settings(*GPU)["contenders"] == "all"
    assert settings(*GPU)["run"] == "paper"
    protocol = settings(*GPU, "contenders=paper-protocol")
    assert protocol["contenders"] == protocol["run"] == "paper-protocol"
    assert settings(*GPU, "contenders=paper-protocol", "run=mine")["run"] == "mine"
    with pytest.raises(ValueError, match="run: expected a name, since contenders, seed differ"):
        settings(*GPU, "contenders=paper-protocol", "seed=2")
    with pytest.raises(ValueError, match=r"contenders: expected all for device cpu, .* got paper"):
        settings("--config", "contenders=paper-protocol")


def test_work_on_a_gpu_grows_with_its_contenders():
    everything, protocol = settings(*GPU), settings(*GPU, "contenders=paper-protocol")
    assert announce.work(everything) / announce.work(protocol) == pytest.approx(7 / 2)
    assert announce.starting(everything) > announce.starting(protocol)
    # However fast a GPU is, a pair of events takes its time.
    blocks = 10 * 9 * 2 * 6
    assert announce.benchmark_seconds(protocol, 1e30) == pytest.approx(
        blocks * (0.02 + 40 * 0.002) + announce.starting(protocol)
    )


def test_description_of_a_gpu(gpu_plan):
    text = announce.describe(gpu_plan)
    assert "Run paper on device a100-sxm4-40gb" in text
    assert "two sparse kernels against PyTorch's default, FP32, TF32, FP16" in text
    assert gpu_plan.decidable["a100.trend.speedup"] == "decidable"
    assert gpu_plan.decidable["nano.trend.speedup"] == "not"
    assert "figures/a100-sxm4-40gb/contenders.md" in announce.where_to_look(gpu_plan)
    protocol = announce.plan([], [*GPU, "contenders=paper-protocol"], ROOT)
    assert "nothing else" in announce.describe(protocol)
    assert sum(protocol.steps.values()) < sum(gpu_plan.steps.values())


def test_a_gpu_that_is_not_there(gpu_plan, monkeypatch):
    def refuse(device):
        raise DeviceError(f"device: expected {device['name']}, found cpu; set device=cpu")

    monkeypatch.setattr(announce, "require", refuse)
    found = announce.hindrance(gpu_plan.settings["device"])
    assert found == "device: expected a100-sxm4-40gb, found cpu; set device=cpu"
    text = announce.describe(gpu_plan._replace(hindrance=found))
    assert f"Warning: nothing can be measured: {found}" in text
    assert announce.hindrance({"kind": "cpu"}) == ""


def test_where_to_look(plan):
    assert "figures/smoke/claims.md" in announce.where_to_look(plan)
    paper = plan._replace(settings=settings())
    assert " figures/claims.md" in announce.where_to_look(paper)


def test_no_torch_is_imported():
    code = (
        "import sys\nfrom packedconv import announce\n"
        "print(announce.describe(announce.plan([], [])))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_cuda_compiler_lengthens_the_build(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    without = announce.compilation_seconds()
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert announce.compilation_seconds() > without > 0


def test_an_imported_run_says_that_nothing_is_measured(tmp_path):
    """With the settings that it was measured with, and the name that it has here."""
    for name in ("config", "figures"):
        shutil.copytree(ROOT / name, tmp_path / name)
    packed = tmp_path / "run.tar.gz"
    bundle.pack(str(write_run(tmp_path / "there", device="tegra-x1", run="few")), str(packed))
    bundle.import_bundle(str(packed), "theirs", str(tmp_path))
    arguments = ["--config", "device=tegra-x1", "run=theirs"]
    plan = announce.plan([], arguments, str(tmp_path))
    text = announce.describe(plan)
    assert text.startswith("Run theirs on device tegra-x1, seed 1: ")
    assert "none here: imported, measured as run few on a machine with Synthetic CPU;" in text
    assert "2 layers, 9 sparsities, 2 rounds" in text
    assert "Warning" not in text
    assert plan.figures == "figures/theirs"
    assert "results/tegra-x1/theirs/" in announce.where_to_look(plan)
    with pytest.raises(ValueError, match="was imported, and measured with another seed"):
        announce.plan([], [*arguments, "seed=2"], str(tmp_path))
