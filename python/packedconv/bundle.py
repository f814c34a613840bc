"""The results of a run as one file: packed where they were measured, imported elsewhere.

A bundle is a .tar.gz. Its first member, bundle.json, lists every other by SHA-256 and size; those
are the files of results/<device>/<run>/, byte for byte. Runs on the measured machine too, so
Python 3.6 and its standard library are enough.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
import typing
import zlib

from packedconv.files import atomic_write
from packedconv.run_folder import (
    BundleError,
    ResultsError,
    check_results,
    digest,
    load_object,
    machine_summary,
    stream_digest,
    walk,
)
from packedconv.run_names import DEFAULT_RUN, RESERVED
from packedconv.samples_file import write_text

SCHEMA_VERSION = 1
MANIFEST = "bundle.json"
# Written beside imported files: where they come from. A run that has it is only read.
ORIGIN = "origin.json"

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_DEVICE = re.compile(r"[a-z0-9][a-z0-9_-]*")
# A part of a path inside a bundle: no hidden file, nothing that a file system reads otherwise.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_MANIFEST = 64 * 2**20
_BLOCK = 2**20
_COMPRESSION = 9

Manifest = typing.Dict[str, typing.Any]


def pack(folder: str, out: str) -> Manifest:
    """Write results/<device>/<run>/ as the bundle `out`, and return its bundle.json.

    The same files give the same bytes (with the same Python and zlib). Weights are left out
    where the manifest beside them says how to draw them again. Raises BundleError for results
    that are not whole, were imported or change meanwhile, and for an `out` that holds something
    else.
    """
    folder = os.path.abspath(folder)
    if os.path.lexists(os.path.join(folder, ORIGIN)):
        raise BundleError(
            f"{folder}: expected a run that was measured here, got one that was imported; hand on "
            f"the bundle that {ORIGIN} names"
        )
    paths = _paths_to_pack(folder)
    settings = check_results(folder)
    files = {path: digest(os.path.join(folder, path)) for path in paths}
    manifest = _manifest(folder, settings, files)
    with _disk_errors_name(out), atomic_write(out) as temporary:
        _write(folder, manifest, temporary)
        if os.path.lexists(out) and not _same_file(out, temporary):
            raise BundleError(
                f"{out}: expected no file, or this bundle, got another file; name another, or move "
                "it away"
            )
    return manifest


def import_bundle(path: str, name: str, root: str) -> str:
    """Unpack a bundle as the run `name` of the checkout `root`; returns the folder.

    Files go to results/<device>/<name>/ byte for byte, with origin.json, all of them or none:
    the folder has its name only when it is complete. Raises BundleError with the reason for
    a bundle that is cut, altered, newer than this checkout, or of a device that it does not
    know, and for a name that is there already.
    """
    if not NAME.fullmatch(name) or name in RESERVED or _is_device(root, name):
        raise BundleError(
            "name: expected a letter, then letters, digits, - and _, and neither a device's name "
            "nor {}, got {!r}".format(", ".join(RESERVED), name)
        )
    with open(path, "rb") as stream, _readable(path):
        sha256, _ = stream_digest(stream)
        stream.seek(0)
        with gzip.GzipFile(fileobj=stream, mode="rb") as unzipped:
            archive = tarfile.open(fileobj=unzipped, mode="r|")  # noqa: SIM115  closed with it
            manifest = _read_manifest(path, archive)
            folder = _destination(root, manifest, name)
            with _disk_errors_name(folder), _staging(folder) as staging:
                _require_space(path, manifest, staging)
                _unpack(path, archive, manifest, staging)
                _require_end(path, unzipped)
                try:
                    _require_identity(path, check_results(staging), manifest)
                except ResultsError as error:
                    reason = error.reason.replace(staging + os.sep, "").replace(staging, "files")
                    raise BundleError(
                        f"{path}: {reason}; ask for a new bundle where it was measured"
                    ) from None
                origin = {
                    key: manifest[key]
                    for key in ("device", "run", "machine", "commit", "measured_until", "files")
                }
                origin["schema_version"] = SCHEMA_VERSION
                origin["bundle_sha256"] = sha256
                origin["imported"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                write_text(os.path.join(staging, ORIGIN), _json_text(origin))
                try:
                    os.rename(staging, folder)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                    raise _present(folder) from None
    return folder


def load_origin(folder: str) -> typing.Optional[typing.Dict[str, typing.Any]]:
    """Where the files of a results folder come from; None for a run that was measured here.

    Raises BundleError where origin.json is not whole.
    """
    path = os.path.join(folder, ORIGIN)
    if not os.path.lexists(path):
        return None
    origin = load_object(path)
    for key in ("device", "run", "bundle_sha256"):
        if not isinstance(origin.get(key), str):
            raise BundleError(
                f"{path}: {key}: expected text, got {origin.get(key)!r}; import the bundle again "
                "under another name"
            )
    return origin


# Packing.


def _paths_to_pack(folder: str) -> typing.List[str]:
    """Files of a run that a bundle takes. Raises BundleError for a name that none can hold."""
    if not os.path.isdir(folder):
        raise BundleError(f"{folder}: expected a folder, results/<device>/<run>; got none")
    paths = []
    for path in walk(folder):
        stem, suffix = os.path.splitext(path)
        drawn = path.startswith("weights/") and suffix == ".npz"
        if drawn and os.path.isfile(os.path.join(folder, stem + ".json")):
            continue
        whole = os.path.join(folder, path)
        if not _is_inside(path) or os.path.islink(whole) or not os.path.isfile(whole):
            raise BundleError(
                f"{whole}: expected a regular file with a name of letters, digits, _ . + and -; "
                "move it out of the run's folder"
            )
        paths.append(path)
    return paths


def _manifest(
    folder: str,
    settings: typing.Dict[str, typing.Any],
    files: typing.Dict[str, typing.Tuple[str, int]],
) -> Manifest:
    facts = [
        load_object(os.path.join(folder, path))
        for path in files
        if path.endswith(".json") and path.startswith("bench/") and path.count("/") == 1
    ]
    machine = facts[0].get("machine") or {}
    return {
        "schema_version": SCHEMA_VERSION,
        "device": settings["device"]["name"],
        "run": settings["run"],
        # Of the measurements, not of packing: the same results are the same bytes.
        "measured_until": max((found.get("after") or {}).get("time") or "" for found in facts),
        "commit": machine.get("commit"),
        "machine": machine_summary(machine),
        "files": {
            path: {"sha256": sha256, "bytes": size}
            for path, (sha256, size) in sorted(files.items())
        },
    }


def _write(folder: str, manifest: Manifest, out: str) -> None:
    with open(out, "wb") as stream:
        # No name and no time in the header.
        zipped = gzip.GzipFile("", "wb", _COMPRESSION, stream, mtime=0)
        with zipped, tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive:
            text = _json_text(manifest).encode("utf-8")
            archive.addfile(_member(MANIFEST, len(text)), io.BytesIO(text))
            for path, stated in manifest["files"].items():
                whole = os.path.join(folder, path)
                with open(whole, "rb") as source:
                    hashed = _Hashed(source)
                    with _shrunk(whole):
                        archive.addfile(_member(path, stated["bytes"]), hashed)
                    if hashed.hexdigest() != stated["sha256"] or source.read(1):
                        raise _changed(whole)


@contextlib.contextmanager
def _shrunk(path: str) -> typing.Iterator[None]:
    """tarfile says of a file that became shorter "unexpected end of data" only."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise _changed(path) from None
        raise


def _changed(path: str) -> BundleError:
    return BundleError(
        f"{path}: changed while it was packed; wait until measuring has ended, and pack again"
    )


def _member(path: str, size: int) -> tarfile.TarInfo:
    """A header that says nothing of who packed it, and when."""
    member = tarfile.TarInfo(path)
    member.size, member.mode = size, 0o644
    return member


class _Hashed:
    """A stream whose content is hashed as it is read."""

    def __init__(self, stream: typing.BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._digest.update(block)
        return block

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


# Importing.


@contextlib.contextmanager
def _readable(path: str) -> typing.Iterator[None]:
    """What gzip and tarfile raise of a file that is cut, altered or no bundle, as one message."""
    try:
        yield
    except (EOFError, zlib.error, tarfile.TarError) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        # Of gzip, "Not a gzipped file" and "CRC check failed" have no number.
        if error.errno is not None:
            raise
        raise _damaged(path, error) from None


def _damaged(path: str, reason: typing.Any) -> BundleError:
    return BundleError(
        f"{path}: expected a whole bundle, as scripts/bundle.py writes it, got one that is cut or "
        f"altered ({reason}); copy it again"
    )


def _read_manifest(path: str, archive: tarfile.TarFile) -> Manifest:
    """The first member, checked. Raises BundleError."""
    member = archive.next()
    if member is None or member.name != MANIFEST:
        found = "nothing" if member is None else repr(member.name)
        raise _damaged(path, f"its first member is {found}, not {MANIFEST}")
    _require_plain(path, member)
    if member.size > _LARGEST_MANIFEST:
        raise _damaged(path, f"{MANIFEST} has {member.size} bytes")
    text = _extracted(archive, member).read()
    try:
        manifest = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} is not JSON: {error}") from None
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BundleError(
            f"{path}: schema_version: expected {SCHEMA_VERSION} at most, got {version}: a newer "
            "packedconv made it; update this checkout"
        )
    if version is True or version != SCHEMA_VERSION:
        raise _damaged(path, f"schema_version is {version!r}, not {SCHEMA_VERSION}")
    _check_manifest(path, manifest)
    return manifest


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _check_manifest(path: str, manifest: Manifest) -> None:
    kinds = {
        "device": (str,),
        "run": (str,),
        "measured_until": (str,),
        "commit": (dict, type(None)),
        "machine": (dict,),
        "files": (dict,),
    }  # type: typing.Dict[str, typing.Tuple[type, ...]]
    for key, expected in kinds.items():
        if not isinstance(manifest.get(key), expected):
            raise _damaged(path, f"{MANIFEST}: {key} is {manifest.get(key)!r}")
    for name, stated in manifest["files"].items():
        if not _is_inside(name):
            raise BundleError(
                f"{path}: expected paths inside the run's folder, got {name!r}; do not use this "
                "bundle"
            )
        whole = (
            isinstance(stated, dict)
            and isinstance(stated.get("sha256"), str)
            and _SHA256.fullmatch(stated["sha256"])
            and type(stated.get("bytes")) is int
            and stated["bytes"] >= 0
        )
        if not whole:
            raise _damaged(path, f"{MANIFEST}: {name} is {stated!r}")
    for name in manifest["files"]:
        for parent in _parents(name):
            if parent in manifest["files"]:
                raise _damaged(path, f"{parent} is a file and a folder")


def _destination(root: str, manifest: Manifest, name: str) -> str:
    """The folder to import into, which is not there. Raises BundleError."""
    device = manifest["device"]
    if not _is_device(root, device):
        raise BundleError(
            f"device: expected one of config/devices/, got {device!r}; add the device's file from "
            "where it was measured, and import again"
        )
    if device == "cpu" and name == DEFAULT_RUN:
        raise BundleError(
            f"name: expected another than {DEFAULT_RUN}, the run that measures this machine, got "
            f"{name}; name it otherwise, say theirs"
        )
    folder = os.path.join(os.path.abspath(root), "results", device, name)
    if os.path.lexists(folder):
        raise _present(folder)
    return folder


def _present(folder: str) -> BundleError:
    return BundleError(
        f"{folder}: expected no such run, got one; import under another name, or move that folder "
        "away"
    )


def _is_device(root: str, name: str) -> bool:
    if not _DEVICE.fullmatch(name):
        return False
    return os.path.isfile(os.path.join(root, "config", "devices", name + ".yaml"))


@contextlib.contextmanager
def _staging(folder: str) -> typing.Iterator[str]:
    """A hidden folder beside `folder`, gone after the block unless it was renamed.

    One that a killed import has left is removed by the next import of a run of that device.
    """
    device = os.path.dirname(folder)
    made = [path for path in (os.path.dirname(device), device) if not os.path.isdir(path)]
    os.makedirs(device, exist_ok=True)
    staging = None
    try:
        with _only_import(device) as alone:
            prefix = ".import-"
            if alone:
                for name in os.listdir(device):
                    if name.startswith(prefix):
                        shutil.rmtree(os.path.join(device, name), ignore_errors=True)
            staging = tempfile.mkdtemp(prefix=prefix, dir=device)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(staging, 0o777 & ~mask)
            yield staging
    finally:
        if staging is not None and os.path.isdir(staging):
            shutil.rmtree(staging, ignore_errors=True)
        for path in reversed(made):
            # Not there before, and still empty: nothing was imported.
            with contextlib.suppress(OSError):
                os.rmdir(path)


@contextlib.contextmanager
def _only_import(folder: str) -> typing.Iterator[bool]:
    """Whether no other import is at work in a folder; waits for it, where locks are known."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        except OSError:
            # Some network file systems have no such locks.
            alone = False
        yield alone
    finally:
        os.close(descriptor)


def _require_space(path: str, manifest: Manifest, folder: str) -> None:
    needed = sum(stated["bytes"] for stated in manifest["files"].values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BundleError(
            f"{path}: expected {needed} bytes free in {os.path.dirname(folder)}, which it unpacks "
            f"to, got {free}; free some space and import again"
        )


def _unpack(path: str, archive: tarfile.TarFile, manifest: Manifest, folder: str) -> None:
    """Write every file that the manifest lists into `folder`, and refuse everything else."""
    waiting = dict(manifest["files"])
    while True:
        member = archive.next()
        if member is None:
            break
        stated = waiting.pop(member.name, None)
        if stated is None:
            twice = member.name in manifest["files"] or member.name == MANIFEST
            raise BundleError(
                "{}: expected {}, got {!r}{}; do not use this bundle".format(
                    path,
                    "each file once" if twice else f"only files that {MANIFEST} lists",
                    member.name,
                    " again" if twice else "",
                )
            )
        _require_plain(path, member)
        if member.size != stated["bytes"]:
            raise _damaged(
                path,
                "{} has {} bytes, not {}".format(member.name, member.size, stated["bytes"]),
            )
        whole = os.path.join(folder, *member.name.split("/"))
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        source = _Hashed(_extracted(archive, member))
        with open(whole, "xb") as stream:
            shutil.copyfileobj(source, stream, _BLOCK)
        if source.hexdigest() != stated["sha256"]:
            raise BundleError(
                "{}: {}: expected the SHA-256 {}, got {}; copy the bundle again".format(
                    path, member.name, stated["sha256"], source.hexdigest()
                )
            )
    if waiting:
        raise _damaged(
            path,
            "{} of {} files missing, {} first".format(
                len(waiting), len(manifest["files"]), min(waiting)
            ),
        )


def _require_plain(path: str, member: tarfile.TarInfo) -> None:
    """Raise BundleError for a link, a device, a folder, or a sparse file."""
    plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.linkname
    if not plain or getattr(member, "sparse", None) is not None:
        kinds = {
            tarfile.SYMTYPE: "a symbolic link",
            tarfile.LNKTYPE: "a hard link",
            tarfile.DIRTYPE: "a folder",
            tarfile.CHRTYPE: "a device",
            tarfile.BLKTYPE: "a device",
            tarfile.FIFOTYPE: "a pipe",
        }
        raise BundleError(
            "{}: {}: expected a regular file, got {}; do not use this bundle".format(
                path, member.name, kinds.get(member.type, "something else")
            )
        )


def _extracted(archive: tarfile.TarFile, member: tarfile.TarInfo) -> typing.BinaryIO:
    stream = archive.extractfile(member)
    assert stream is not None  # a regular file
    return typing.cast(typing.BinaryIO, stream)


def _require_end(path: str, unzipped: gzip.GzipFile) -> None:
    """Read to the end, so that the checksum of the compressed stream is looked at."""
    while True:
        block = unzipped.read(_BLOCK)
        if not block:
            return
        if block.strip(b"\0"):
            raise _damaged(path, "something follows its last file")


def _require_identity(
    path: str, settings: typing.Dict[str, typing.Any], manifest: Manifest
) -> None:
    for key, found in (("device", settings["device"]["name"]), ("run", settings["run"])):
        if found != manifest[key]:
            raise BundleError(
                f"{path}: {key}: expected that of settings.json, {found!r}, got "
                f"{manifest[key]!r} in {MANIFEST}; do not use this bundle"
            )


def _is_inside(path: str) -> bool:
    """Whether a path of a bundle is a plain name below the run's folder."""
    parts = path.split("/")
    return path not in (MANIFEST, ORIGIN) and all(_PART.fullmatch(part) for part in parts)


def _parents(path: str) -> typing.Iterator[str]:
    parts = path.split("/")
    for count in range(1, len(parts)):
        yield "/".join(parts[:count])


def _json_text(value: typing.Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _same_file(first: str, second: str) -> bool:
    return os.path.isfile(first) and digest(first) == digest(second)


@contextlib.contextmanager
def _disk_errors_name(path: str) -> typing.Iterator[None]:
    """An error of the system without a file's name, such as a full disk, names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from None
