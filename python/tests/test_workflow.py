"""The workflow as a whole, on a copy of the repository and a run of a few tiny layers."""

import itertools
import json
import os

import pytest
from checkout import RUN, Checkout

from packedconv import _core
from packedconv.samples_file import EXPERIMENT_COLUMNS, read_rows

MEASURING = {"weights", "check", "ceilings", "bench", "ablation", "fixed_cost", "collect"}


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """A checkout with results of a GPU that it does not have, as importing leaves them; their
    content is of no matter to a plan."""
    checkout = Checkout(tmp_path_factory.mktemp("brought") / "packedconv")
    results = checkout.folder / "results" / "tegra-x1" / RUN
    made = checkout.run(f"results/tegra-x1/{RUN}/settings.json", "--config", "device=tegra-x1")
    assert made.returncode == 0, made.stdout
    for step, suffix in itertools.product(("bench", "ablation", "fixed_cost"), ("csv", "json")):
        (results / step).mkdir(exist_ok=True)
        for layer in ("oc8", "oc12"):
            (results / step / f"{layer}.{suffix}").write_text("")
    (results / "check").mkdir()
    for layer, suffix in itertools.product(("oc8", "oc12"), ("csv", "json")):
        (results / "check" / f"{layer}.{suffix}").write_text("")
    for name in ("samples.csv", "errors.csv", "peaks.json", "ceilings.csv", "ceilings.json"):
        (results / name).write_text("")
    origin = {"device": "tegra-x1", "run": "there", "bundle_sha256": "0" * 64}
    (results / "origin.json").write_text(json.dumps(origin))
    # As old as what came from elsewhere may be.
    for path in results.rglob("*"):
        os.utime(path, (1e9, 1e9))
    return checkout


@pytest.mark.parametrize("options", [[], ["--config", "device=tegra-x1"]], ids=["cpu", "brought"])
@pytest.mark.parametrize(
    ("target", "rule"),
    [
        *(("tegra-x1/contenders.csv", "contenders"), ("tegra-x1/fig5.pdf", "device_figure")),
        *((f"tegra-x1/{name}.pdf", "experiment_figure") for name in ("ablation", "fixed_cost")),
    ],
)
def test_results_that_were_brought_are_only_read(brought, target, rule, options):
    assert brought.planned_rules(f"figures/{RUN}/{target}", *options) == {rule}


def test_what_is_asked_of_the_device_that_was_brought(brought):
    option = ("--config", "device=tegra-x1")
    for target, rule in (
        *(("claims.csv", "claims"), ("fig5b.pdf", "panel"), ("fig8b.pdf", "panel")),
        *(("table6.csv", "theory"), ("tegra-x1/machine.csv", "machine")),
    ):
        assert brought.planned_rules(f"figures/{RUN}/{target}", *option) == {rule}
    assert not MEASURING & brought.planned_rules("all", *option)
    appendix = brought.planned_rules(f"figures/{RUN}/appendix.md", *option)
    assert appendix == {"claims", "appendix"}
    # Seconds of the workflow's own steps, which others did not make.
    table = brought.run("-n", f"figures/{RUN}/table5.csv", *option)
    assert table.returncode != 0
    assert "expected seconds of the workflow's steps, which the bundle" in table.stdout
    # No rule writes where it was imported, whatever is asked for.
    for target in ("samples.csv", "peaks.json", "bench/oc8.csv", "settings.json"):
        asked = brought.run("-n", "-F", f"results/tegra-x1/{RUN}/{target}", *option)
        assert asked.returncode != 0, asked.stdout
    asked = brought.run("-n", "bundle", *option)
    assert asked.returncode != 0
    assert "was imported and is only read" in asked.stdout
    # What was measured there is known; another seed is another run.
    asked = brought.run("-n", "all", *option, "seed=2")
    assert "was imported, and measured with another seed" in asked.stdout
    # Without its origin a run is one that this machine measures.
    origin = brought.folder / "results" / "tegra-x1" / RUN / "origin.json"
    text = origin.read_text()
    origin.unlink()
    try:
        assert MEASURING - {"ablation", "fixed_cost"} <= brought.planned_rules(
            f"figures/{RUN}/claims.csv", *option
        )
    finally:
        origin.write_text(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A checkout where everything has been made."""
    checkout = Checkout(tmp_path_factory.mktemp("finished") / "packedconv")
    done = checkout.run("all")
    assert done.returncode == 0, done.stdout
    return checkout


def test_every_target_is_there(finished):
    figures = [f"fig{number}" for number in (1, 3, 4)]
    figures += [f"fig{number}{panel}" for number in (2, 5, 6, 7, 8) for panel in "ab"]
    figures += [f"cpu/fig{number}" for number in (2, 5, 6, 7, 8)]
    tables = [*(f"table{number}" for number in range(1, 7)), "claims", "audit", "cpu/machine"]
    for name in figures:
        for suffix in ("pdf", "png", "csv"):
            assert (finished.figures / f"{name}.{suffix}").stat().st_size > 0
    for suffix in ("md", "tex"):
        assert (finished.figures / f"appendix.{suffix}").stat().st_size > 0
    for name in tables:
        for suffix in ("csv", "md", "tex"):
            assert (finished.figures / f"{name}.{suffix}").stat().st_size > 0


def test_second_run_does_nothing(finished):
    assert "Nothing to be done" in finished.run("all", "-n").stdout


def test_edit_of_a_figure_script_measures_nothing(finished):
    script = finished.folder / "scripts" / "fig5_speedup.py"
    original = script.read_text()
    try:
        script.write_text(original + "\n# edited\n")
        assert finished.planned_rules("all") == {"panel", "device_figure", "all"}
        done = finished.run("all")
        assert done.returncode == 0, done.stdout
        assert "Nothing to be done" in finished.run("all", "-n").stdout
    finally:
        script.write_text(original)
        assert finished.run("all").returncode == 0


def test_edit_of_the_measuring_code_measures_again(finished):
    source = finished.folder / "python" / "packedconv" / "bench" / "protocol.py"
    original = source.read_text()
    try:
        source.write_text(original + "\n# edited\n")
        assert "bench" in finished.planned_rules("all")
    finally:
        source.write_text(original)


def test_rendering_alone_gives_the_same_bytes_without_torch(finished, tmp_path):
    (tmp_path / "torch.py").write_text('raise ImportError("rendering must not import torch")\n')
    for target in (f"figures/{RUN}/fig5a.pdf", f"figures/{RUN}/cpu/fig5.pdf"):
        path = finished.folder / target
        before = path.read_bytes()
        path.unlink()
        done = finished.run(target, paths=(tmp_path,))
        assert done.returncode == 0, done.stdout
        assert path.read_bytes() == before
    assert "Nothing to be done" in finished.run("all", "-n").stdout


def test_second_seed_leaves_the_first_alone(finished):
    before = finished.contents(finished.results), finished.contents(finished.figures)
    target = "results/cpu/tiny2/weights/oc8.npz"
    done = finished.run(target, "--config", "seed=2", "run=tiny2")
    assert done.returncode == 0, done.stdout
    weights = [finished.folder / "results/cpu" / run / "weights/oc8.json" for run in (RUN, "tiny2")]
    assert weights[0].read_text() != weights[1].read_text()
    assert before == (finished.contents(finished.results), finished.contents(finished.figures))


def test_other_settings_under_the_same_run_are_refused(finished):
    done = finished.run("all", "-n", "--config", "seed=2")
    assert done.returncode != 0
    assert "results/cpu/tiny was measured with another seed; name another run" in done.stdout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sed=2", "'sed' was unexpected"),
        ("device=a200", "device: expected one of"),
    ],
)
def test_bad_configuration_is_one_clear_message(finished, setting, message):
    done = finished.run("all", "-n", "--config", setting)
    assert done.returncode != 0
    assert message in done.stdout
    assert "Traceback" not in done.stdout


def test_another_device_is_refused(finished):
    target = "results/a100-sxm4-40gb/elsewhere/samples.csv"
    done = finished.run(target, "--config", "device=a100-sxm4-40gb", "run=elsewhere")
    assert done.returncode != 0
    assert "a100-sxm4-40gb" in done.stdout
    assert not (finished.folder / target).exists()


LISTED = ("layers/t_oc16_n2", "layers/low_oc8_n1", "layers_cold/t_oc16_n2", "ladder/t_oc8_n1")


def test_tables_of_layers_and_the_ladder(finished):
    """Measured layer by layer, rendered, and done after that; `all` knows nothing of them."""
    targets = ("layers", f"figures/{RUN}/cpu/ladder.pdf")
    rules = {"listed_layer", "listed_ladder", "layer_table", "ladder_figure", "layers"}
    assert finished.planned_rules(*targets) == rules

    done = finished.run(*targets)
    assert done.returncode == 0, done.stdout
    for name in ("layers.csv", "layers.md", "layers.tex", "layers_cold.csv", "ladder.pdf"):
        assert (finished.figures / "cpu" / name).stat().st_size > 0
    facts = {name: json.loads((finished.results / f"{name}.json").read_text()) for name in LISTED}
    for name in LISTED:
        assert read_rows(str(finished.results / f"{name}.csv"), EXPERIMENT_COLUMNS)
    assert facts["layers/low_oc8_n1"]["comparable"]["isa"] == _core.isas()[-1]
    assert facts["layers/t_oc16_n2"]["comparable"]["isa"] == _core.isas()[0]
    assert facts["layers_cold/t_oc16_n2"]["rotated"]["set_bytes"] <= 65536
    warm, cold = (
        (finished.figures / "cpu" / f"{name}.md").read_text() for name in ("layers", "layers_cold")
    )
    assert "Lowest instruction set" in warm
    assert "Lowest instruction set" not in cold
    assert "Nothing to be done" in finished.run(*targets, "-n").stdout


def test_a_layer_of_the_tables_is_measured_by_itself(finished):
    """What has not changed in the list is kept, as it is after a kill."""
    original = finished.layers.read_text()
    begin, changed, rest = original.partition("name: t, batch: [2], in_channels: 16")
    assert changed
    try:
        finished.layers.write_text(begin + changed.replace("16", "8") + rest)
        done = finished.run(f"figures/{RUN}/cpu/layers.csv", "-n")
        assert done.returncode == 0, done.stdout
        assert "Timing t_oc16_n2 of layers" in done.stdout
        assert "Timing low_oc8_n1" not in done.stdout
        assert finished.planned_rules("all") == set()
        assert finished.planned_rules(f"figures/{RUN}/cpu/ladder.pdf") == set()
    finally:
        finished.layers.write_text(original)


def test_tables_of_layers_are_a_cpus(finished):
    done = finished.run(f"figures/{RUN}/h200/layers.csv", "-n")
    assert done.returncode != 0
    assert "device: expected a CPU, which this target is about, got h200" in done.stdout
