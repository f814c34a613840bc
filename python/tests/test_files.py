"""Files that cannot be written or read: what is said, and what is left behind."""

import errno
import itertools
import os

import numpy as np
import pytest

from packedconv import disk
from packedconv.config import check_stored_settings
from packedconv.evidence.samples import load_csv, load_json
from packedconv.files import atomic_write
from packedconv.layer import Layer
from packedconv.samples_file import CEILING_COLUMNS, read_rows, read_text
from packedconv.script import run
from packedconv.weights import load_weights, save_weights

GARBAGE = b"device,run\n\xff\xfe\x00\x00,\x00\n"


def fails_with(capsys, call):
    """The one line on stderr of a script that fails."""
    with pytest.raises(SystemExit) as stop:
        run(call)
    return str(stop.value.code)


# Writing.


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_with_the_file_and_leaves_the_old_one(tmp_path, capsys, number):
    path = tmp_path / "oc8.csv"
    path.write_text("old\n")

    def write():
        with atomic_write(str(path)) as temporary, open(temporary, "w") as stream:
            stream.write("half")
            raise OSError(number, os.strerror(number))

    message = fails_with(capsys, write)
    assert message.startswith("error: ")
    assert str(path) in message
    assert message.endswith("free some space and run again")
    assert [child.name for child in tmp_path.iterdir()] == ["oc8.csv"]
    assert path.read_text() == "old\n"


def test_an_error_that_names_its_file_keeps_the_name(tmp_path):
    out = str(tmp_path / "out.csv")
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_write(out):
        os.stat(tmp_path / "elsewhere")
    assert not list(tmp_path.iterdir())


class Status:
    """What statvfs says of a disk."""

    f_frsize = 4096

    def __init__(self, megabytes, files=100, free_files=50):
        self.f_bavail = int(megabytes * 1e6 / self.f_frsize)
        self.f_files, self.f_favail = files, free_files


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (Status(1000), ""),
        (Status(3.5), "is full (3.5 MB free); free some space"),
        (Status(0), "is full (0.0 MB free)"),
        (Status(1000, 100, 0), "no further file fits, though there is space"),
        # Some file systems count no files.
        (Status(1000, 0, 0), ""),
    ],
)
def test_full_disks(tmp_path, monkeypatch, capsys, status, said):
    monkeypatch.setattr(os, "statvfs", lambda folder: status)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "results").mkdir()
    disk.say_full_disks(tmp_path)
    message = capsys.readouterr().err
    assert message.count("\n") == (1 if said else 0)
    assert said in message
    assert not said or f"the disk of {tmp_path}" in message


def test_each_disk_is_named_once(tmp_path, monkeypatch):
    for name in ("results", "logs"):
        (tmp_path / name).mkdir()
    real = os.stat

    class Elsewhere:
        st_dev = -1

    monkeypatch.setattr(
        os,
        "stat",
        lambda path, **options: (
            Elsewhere() if str(path).endswith("results") else real(path, **options)
        ),
    )
    monkeypatch.setattr(os, "statvfs", lambda folder: Status(1))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os.path, "isdir", lambda path: os.path.exists(path))
    sentences = disk.full_disks(tmp_path)
    assert len(sentences) == 2
    assert str(tmp_path / "results") in sentences[1]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda folder: Status(1000))
    assert disk.hindrance(tmp_path) == ""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    message = disk.hindrance(tmp_path)
    assert message.startswith(f"folder: expected write permission in {tmp_path}, found none; ")
    assert message.endswith(f"cp -r {tmp_path} ~/packedconv")


# Reading.


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_rows(path, CEILING_COLUMNS),
        read_text,
        lambda path: load_csv(path, ("device", "run"), ()),
        load_json,
        lambda path: check_stored_settings({"run": "tiny"}, path),
    ],
    ids=["read_rows", "read_text", "load_csv", "load_json", "check_stored_settings"],
)
def test_what_is_no_text_is_one_message_that_names_the_file(tmp_path, read):
    path = tmp_path / "spoiled"
    path.write_bytes(GARBAGE)
    with pytest.raises(ValueError, match=r"spoiled: .*expected") as error:
        read(path)
    assert "again" in str(error.value)


def test_a_table_with_a_field_too_many_is_named(tmp_path):
    path = tmp_path / "samples.csv"
    path.write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(ValueError, match=r"samples\.csv: content: expected CSV"):
        load_csv(path, ("a", "b"), ())


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"text"', ""])
def test_settings_that_are_cut_say_what_to_do(tmp_path, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"settings\.json: .*delete this file and run again"):
        check_stored_settings({"run": "tiny"}, path)


def test_no_flipped_bit_of_a_weights_file_goes_unseen(tmp_path):
    """Each byte in turn: the same weights, or one error that names the file."""
    layer = Layer("oc2", 1, 2, 2, 8, 8)
    weight = np.zeros(layer.weight_shape, np.float32)
    weight.flat[[1, 5, 20, 30]] = [0.5, -1.25, 3.0, 7.0]
    path = tmp_path / "oc2.npz"
    # 4 of 36 weights.
    save_weights(str(path), {"s89": weight})
    content = path.read_bytes()
    messages = []
    for at, bit in itertools.product(range(len(content)), (0x01, 0x10)):
        changed = bytearray(content)
        changed[at] ^= bit
        path.write_bytes(changed)
        try:
            found = load_weights(str(path), layer, [0.89])
        except ValueError as error:
            messages.append(str(error))
        else:
            assert np.array_equal(found["s89"], weight), f"bit {bit} of byte {at}"
    assert len(messages) > len(content) / 2
    assert all(f"weights file {path}: " in message for message in messages)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"oc2\.npz"):
            load_weights(str(path), layer, [0.89])
