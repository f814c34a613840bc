"""The project itself: what its pages promise is there, and nothing ties it to one machine."""

import glob
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

import packedconv
from packedconv.imports import imported_modules

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = (ROOT / "figures/README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
# What renders from stored results knows nothing of kernels.
RENDERING = [
    name
    for name in SCRIPTS
    if re.match(
        r"fig[25678]_|figure_|table|compare|contenders|bounds\.|instructions\.|audit\.|claims\.|collect\.",
        name,
    )
]


def pins(lines):
    """Names and versions of pinned requirements; fails on anything else."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
        assert match, f"not a pin: {line}"
        found[match[1].lower().replace("_", "-")] = match[2]
    return found


def requirements(name):
    lines = (ROOT / "envs" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tracked():
    """Tracked files, where this is a git checkout."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if listing.returncode or not listing.stdout:
        pytest.skip("not a git checkout")
    return [path for path in listing.stdout.splitlines() if (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def device_side():
    path = ROOT / ".ci/check_device_side.py"
    spec = importlib.util.spec_from_file_location("check_device_side", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lock_pins_everything():
    locked = pins(requirements("requirements.lock"))
    assert locked["torch"] == "2.13.0"
    assert "packedconv" not in locked
    direct = {re.split("[=<>]", line)[0].lower() for line in requirements("requirements.in")}
    assert direct <= set(locked)


def test_conda_environment_has_the_same_pins():
    environment = yaml.safe_load((ROOT / "envs/environment.yaml").read_text())
    (pip,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pins(pip) == pins(requirements("requirements.lock"))


def test_versions_agree():
    """The version stands in __init__.py; what cannot read it there repeats it."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    notes = (ROOT / "docs" / "release-notes.md").read_text(encoding="utf-8")
    assert citation["version"] == packedconv.__version__
    assert re.search(r"^## (\S+)", notes, re.MULTILINE)[1] == packedconv.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    source = project["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert f'__version__ = "{packedconv.__version__}"' in (ROOT / source).read_text()


def test_no_path_of_one_machine():
    # The folder of the user of envs/Containerfile is the same on every machine.
    pattern = re.compile(
        r"(?<![\w.~*])/(?:home(?!/artifact/)|root|Users|work|mnt|scratch)/|\bfile:/{2}"
    )
    found = []
    for path in tracked():
        text = (ROOT / path).read_bytes().decode("utf-8", errors="ignore")
        found += [f"{path}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


def test_no_output_is_tracked():
    outputs = [
        path
        for path in tracked()
        if path.startswith(("results/", "build/", ".venv/"))
        or (
            path.startswith("figures/") and path.endswith((".pdf", ".png", ".csv", ".tex", ".html"))
        )
    ]
    assert outputs == []


PAGES = ["README.md", "figures/README.md", "envs/README.md", "envs/containers.md"]
PAGES += ["config/README.md", "docs/terms.md", "docs/release-notes.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_where_things_live():
    """Every path that the README's table of folders names exists."""
    table = README.split("## Where things live")[1].split("\n\n")[2]
    paths = re.findall(r"`([\w.-]+/[\w./-]*|Snakefile)`", table)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def readme_targets():
    return set(re.findall(r"^\|.*`scripts/artifact (figures/\S+)`", README, re.MULTILINE))


def test_targets_of_the_readme_are_those_of_the_workflow():
    """Every figure and table that `all` renders is in the README's table, and nothing else."""
    listing = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", "all", "--summary"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listing.returncode == 0, listing.stderr
    outputs = {line.split("\t")[0] for line in listing.stdout.splitlines()}

    def first(stem):
        """A figure is named by its PDF, a table by its CSV, a text by its Markdown."""
        return next((kind for kind in ("pdf", "csv", "md") if f"{stem}.{kind}" in outputs), None)

    rendered = {
        path
        for path in outputs
        if path.startswith("figures/") and path.rpartition(".")[2] == first(path.rpartition(".")[0])
    }
    assert readme_targets() == rendered


def test_both_pages_list_the_same_targets():
    rows = re.findall(r"^\| `(\S+)` \| `scripts/(\S+)` \|", FIGURES, re.MULTILINE)
    assert {f"figures/{target}".replace("<device>", "cpu") for target, _ in rows} == (
        readme_targets()
    )
    assert {script for _, script in rows} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert stop.value.code in (0, None)
    assert capsys.readouterr().out.startswith("usage: ")


def test_rendering_imports_no_torch():
    code = (
        "import json, runpy, sys\n"
        "for path in json.loads(sys.argv[1]):\n"
        "    runpy.run_path(path, run_name='loaded')\n"
        "    assert 'torch' not in sys.modules, path\n"
    )
    paths = [str(ROOT / "scripts" / name) for name in RENDERING]
    assert len(paths) > 10
    subprocess.run([sys.executable, "-c", code, json.dumps(paths)], check=True)


def test_device_side_code_keeps_to_python_3_6():
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/check_device_side.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import json\nimport torch\nfrom packedconv.ours import Ours\n", 0),
        ("try:\n    import tqdm\nexcept ImportError:\n    tqdm = None\n", 0),
        ("import pandas\n", 1),
        ("from packedconv import theirs\n", 1),
        ("from packedconv.theirs import Theirs\n", 1),
        ("if (n := 3) > 2:\n    pass\n", 1),
        ("from dataclasses import dataclass\n", 1),
        ("from __future__ import annotations\n", 1),
        ("import torch\ntorch.cuda.is_current_stream_capturing()\n", 1),
        ("import torch\ngetattr(torch.cuda, 'is_current_stream_capturing', None)\n", 0),
        ("import torch\ntry:\n    torch.compile\nexcept AttributeError:\n    pass\n", 0),
        ("from torch.fx.experimental.proxy_tensor import make_fx\n", 1),
        ("import torch.compiler\n", 1),
        ("import torch\ntorch.zeros(3).untyped_storage()\n", 1),
    ],
)
def test_device_side_check(device_side, tmp_path, monkeypatch, capfd, text, status):
    package = tmp_path / "python/packedconv"
    package.mkdir(parents=True)
    for name in ("__init__", "theirs"):
        (package / f"{name}.py").touch()
    (package / "ours.py").write_text(text)
    files = ["python/packedconv/__init__.py", "python/packedconv/ours.py"]
    monkeypatch.setattr(device_side, "DEVICE_SIDE", files)
    monkeypatch.setattr(sys, "argv", ["check", "--root", str(tmp_path)])
    assert device_side.main() == status, capfd.readouterr().out
    assert device_side.device_side_files(str(tmp_path)) == files


def test_device_side_list_names_files_that_exist(device_side, tmp_path):
    with pytest.raises(FileNotFoundError, match="packedconv"):
        device_side.device_side_files(str(tmp_path))


MEASURING = [
    *("weights", "check", "ceilings", "bench", "ablation", "fixed_cost"),
    *("layers", "ladder", "peers"),
]


def beyond_modules(path):
    """Modules of the experiments beyond the paper that a script imports, by their folder."""
    text = path.read_text()
    found = re.findall(r"packedconv\.(bench|evidence|plots)\.extended(?: import|\.)\s*(\w+)", text)
    package = ROOT / "python" / "packedconv"
    return [package / side / "extended" / f"{name}.py" for side, name in found]


def source_lists():
    """Lists of sources in the Snakefile, as absolute paths, by name."""
    text = (ROOT / "Snakefile").read_text()
    names = {"glob": glob, "os": os}
    begin, end = text.index("PACKAGE ="), text.index("def trio")
    exec(text[begin:end], names)
    keys = (
        *("MEASURE_SOURCES", "PLOT_SOURCES", "INSTRUCTION_SOURCES"),
        *("LISTED_MEASURE", "PEER_MEASURE", "CONFIG_SOURCES"),
    )
    return [{ROOT / path for path in names[key]} for key in keys]


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda p: p.stem)
def test_a_rule_depends_on_what_its_script_imports(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    measure, plot, instructions, listed, peers, configuring = source_lists()
    package = ROOT / "python" / "packedconv"
    packing = {package / f"{name}.py" for name in ("arguments", "packed", "schedule")}
    # Reports errors; and what only writes the settings or the extension.
    free = {package / "script.py"}
    if script.stem in ("build", "settings", "stamp", "steps"):
        free |= {package / "files.py", package / "device.py"}
        expected = set()
    elif script.stem in ("layers", "ladder"):
        expected = measure | listed
    elif script.stem == "extended":
        # Which experiments there are: no rule of one depends on it.
        which = package / "extended.py"
        expected = measure | listed | {which} | imported_modules(which)
    elif script.stem in ("numerics", "digits") or beyond_modules(script):
        # Their rules name the modules, and take what those import.
        measuring = script.stem in ("numerics", "digits")
        expected = measure | listed if measuring else plot | {package / "collect.py"}
        for module in beyond_modules(script):
            expected |= {module} | imported_modules(module)
        assert beyond_modules(script)
    elif script.stem == "compare":
        folders = [package / side / "compare" for side in ("evidence", "plots")]
        expected = plot | {path for folder in folders for path in folder.glob("*.py")}
    elif script.stem == "peers":
        expected = measure | listed | peers
    elif script.stem in MEASURING:
        expected = measure
    elif script.stem == "collect":
        expected = measure | {package / "collect.py", package / "roofline.py"}
    elif script.stem in ("table_layers", "table_peers", "figure_ladder"):
        expected = plot | {package / "collect.py"}
    elif script.stem == "table_machine":
        expected = plot | {package / "run_folder.py"}
    elif script.stem == "bundle":
        modules = "bundle files layer run_folder run_names samples_file seal settings"
        expected = {package / f"{name}.py" for name in modules.split()}
        expected |= {package / "device.py"}  # imported to report errors
    elif script.stem.startswith("fig4"):
        expected = plot | packing
    elif script.stem == "instructions":
        expected = instructions | {package / "device.py"}  # imported to report errors
    elif script.stem == "bounds":
        expected = plot | packing | configuring
    else:
        expected = plot
    # Packing knows the packed file, which no measurement and no figure writes, and plans, which
    # no figure makes.
    free |= {package / f"{name}.py" for name in ("packed_file", "plan", "autotune")}
    assert imported_modules(script) - free <= expected


def test_the_readme_is_finished():
    assert "MEASURE" not in README
    for picture in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (ROOT / picture).is_file()
