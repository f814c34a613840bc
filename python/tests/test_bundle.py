"""Bundles: packed, imported, and refused for every reason there is."""

import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from bundled import MACHINE, write_facts, write_run
from hypothesis import given
from hypothesis import strategies as st

from packedconv import bundle, run_folder
from packedconv import config as configuration
from packedconv.bundle import BundleError, import_bundle, load_origin, pack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measured(tmp_path):
    return write_run(tmp_path / "there/results")


@pytest.fixture
def checkout(tmp_path):
    return empty_checkout(tmp_path / "here")


@pytest.fixture
def packed(measured, tmp_path):
    pack(str(measured), str(tmp_path / "run.tar.gz"))
    return tmp_path / "run.tar.gz"


def empty_checkout(root):
    """What importing asks of a checkout: which devices there are."""
    (root / "config/devices").mkdir(parents=True)
    for name in ("cpu", "tegra-x1"):
        (root / "config/devices" / f"{name}.yaml").touch()
    return root


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def without_weights(files):
    return {path: data for path, data in files.items() if not path.endswith(".npz")}


def members(path):
    """Members of a bundle in order, as (header, bytes or None)."""
    with tarfile.open(path) as archive:
        return [
            (member, archive.extractfile(member).read() if member.isreg() else None)
            for member in archive
        ]


def repacked(path, entries, manifest=None):
    """A bundle of these members, bundle.json replaced where `manifest` is given."""
    with gzip.open(path, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for member, data in entries:
            if manifest is not None and member.name == bundle.MANIFEST:
                data = json.dumps(manifest).encode()
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data) if data is not None else None)
    return path


def refused(path, checkout, message, name="theirs"):
    """Importing raises, and leaves the checkout as it was."""
    before = sorted(checkout.rglob("*")), contents(checkout)
    with pytest.raises(BundleError, match=message):
        import_bundle(str(path), name, str(checkout))
    assert (sorted(checkout.rglob("*")), contents(checkout)) == before


def test_import_gives_the_same_files_back(measured, packed, checkout):
    folder = Path(import_bundle(str(packed), "theirs", str(checkout)))
    assert folder == checkout / "results/cpu/theirs"
    found = contents(folder)
    origin = json.loads(found.pop("origin.json"))
    assert found == without_weights(contents(measured))
    assert origin["bundle_sha256"] == hashlib.sha256(packed.read_bytes()).hexdigest()
    assert (origin["device"], origin["run"]) == ("cpu", "paper")
    assert origin["machine"]["cpu"] == MACHINE["cpu"]
    assert origin["measured_until"] == "2026-01-02T03:04:05Z"
    assert load_origin(str(folder)) == origin
    assert load_origin(str(measured)) is None
    # Nothing else lies there, hidden or not.
    assert os.listdir(folder.parent) == ["theirs"]


def test_the_same_run_gives_the_same_bytes(measured, packed, tmp_path):
    time.sleep(1.1)  # a time of packing would show
    copy = shutil.copytree(measured, tmp_path / "copy")
    (copy / ".samples.csv.half").write_text("temporary, so not packed")
    pack(str(copy), str(tmp_path / "again.tar.gz"))
    assert (tmp_path / "again.tar.gz").read_bytes() == packed.read_bytes()
    first, *rest = members(packed)
    assert first[0].name == "bundle.json"
    assert [member.name for member, _ in rest] == sorted(json.loads(first[1])["files"])
    assert {(member.mtime, member.uid, member.uname) for member, _ in rest} == {(0, 0, "")}


PARTS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,20}", fullmatch=True)
PATHS = st.tuples(st.sampled_from(["archive", "layers", "ladder"]), PARTS).map("/".join)


@given(st.dictionaries(PATHS, st.binary(max_size=2000), max_size=8))
def test_any_files_come_back(files):
    # A JSON file beside a CSV file holds its facts; those have tests of their own.
    files = {path: data for path, data in files.items() if not path.lower().endswith(".json")}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        target = write_run(base / "there", sparsities=(0.9,), out_channels=(8,))
        for path, data in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)
        pack(str(target), str(base / "run.tar.gz"))
        folder = import_bundle(
            str(base / "run.tar.gz"), "theirs", str(empty_checkout(base / "here"))
        )
        found = contents(folder)
        del found["origin.json"]
        assert found == without_weights(contents(target))


@given(st.data())
def test_no_altered_byte_goes_unnoticed(data):
    """Whatever byte is changed or wherever the file is cut: refused, or the same files."""
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        target = write_run(base / "there", sparsities=(0.9,), out_channels=(8,))
        path, checkout = base / "run.tar.gz", empty_checkout(base / "here")
        pack(str(target), str(path))
        whole = path.read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(whole[:place])
        else:
            changed = whole[place] ^ data.draw(st.integers(1, 255))
            path.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
        try:
            folder = import_bundle(str(path), "theirs", str(checkout))
        except BundleError:
            assert not (checkout / "results").exists()
        else:
            # Bytes of gzip's header that say nothing of the content.
            found = contents(folder)
            del found["origin.json"]
            assert found == without_weights(contents(target))


@pytest.mark.parametrize("length", [0, 1, 10, 200, 0.5, 0.999])
def test_a_bundle_that_is_cut(packed, checkout, length):
    whole = packed.read_bytes()
    packed.write_bytes(whole[: int(length * len(whole)) if length < 1 else length])
    refused(packed, checkout, "expected a whole bundle.*copy it again")


def test_what_is_no_bundle(tmp_path, checkout):
    path = tmp_path / "notes.txt"
    path.write_text("not a bundle")
    refused(path, checkout, "expected a whole bundle")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(__file__, "test.py")
    refused(path, checkout, "its first member is 'test.py', not bundle.json")
    with pytest.raises(FileNotFoundError):
        import_bundle(str(tmp_path / "none.tar.gz"), "theirs", str(checkout))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version: expected 1 at most, got 2: a newer packedconv"),
        ({"schema_version": "1"}, "schema_version is '1'"),
        ({"schema_version": True}, "schema_version is True"),
        ({"device": "h200"}, "device: expected one of config/devices/, got 'h200'"),
        ({"device": "../cpu"}, "device: expected one of config/devices/"),
        ({"device": "tegra-x1"}, "device: expected that of settings.json, 'cpu', got 'tegra-x1'"),
        ({"device": 1}, "device is 1"),
        ({"run": "seed2"}, "run: expected that of settings.json, 'paper', got 'seed2'"),
        ({"files": []}, r"files is \[\]"),
        ({"machine": None}, "machine is None"),
        ({"commit": float("nan")}, "NaN is no number"),
    ],
)
def test_a_wrong_manifest(packed, checkout, changes, message):
    entries = members(packed)
    repacked(packed, entries, {**json.loads(entries[0][1]), **changes})
    refused(packed, checkout, message)


@pytest.mark.parametrize(
    "name",
    [
        *("../../evil", "/etc/evil", "bench/../../evil", "./samples.csv", "bench//x", ".hidden"),
        *("bench/", "a\\b", "a\nb", "", "origin.json", "bundle.json", "bench/.."),
    ],
)
def test_a_path_that_leads_elsewhere(packed, checkout, name):
    entries = members(packed)
    manifest = json.loads(entries[0][1])
    manifest["files"][name] = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
    extra = tarfile.TarInfo(name)
    extra.size = 1
    repacked(packed, [*entries, (extra, b"x")], manifest)
    refused(packed, checkout, "expected paths inside the run's folder")
    # In the archive, but not in the manifest.
    repacked(packed, [*entries, (extra, b"x")], json.loads(entries[0][1]))
    refused(packed, checkout, "expected (only files that bundle.json lists|each file once)")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.DIRTYPE, "a folder"),
        (tarfile.CONTTYPE, "something else"),
    ],
)
@pytest.mark.parametrize("replaces", ["samples.csv", "bundle.json"])
def test_a_member_that_is_no_regular_file(packed, checkout, kind, message, replaces):
    entries = members(packed)
    for index, (member, _) in enumerate(entries):
        if member.name == replaces:
            odd = tarfile.TarInfo(replaces)
            odd.type, odd.linkname = kind, "/etc/passwd"
            entries[index] = (odd, None)
    repacked(packed, entries)
    refused(packed, checkout, f"{replaces}: expected a regular file, got {message}")


def test_members_that_are_too_many_too_few_or_not_alike(packed, checkout):
    entries = members(packed)
    repacked(packed, [*entries, entries[-1]])
    refused(packed, checkout, "expected each file once, got 'weights/oc8.json' again")
    repacked(packed, [*entries, entries[0]])
    refused(packed, checkout, "expected each file once, got 'bundle.json' again")
    repacked(packed, entries[:-1])
    refused(packed, checkout, "1 of .* files missing, weights/oc8.json first")
    repacked(packed, entries[1:])
    refused(packed, checkout, "its first member is")
    extra = tarfile.TarInfo("bench/extra.csv")
    repacked(packed, [*entries, (extra, b"")])
    refused(packed, checkout, "expected only files that bundle.json lists, got 'bench/extra.csv'")
    repacked(packed, entries)
    with gzip.open(packed, "ab") as stream:
        stream.write(b"more")
    refused(packed, checkout, "something follows its last file")


def test_a_wrong_checksum_or_size(packed, checkout):
    entries = members(packed)
    index = next(i for i, (member, _) in enumerate(entries) if member.name == "peaks.json")
    member, data = entries[index]
    entries[index] = (member, data.replace(b"2", b"3", 1))
    repacked(packed, entries)
    refused(packed, checkout, "peaks.json: expected the SHA-256 [0-9a-f]{64}, got")
    manifest = json.loads(entries[0][1])
    manifest["files"]["peaks.json"]["bytes"] += 1
    repacked(packed, entries, manifest)
    refused(packed, checkout, "peaks.json has .* bytes, not")


def test_a_file_that_is_a_folder_too(packed, checkout):
    entries = members(packed)
    manifest = json.loads(entries[0][1])
    manifest["files"]["bench"] = manifest["files"]["samples.csv"]
    repacked(packed, entries, manifest)
    refused(packed, checkout, "bench is a file and a folder")


def with_manifest_of(entries):
    """The members with a manifest that their content agrees with."""
    manifest = json.loads(entries[0][1])
    for member, data in entries[1:]:
        member.size = len(data)
        stated = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest["files"][member.name] = stated
    return manifest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bench/oc8.csv", "expected the rows that the facts beside it belong to"),
        ("check/oc8.csv", "expected the rows that the facts beside it belong to"),
        ("ceilings.csv", "expected the rows that the facts beside it belong to"),
        ("samples.csv", "samples.csv: expected the rows of bench/oc8.csv, bench/oc12.csv"),
        ("errors.csv", "errors.csv: expected the rows of check/oc8.csv"),
        ("bench/oc8.json", "bench/oc8.json: expected what was written, got a file changed since"),
        ("peaks.json", "peaks.json: expected what was written, got a file changed since"),
    ],
)
def test_rows_that_were_changed_with_their_checksum(packed, checkout, name, message):
    """A manifest that agrees with changed rows does not hide that they are of no measurement."""
    entries = members(packed)
    for index, (member, data) in enumerate(entries):
        if member.name == name:
            changed = data.replace(b"0.", b"1.", 1).replace(b"00000", b"00001", 1)
            assert changed != data
            entries[index] = (member, changed)
    repacked(packed, entries, with_manifest_of(entries))
    refused(packed, checkout, f"{message}.*; ask for a new bundle where it was measured$")


@pytest.mark.parametrize("name", ["", "2fast", "../x", "a/b", "-x", "a b", "cpu", "tegra-x1"])
def test_a_bad_name(packed, checkout, name):
    refused(packed, checkout, "name: expected a letter", name)


def test_a_name_that_is_there(packed, checkout):
    import_bundle(str(packed), "theirs", str(checkout))
    refused(packed, checkout, "results/cpu/theirs: expected no such run, got one")
    (checkout / "results/cpu/link").symlink_to("nowhere")
    refused(packed, checkout, "expected no such run", "link")
    (checkout / "results/cpu/empty").mkdir()
    refused(packed, checkout, "expected no such run", "empty")


def test_the_run_of_this_machine_is_never_anothers(packed, checkout, tmp_path):
    refused(packed, checkout, "paper, the run that measures this machine", "paper")
    assert bundle.DEFAULT_RUN == configuration.DEFAULT_RUN
    nano = write_run(tmp_path / "nano", device="tegra-x1")
    pack(str(nano), str(tmp_path / "nano.tar.gz"))
    folder = import_bundle(str(tmp_path / "nano.tar.gz"), "paper", str(checkout))
    assert folder == str(checkout / "results/tegra-x1/paper")


def test_names_are_those_of_the_configuration():
    schema = configuration.load_yaml(ROOT / "config/schema/config.schema.yaml")
    pattern = schema["properties"]["run"]["oneOf"][1]["pattern"]
    assert pattern == f"^{bundle.NAME.pattern}$"


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "samples.csv").unlink(), "is missing: samples.csv; measure it to"),
        (lambda run: shutil.rmtree(run / "bench"), "are missing: bench/oc8.csv, bench/oc8.json"),
        (lambda run: (run / "settings.json").unlink(), "settings.json: not found"),
        (lambda run: (run / "settings.json").write_text("{}"), "settings: expected the keys"),
        (lambda run: edited(run / "settings.json", '"seed"', '"seeds"'), "no unknown key, got"),
        (
            lambda run: edited(run / "settings.json", '"seed": 1', '"seed": 2'),
            "measured with, got",
        ),
        (lambda run: edited(run / "settings.json", "0.9,", "1e306,"), "from 0 to 0.999, got 1e"),
        (
            lambda run: edited(
                run / "settings.json", '"in_channels": ', '"in_channels": ' + "9" * 400
            ),
            "int too",
        ),
        (lambda run: edited(run / "settings.json", '"oc8"', '"../oc8"'), "layers.name: expected"),
        (lambda run: edited(run / "settings.json", '"paper"', '"../x"'), "can be parts of paths"),
        (
            lambda run: edited(run / "peaks.json", "000.0", "001.0"),
            "peaks.json: expected what was",
        ),
        (lambda run: edited(run / "bench/oc8.json", "Synthetic", "Faster"), "a file changed since"),
        (lambda run: (run / "settings.json").write_text("{"), "expected JSON"),
        (lambda run: (run / "settings.json").write_text("[" * 100_000), "expected JSON"),
        (lambda run: (run / "bench/oc8.csv").write_text("x"), "expected the rows that the facts"),
        (lambda run: (run / "steps.link").symlink_to("steps.csv"), "expected a regular file"),
        (lambda run: (run / "with space").touch(), "expected a regular file with a name of"),
        (lambda run: os.mkfifo(run / "pipe"), "expected a regular file"),
        (lambda run: (run / "linked").symlink_to("bench"), "expected a regular file"),
        (lambda run: (run / "origin.json").write_text("{}"), "got one that was imported"),
        (
            lambda run: write_facts(run / "bench/oc8.json", "samples_sha256", device="h200"),
            "device: expected 'cpu' as in settings.json, got 'h200'",
        ),
    ],
)
def test_what_is_not_packed(measured, tmp_path, spoil, message):
    spoil(measured)
    with pytest.raises(BundleError, match=message):
        pack(str(measured), str(tmp_path / "run.tar.gz"))
    assert os.listdir(tmp_path) == ["there"]


def test_packing_never_replaces_another_file(measured, packed):
    before = packed.read_bytes()
    pack(str(measured), str(packed))
    assert packed.read_bytes() == before
    (measured / "steps.csv").write_text("step,seconds\n")
    with pytest.raises(BundleError, match="expected no file, or this bundle, got another"):
        pack(str(measured), str(packed))
    assert packed.read_bytes() == before
    assert sorted(os.listdir(packed.parent)) == ["run.tar.gz", "there"]


@pytest.mark.parametrize("change", [b"", b"longer"])
def test_a_file_that_changes_while_it_is_packed(measured, tmp_path, monkeypatch, change):
    digest = run_folder.digest

    def then_changed(path):
        found = digest(path)
        if path.endswith("steps.csv"):
            data = Path(path).read_bytes()
            Path(path).write_bytes(data + change if change else data[:5])
        return found

    monkeypatch.setattr(bundle, "digest", then_changed)
    with pytest.raises(BundleError, match=r"steps\.csv: changed while it was packed; wait until"):
        pack(str(measured), str(tmp_path / "run.tar.gz"))
    assert os.listdir(tmp_path) == ["there"]


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk(measured, packed, checkout, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tarfile, "copyfileobj", full)
        with pytest.raises(OSError, match=r"No space left on device: .*other\.tar\.gz"):
            pack(str(measured), str(tmp_path / "other.tar.gz"))
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(OSError, match=r"No space left on device: .*results/cpu/theirs"):
            import_bundle(str(packed), "theirs", str(checkout))
    assert sorted(os.listdir(tmp_path)) == ["here", "run.tar.gz", "there"]
    assert not (checkout / "results").exists()
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(packed, checkout, "bytes free in .*, which it unpacks to, got 5; free some space")


# Stops for ever in the middle of the work, and says so.
STOPPED = """
import shutil, sys, tarfile, time
from packedconv import bundle
def stop(source, *others, **named):
    print("at work", flush=True)
    time.sleep(600)
{module}.copyfileobj = stop
{call}
"""


def killed(module, call):
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED.format(module=module, call=call)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_import_leaves_nothing_that_looks_whole(packed, checkout):
    killed("shutil", f"bundle.import_bundle({str(packed)!r}, 'theirs', {str(checkout)!r})")
    left = os.listdir(checkout / "results/cpu")
    assert len(left) == 1
    assert left[0].startswith(".")
    import_bundle(str(packed), "theirs", str(checkout))
    assert os.listdir(checkout / "results/cpu") == ["theirs"]


def test_a_killed_pack_leaves_nothing_that_looks_whole(measured, tmp_path):
    out = tmp_path / "bundles/run.tar.gz"
    killed("tarfile", f"bundle.pack({str(measured)!r}, {str(out)!r})")
    left = os.listdir(out.parent)
    assert len(left) == 1
    assert left[0].startswith(".")
    pack(str(measured), str(out))
    assert out.exists()


def test_of_two_imports_at_once_one_is_refused(packed, checkout):
    command = [
        *(sys.executable, "-c"),
        "import sys\nfrom packedconv import bundle\n"
        "try:\n    bundle.import_bundle(*sys.argv[1:])\n"
        "except bundle.BundleError:\n    sys.exit(3)\n",
        *(str(packed), "theirs", str(checkout)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert sorted(process.wait() for process in both) == [0, 3]
    assert os.listdir(checkout / "results/cpu") == ["theirs"]


def scripted(root, python):
    """A checkout with what the two scripts need, and how to call its import script."""
    empty_checkout(root)
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copytree(
        ROOT / "python/packedconv",
        root / "python/packedconv",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )

    def call(*arguments):
        return subprocess.run(
            [python, "-I", str(root / "scripts/import_results"), *map(str, arguments)],
            cwd=root.parent,
            capture_output=True,
            text=True,
        )

    return call


def test_the_scripts(measured, tmp_path):
    out = tmp_path / "run.tar.gz"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bundle.py", "--results", measured, "--out", out],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "files of run paper on device cpu" in done.stdout
    call = scripted(tmp_path / "here", sys.executable)
    done = call(out, "--as", "theirs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "results/cpu/theirs: run paper of device cpu, measured on Synthetic CPU",
        "Render it with: snakemake --cores 1 all --config device=cpu run=theirs",
    ]
    for path, message in (
        (out, "expected no such run, got one"),
        (tmp_path / "none.tar.gz", "No such file"),
    ):
        done = call(path, "--as", "theirs")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_scripts_with_a_bare_python_3_6(measured, tmp_path):
    """No numpy, no torch, nothing but Python."""
    python = shutil.which("python3.6")
    if python is None or subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no python3.6")
    call = scripted(tmp_path / "here", python)
    pack(str(measured), str(tmp_path / "run.tar.gz"))
    done = call(tmp_path / "run.tar.gz", "--as", "theirs")
    assert (done.returncode, done.stderr) == (0, "")
    found = contents(tmp_path / "here/results/cpu/theirs")
    del found["origin.json"]
    assert found == without_weights(contents(measured))
