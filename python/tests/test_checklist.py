"""What reviewers of artifacts check: the README's table of support, and what no test had shown."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from packedconv.evidence import claims, published

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNAKEFILE = (ROOT / "Snakefile").read_text(encoding="utf-8")
LAUNCHER = (ROOT / "scripts" / "artifact").read_text(encoding="utf-8")
CONTAINERFILE = (ROOT / "envs" / "Containerfile").read_text(encoding="utf-8")
PAPER = str(ROOT / "config" / "paper.yaml")
# Beginnings that tokens and keys of well-known services have, and the head of a private key.
SECRET = re.compile(
    r"gh[pousr]_[A-Za-z0-9]{30}|github_pat_\w{30}|glpat-[\w-]{20}|AKIA[0-9A-Z]{16}|hf_[A-Za-z]{30}"
    r"|xox[abprs]-[\w-]{10}|pypi-AgE[\w-]{30}|-{5}BEGIN [A-Z ]*PRIVATE KEY"
)


def section(title):
    """Rows of the first table of a section of the README, as lists of cells."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if not re.fullmatch(r"[|\s-]+", line)
    ]


SUPPORT = section("Support")[1:]


def test_every_line_of_the_checklist_has_a_row():
    assert [row[0] for row in SUPPORT] == [*(str(number) for number in range(1, 18)), ""]
    for number, what, holds, shown in SUPPORT:
        assert what
        assert holds, f"line {number}: expected yes, or what does not hold"
        assert "`" in shown, f"line {number}: expected a test or a page"


@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: row[0] or "last")
def test_what_a_row_names_exists(row):
    place = None
    for name in re.findall(r"`([^`]+)`|\]\(([^)]+)\)", row[3]):
        name = name[0] or name[1]
        if name.startswith("test_") and name.endswith(".py"):
            place = (ROOT / "python" / "tests" / name).read_text(encoding="utf-8")
        elif name.startswith("test_"):
            assert re.search(rf"^def {name}\(", place, re.MULTILINE), name
        elif not name.startswith("figures/"):  # rendered, so not in a clone
            assert (ROOT / name).exists(), name


def test_licence_and_citation():
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version"} <= set(citation)
    assert citation["license"] == "MIT"
    (paper,) = citation["references"]
    source = published.load(PAPER).source
    assert paper["title"] == source["title"]
    names = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert names == source["authors"]
    (identifier,) = paper["identifiers"]
    number = identifier["value"].replace("arXiv:", "")
    assert source["arxiv"] == f"{number}v{identifier['description'].split()[-1]}"


def test_every_target_has_minutes_and_a_place():
    header, *rows = section("Targets")
    assert header[2:] == ["minutes", "in the paper"]
    assert len(rows) > 30
    for target, command, minutes, place in rows:
        assert command.startswith("`scripts/artifact "), target
        assert float(minutes) > 0, target
        assert place or "bounds_h200" in command or command.endswith(" test`"), target
    drawn = [target for target, *_ in rows if target.endswith(", drawn")]
    assert len(drawn) == 3
    assert "Figures 1, 3 and 4 are drawings" in README
    assert "## What this artifact cannot decide here" in README


def test_every_family_of_devices_has_a_state():
    text = README.split("## What this artifact cannot decide here")[1]
    states = re.search(r"^\| device \| state \|\n(?:^\|.*\n)+", text, re.MULTILINE)[0]
    for path in sorted((ROOT / "config" / "devices").glob("*.yaml")):
        device = yaml.safe_load(path.read_text())
        shown = "CPU" if device["kind"] == "cpu" else device["title"]
        words = ("CPU", "A100", "H200", "Jetson Nano")
        (name,) = (word for word in words if word in shown)
        assert name in states, path.name


def test_no_secret_is_tracked():
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if listing.returncode or not listing.stdout:
        pytest.skip("not a git checkout")
    found = []
    for path in map(Path, listing.stdout.splitlines()):
        if (ROOT / path).is_file():
            text = (ROOT / path).read_bytes().decode("utf-8", errors="ignore")
            found += [f"{path}: {match[0][:8]}" for match in SECRET.finditer(text)]
    assert found == []


def test_secrets_are_recognised():
    for text in (
        f"token=gh{'p_'}{'a' * 36}",
        f"{'-' * 5}BEGIN RSA PRIVATE KEY",
        f"AKI{'A'}{'B' * 16}",
    ):
        assert SECRET.search(text), text
    assert not SECRET.search("the sha256 of weights, 0123456789abcdef0123456789abcdef")


def rule(name):
    """A rule of the Snakefile, as text."""
    return re.search(rf"^rule {name}:\n(.*?)(?=^\S)", SNAKEFILE, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("name", ["bench", "ablation"])
def test_timing_waits_for_the_check(name):
    inputs = rule(name).partition("    output:")[0]
    assert "check=rules.check.output" in inputs


def test_fixed_cost_waits_for_the_check():
    """Through the benchmark of the layer, and by itself."""
    inputs = rule("fixed_cost").partition("    output:")[0]
    assert "bench=rules.bench.output.facts" in inputs


def test_facts_of_the_machine_are_complete():
    import torch  # noqa: F401  before the extension

    from packedconv.bench import machine

    facts = machine.machine_facts()
    expected = {"cpu", "gpus", "governor", "torch", "extension", "commit", "kernel", "libc"}
    assert expected <= set(facts)
    assert {"compiler", "flags", "cuda"} <= set(facts["extension"])
    assert {"frequencies_mhz", "load_average", "time"} <= set(machine.moment())


def test_every_claim_is_complete():
    paper = published.load(PAPER)
    table = claims.claims(paper, [], "cpu")
    assert len(table) == len(paper.statements) > 70
    assert (table["printed"] != "").all()
    assert set(table["verdict"]) <= set(claims.VERDICTS)
    undecided = table["verdict"] == "not testable here"
    assert (table["reason"][undecided] != "").all()
    assert (table["obtained"][~undecided] != "").all()
    open_ones = {statement["id"] for statement in paper.statements if statement.get("open")}
    assert set(table["id"][table["tolerance"] == ""]) <= open_ones
    for statement in paper.statements:
        assert "comparator" in statement or statement["id"] in open_ones


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config/schema").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_schema_is_closed(path):
    """Every object with keys of its own refuses others."""

    def objects(node, where):
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object":
                yield where, node
            for key, value in node.items():
                yield from objects(value, f"{where}.{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from objects(value, f"{where}[{index}]")

    found = list(objects(yaml.safe_load(path.read_text()), path.name))
    assert found
    closed = ("additionalProperties", "unevaluatedProperties")
    assert [
        where for where, node in found if all(node.get(key) is not False for key in closed)
    ] == []


def test_fonts_are_embedded(tmp_path, monkeypatch):
    """In a figure as it comes out of its script; none is of Type 3, which journals refuse."""
    out = tmp_path / "fig2a.pdf"
    arguments = ["--panel", "a", "--paper", PAPER, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fig2_roofline.py", *arguments])
    runpy.run_path(str(ROOT / "scripts" / "fig2_roofline.py"), run_name="__main__")
    pdf = out.read_bytes()
    descriptors = re.findall(rb"/Type /FontDescriptor.*?>>|<<[^<>]*/FontDescriptor\b[^<>]*>>", pdf)
    assert b"/FontFile2" in pdf
    assert descriptors
    assert b"/Type3" not in pdf
    assert b"/Subtype /Type1" not in pdf  # the fonts that a reader would have to bring


def test_every_figure_is_saved_in_one_place():
    saving = [
        str(path.relative_to(ROOT))
        for folder in ("python/packedconv", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"\.savefig\(|\.print_pdf\(", path.read_text(encoding="utf-8"))
    ]
    assert saving == ["python/packedconv/plots/save.py"]


def launcher_packages():
    """Debian packages that scripts/artifact tells a user to install, with Python 3.11."""
    named = re.findall(r'install_command "?([^")]*?)"? "?[^")]*"?\)', LAUNCHER)
    packages = {package for group in named for package in group.split()}
    return {package.replace("$short", "3.11") for package in packages if "$1" not in package}


def test_container_has_what_the_launcher_asks_for():
    wanted = launcher_packages()
    assert {"g++", "python3.11", "python3.11-venv", "python3.11-dev"} <= wanted
    version = re.search(r"^ARG PYTHON_VERSION=(\S+)$", CONTAINERFILE, re.MULTILINE)[1]
    install = re.search(r"apt-get install((?:[^&]|\\\n)*)&&", CONTAINERFILE)[1]
    installed = set(install.replace("${PYTHON_VERSION}", version).replace("\\\n", " ").split())
    assert wanted <= installed
    extra = {name for name in installed - wanted if not name.startswith("--")}
    # Certificates for pip, and the commit for the facts of the machine.
    assert extra == {"ca-certificates", "git"}


def test_container_is_pinned_and_runs_as_a_user():
    lines = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]
    base = re.search(r"^ARG BASE=\S+/\S+:(\S+)$", CONTAINERFILE, re.MULTILINE)[1]
    assert base != "latest"
    user = lines.index("USER artifact")
    assert all("apt-get" not in line for line in lines[user:])
    assert [line for line in lines if line.startswith("USER ")] == ["USER artifact"]
    # Set up and compiled in the image, so that running needs no network.
    assert "RUN scripts/artifact --version" in lines[user:]
    assert "RUN scripts/artifact build" in lines[user:]
    # PYTHON and CXX choose the launcher's tools, and an ARG is a variable of every RUN after it.
    assert not re.search(r"^(?:ARG|ENV) (?:PYTHON|CXX)\b", CONTAINERFILE, re.MULTILINE)


def test_every_key_of_the_configuration_is_described():
    page = (ROOT / "config" / "README.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(\w+)`", page))
    for name in ("config", "device", "layers"):
        schema = yaml.safe_load((ROOT / f"config/schema/{name}.schema.yaml").read_text())
        keys = set(schema["properties"])
        for part in schema["properties"].values():
            keys |= set(part.get("properties", {}))
        assert keys <= described, name
    for path in (ROOT / "config").iterdir():
        assert f"`{path.name}" in page or path.name in ("README.md", "devices"), path.name
    assert "## devices/<device>.yaml" in page


def test_defaults_of_the_page_are_those_of_the_file():
    page = (ROOT / "config" / "README.md").read_text(encoding="utf-8")
    defaults = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    rows = dict(
        re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page.split("## devices")[0], re.MULTILINE)
    )
    assert set(rows) == set(defaults)
    for key in ("device", "contenders", "layer_tables", "extended"):
        assert rows[key] == f"`{defaults[key]}`"
    assert rows["seed"] == str(defaults["seed"])
    assert rows["run"] == rows["layers"] == "null"
    protocol = defaults["protocol"]
    order = ("rounds", "executions", "warmup_executions", "trial_executions")
    assert rows["protocol"] == ", ".join(str(protocol[key]) for key in order)


def test_catalogue():
    """The keys that the Snakemake Workflow Catalog reads, and what it asks for beside them."""
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert set(usage) == {"mandatory-flags", "software-stack-deployment"}
    assert set(usage["mandatory-flags"]) == {"desc", "flags"}
    deployment = usage["software-stack-deployment"]
    assert set(deployment) == {"conda", "apptainer", "apptainer+conda", "report"}
    assert all(isinstance(value, bool) for value in deployment.values())
    for name in ("README.md", "LICENSE", "Snakefile", "config/README.md"):
        assert (ROOT / name).is_file()
