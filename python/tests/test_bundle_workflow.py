"""A run that is measured, exported, imported into another checkout, and rendered there."""

import csv
import json
import subprocess
import sys

import pytest
from checkout import RUN, Checkout

# Of the run once it is imported: a word that no text has.
NAME = "fetched"
# Says what this machine has, not what was measured; of an imported run, what the facts hold.
OF_THE_MACHINE_AT_HAND = {f"table6.{suffix}" for suffix in ("csv", "md", "tex", "html")}
# Name the folders of the run.
OF_ITS_FOLDER = {"appendix.md", "appendix.tex"}
BESIDE = ("layers", f"figures/{RUN}/cpu/ladder.pdf")


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A checkout that has measured and rendered a run, and packed it."""
    checkout = Checkout(tmp_path_factory.mktemp("origin") / "packedconv")
    for targets in (("all", *BESIDE), ("bundle",)):
        done = checkout.run(*targets)
        assert done.returncode == 0, done.stdout
    return checkout


class Reader(Checkout):
    """A checkout that renders what it imported, and names no configuration file."""

    def command(self, *arguments):
        return [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]

    @property
    def figures(self):
        return self.folder / "figures" / NAME


@pytest.fixture(scope="module")
def reader(origin, tmp_path_factory):
    """A fresh checkout that has imported the run, and rendered it."""
    checkout = Reader(tmp_path_factory.mktemp("reader") / "packedconv")
    bundle = origin.folder / "bundles" / f"cpu-{RUN}.tar.gz"
    done = subprocess.run(
        [sys.executable, checkout.folder / "scripts/import_results", bundle, "--as", NAME],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    beside = [target.replace(f"figures/{RUN}", f"figures/{NAME}") for target in BESIDE]
    done = checkout.run("all", *beside, "--config", "device=cpu", f"run={NAME}")
    assert done.returncode == 0, done.stdout
    return checkout


def test_every_figure_and_table_is_the_same(origin, reader):
    expected, found = origin.contents(origin.figures), reader.contents(reader.figures)
    assert set(found) == set(expected)
    assert {"cpu/fig5.pdf", "claims.md", "table5.csv", "cpu/layers.csv"} <= set(found)
    differing = {name for name in expected if found[name] != expected[name]}
    assert differing == OF_THE_MACHINE_AT_HAND | OF_ITS_FOLDER
    for name in OF_ITS_FOLDER:
        text = (reader.figures / name).read_text().replace(NAME, RUN)
        assert text == (origin.figures / name).read_text()


def test_versions_are_those_of_the_machine_that_was_measured(origin, reader):
    facts = json.loads((origin.results / "bench" / "oc8.json").read_text())["machine"]
    with open(reader.figures / "table6.csv", newline="") as stream:
        found = {row["software"]: row for row in csv.DictReader(stream)}
    assert found["Python"]["found"] == facts["python"]
    assert found["PyTorch"]["found"] == facts["torch"]
    assert found["CMake"]["found"] == "not recorded"
    assert found["CMake"]["met"] == "not checked"
    assert "what the measured machine had" in (reader.figures / "table6.md").read_text()


def test_rendering_leaves_what_was_imported_alone(origin, reader):
    imported = reader.contents(reader.folder / f"results/cpu/{NAME}")
    del imported["origin.json"]
    measured = origin.contents(origin.results)
    assert imported == {name: measured[name] for name in measured if not name.endswith(".npz")}
    assert list((reader.folder / "results").glob("*/*")) == [reader.folder / f"results/cpu/{NAME}"]


def test_a_second_rendering_does_nothing(reader):
    done = reader.run("all", "-n", "--config", "device=cpu", f"run={NAME}")
    assert "Nothing to be done" in done.stdout


def test_a_second_packing_does_nothing(origin):
    assert "Nothing to be done" in origin.run("bundle", "-n").stdout


def test_what_the_bundle_does_not_hold(reader):
    done = reader.run(f"figures/{NAME}/cpu/gap.pdf", "-n", "--config", f"run={NAME}")
    assert done.returncode != 0
    assert f"results/cpu/{NAME}/gap: not in the bundle that was imported" in done.stdout


def test_a_run_of_its_own_is_measured_as_before(reader):
    """An import changes nothing for the runs that are measured here."""
    rules = reader.planned_rules("results/cpu/paper/samples.csv")
    assert {"weights", "check", "bench", "ceilings", "collect"} <= rules


def test_every_csv_leads_to_its_machine(origin):
    """Of a measurement: by facts beside it with its SHA-256, or by the files it was made from;
    of a figure: by device and run, or by the folder it is in."""
    results = origin.results
    collected = {"samples.csv", "errors.csv", "steps.csv"}
    for path in results.rglob("*.csv"):
        if str(path.relative_to(results)) not in collected:
            facts = json.loads(path.with_suffix(".json").read_text())
            digest = origin.contents(path.parent)[path.name]
            assert digest in facts.values(), path
            assert facts["machine"]["cpu"], path
    not_measured = {
        *("fig1", "fig2a", "fig2b", "fig3", "fig4", "table1", "table2", "table3", "table4"),
        *("table6", "audit"),
    }
    for path in origin.figures.glob("*.csv"):
        with open(path, newline="") as stream:
            columns = set(csv.DictReader(stream).fieldnames)
        leads = {"device", "run"} <= columns or {"shown_in", "analogue_shown_in"} <= columns
        assert leads != (path.stem in not_measured), path
    with open(origin.figures / "cpu" / "machine.csv", newline="") as stream:
        machine = list(csv.DictReader(stream))
    assert {"cpu", "governor", "torch", "commit", "extension compiler"} <= {
        row["fact"] for row in machine
    }
    digests = {row["of"]: row["value"] for row in machine if row["fact"].startswith("SHA-256")}
    for layer in ("oc8", "oc12"):
        for step in ("check", "bench"):
            digest = origin.contents(results / step)[f"{layer}.csv"]
            assert digests[f"{step}/{layer}.json"] == digest
