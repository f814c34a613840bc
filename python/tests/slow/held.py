"""Holding a script of the workflow at the worst moment, and what must be true of files after it."""

import gzip
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import zipfile
from typing import NamedTuple

import yaml
from checkout import RUN, Checkout, wait_for

# Loaded by every Python of the workflow. The script that is named stops before it gives a file of
# the checkout its final name, when everything is written under a temporary one.
_SITE = """
import os
import time

folder = os.environ.get("HELD_FOLDER")
with open("/proc/self/cmdline") as stream:
    arguments = stream.read().split("\\0")
script = os.environ.get("HELD_SCRIPT")
if folder and any(("/" + argument).endswith("/" + script) for argument in arguments):
    replace, files = os.replace, []

    def held(source, target, **options):
        if os.path.abspath(target).startswith(os.getcwd() + os.sep):
            files.append(target)
            if len(files) == int(os.environ["HELD_FILE"]):
                with open(os.path.join(folder, "at_work"), "w") as stream:
                    stream.write(str(os.getpid()))
                # A test that fails before it lets go must not hold the lock of the device for ever.
                latest = time.monotonic() + 600
                while not os.path.exists(os.path.join(folder, "go_on")):
                    if time.monotonic() > latest:
                        os._exit(1)
                    time.sleep(0.02)
        return replace(source, target, **options)

    os.replace = held
"""


class Hold:
    """Holds a script before the `file`-th file that it finishes.

    folder: a new one, for the marks that say where the script is.
    """

    def __init__(self, folder: pathlib.Path, script: str, file: int) -> None:
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_SITE)
        self.folder = folder
        self.settings = {
            "HELD_FOLDER": str(folder),
            "HELD_SCRIPT": script,
            "HELD_FILE": str(file),
        }

    def start(
        self, checkout: Checkout, *arguments: str, log: str | pathlib.Path = "run.log"
    ) -> subprocess.Popen:
        """The workflow, in a process group of its own, once the script is held.

        log: what it prints; by a relative path in the checkout.
        """
        with open(checkout.folder / log, "w") as stream:
            process = subprocess.Popen(
                checkout.command(*arguments),
                cwd=checkout.folder,
                env={**checkout.environment(self.folder), **self.settings},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # What a shell starts in the background ignores Ctrl-C, and so would this.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        wait_for((self.folder / "at_work").exists, process)
        return process

    def let_go(self) -> None:
        (self.folder / "go_on").touch()


class File(NamedTuple):
    digest: str
    changed: int  # nanoseconds


def files(*folders: pathlib.Path) -> dict[pathlib.Path, File]:
    """Every file below folders, by its path; not those under a temporary name."""
    return {
        path: File(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def is_whole(path: pathlib.Path) -> bool:
    """Whether a file of the workflow ends where its writer ended it."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return isinstance(json.loads(content), dict)
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist()) and archive.testzip() is None
    if path.suffix == ".gz":
        with gzip.open(path) as stream:
            return bool(stream.read())
    if path.suffix == ".pdf":
        return content.startswith(b"%PDF") and content.endswith(b"%%EOF\n")
    if path.suffix == ".png":
        return content.endswith(b"IEND\xaeB`\x82")
    return content.endswith(b"\n")


def processes_in(folder: pathlib.Path) -> list[int]:
    """Processes that work in a checkout."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if pathlib.Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def small_extended(checkout: Checkout) -> None:
    """Make every experiment beyond the paper one tiny layer, and train hardly at all."""
    path = checkout.folder / "config" / "extended.yaml"
    content = yaml.safe_load(path.read_text())
    content["protocol"] = {
        "rounds": 2,
        "executions": 2,
        "warmup_executions": 0,
        "trial_executions": 1,
    }
    content.update(widest_spread=100.0, repeats=0)
    size = {"height": 12, "width": 12, "kernel_size": 3, "stride": 1, "padding": 1}
    for name in ("baselines", "crossover", "gap", "masks", "formats", "schedules", "utilisation"):
        tiny = {"name": f"t_{name}", "batch": [1], "in_channels": 8, "out_channels": [8], **size}
        content[name] = [{"sparsities": [0.9], "layers": [tiny]}]
    content["digits"]["epochs"] = {"dense": 1, "pruning": 1, "fine_tuning": 0}
    layer = {"in_channels": 8, "out_channels": 8, "height": 12, "width": 12}
    content["numerics"].update(
        sparsities=[0.9],
        inputs=["uniform"],
        weights=["uniform"],
        layers=[{"name": "t", "panel": "a", **layer}],
    )
    path.write_text(yaml.safe_dump(content))


def copy_of(checkout: Checkout, folder: pathlib.Path) -> Checkout:
    """The same checkout in another folder, with its results; nothing in it is out of date."""
    shutil.copytree(checkout.folder, folder, symlinks=True, dirs_exist_ok=True)
    copied = Checkout.__new__(Checkout)
    copied.folder, copied.config = folder, folder / "tiny.yaml"
    copied.layers = folder / "config" / "tiny_layers.yaml"
    return copied


# Of `all` what depends on a measurement, and what is measured.
TARGETS = [
    *(f"figures/{RUN}/cpu/fig{number}.pdf" for number in (2, 5, 6, 7, 8)),
    f"figures/{RUN}/claims.csv",
    *(
        f"results/cpu/{RUN}/{name}"
        for name in (
            *("settings.json", "samples.csv", "errors.csv", "peaks.json"),
            *("ceilings.csv", "ceilings.json"),
            *(
                f"{step}/{layer}.{suffix}"
                for step in ("check", "bench")
                for layer in ("oc8", "oc12")
                for suffix in ("csv", "json")
            ),
        )
    ),
]
