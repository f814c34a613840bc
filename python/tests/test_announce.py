"""What is said before a run starts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from snakemake.cli import parse_config
from snakemake.utils import update_config

from packedconv import announce
from packedconv import config as configuration

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
