"""GPUs, their driver and the CUDA compiler, against the files of config/devices/."""

import glob
import os
import re
import shutil
import subprocess
import typing

from packedconv.doctor.findings import MISSING, OK, WARNING, Finding

QUERY_SECONDS = 20.0
_NVIDIA = "0x10de"
# Oldest CUDA, and the first that no longer does, that compiles for a compute capability.
_COMPILES = {"5.3": ((6, 5), (13, 0)), "8.0": ((11, 0), None), "9.0": ((11, 8), None)}


class DeviceFile(typing.NamedTuple):
    """What is needed of a file of config/devices/: no YAML is read without the environment.

    match: the title that the GPU reports. capability: its compute capability, "8.0".
    """

    name: str
    kind: str
    match: str
    capability: str


class Gpus(typing.NamedTuple):
    """titles: of the GPUs that the driver shows. driver: its version, and cuda the newest CUDA
    that it supports; empty where not known. trouble: why the driver does not answer, or empty."""

    titles: typing.List[str]
    driver: str = ""
    cuda: str = ""
    trouble: str = ""


def device_files(folder: str) -> typing.Dict[str, DeviceFile]:
    """The device files of a folder, by name."""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.yaml"))):
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
        fields = {
            key: re.search(rf'^ *{key}: *"?([^"\n]*?)"? *$', text, re.MULTILINE)
            for key in ("name", "kind", "match", "compute_capability")
        }
        values = {key: match.group(1) if match else "" for key, match in fields.items()}
        found[values["name"]] = DeviceFile(
            values["name"], values["kind"], values["match"], values["compute_capability"]
        )
    return found


def gpus(root: str = "/") -> Gpus:
    """The GPUs of NVIDIA that are here."""
    model = _text(root, "proc/device-tree/model")
    jetson = ["NVIDIA Tegra X1"] if "Jetson Nano" in model else []
    if shutil.which("nvidia-smi") is None:
        trouble = "no nvidia-smi in PATH" if not jetson and _on_the_bus(root) else ""
        return Gpus(jetson, trouble=trouble)
    status, output = _run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    )
    rows = [line.rsplit(",", 1) for line in output.splitlines() if "," in line]
    if status or not rows:
        first = (output.strip().splitlines() or ["no answer"])[0]
        return Gpus(jetson, trouble="" if jetson else f'nvidia-smi says "{first}"')
    cuda = re.search(r"CUDA Version: *([\d.]+)", _run(["nvidia-smi"])[1])
    return Gpus(
        [name.strip() for name, _ in rows], rows[0][1].strip(), cuda.group(1) if cuda else ""
    )


def judge_gpus(found: Gpus, device: DeviceFile, files: typing.Iterable[DeviceFile]) -> Finding:
    """Whether the GPU is there that is to be measured; device: the file that was named."""
    known = {entry.match: entry.name for entry in files if entry.match}
    titles = " and ".join(
        "{} ({})".format(
            title,
            f"device={known[title]}" if title in known else "no file of config/devices/ names it",
        )
        for title in found.titles
    )
    if titles:
        titles += "".join(
            f", {name} {value}"
            for name, value in (("driver", found.driver), ("for CUDA up to", found.cuda))
            if value
        )
    if device.kind == "cpu":
        return _judge_beside_a_cpu(found, titles, known)
    if device.match in found.titles:
        return Finding(OK, "GPU", titles)
    others = sorted({known[title] for title in found.titles if title in known})
    mend = "nvidia-smi, to see what the driver says; its packages where there is none"
    if found.titles:
        mend = "--config " + " or ".join(f"device={name}" for name in [*others, "cpu"])
    return Finding(
        MISSING,
        "GPU",
        f"{titles or found.trouble or 'none'}; expected {device.match} (device={device.name})",
        mend,
    )


def _judge_beside_a_cpu(found: Gpus, titles: str, known: typing.Mapping[str, str]) -> Finding:
    names = sorted({known[title] for title in found.titles if title in known})
    if names:
        return Finding(OK, "GPU", f"{titles}; to measure it: --config device={names[0]}")
    if titles:
        return Finding(OK, "GPU", f"{titles}; device cpu needs none")
    if found.trouble:
        return Finding(
            WARNING,
            "GPU",
            f"one of NVIDIA, not usable: {found.trouble}; device cpu needs none",
            "the driver's packages, if it is to be measured",
        )
    return Finding(OK, "GPU", "none; device cpu needs none")


def cuda_compiler(device: DeviceFile, found: Gpus) -> Finding:
    """The CUDA compiler that the build will take, and whether it suits device and driver."""
    name = "CUDA compiler"
    path = shutil.which(os.environ.get("CUDACXX") or "nvcc")
    if path is None:
        beside = sorted(glob.glob("/usr/local/cuda*/bin/nvcc"))
        mend = (
            f"export CUDACXX={beside[-1]}"
            if beside
            else "NVIDIA's CUDA toolkit, then CUDACXX=/path/to/nvcc where it is not in PATH"
        )
        if device.kind == "cuda":
            return Finding(MISSING, name, f"none; expected one for device={device.name}", mend)
        # Nothing fails without it.
        return Finding(
            WARNING,
            name,
            "none, and none required; figures/instructions.csv will say so, and the bounds leave"
            " a floor out",
            mend,
        )
    status, output = _run([path, "--version"])
    release = re.search(r"release (\d+)\.(\d+)", output)
    if status or release is None:
        first = (output.strip().splitlines() or ["nothing"])[0]
        state = MISSING if device.kind == "cuda" else WARNING
        return Finding(
            state, name, f'{path}, which says "{first}" to --version', "CUDACXX=/path/to/nvcc"
        )
    version = (int(release.group(1)), int(release.group(2)))
    text = "CUDA {}.{} ({})".format(*version, path)
    if device.kind == "cuda":
        oldest, first_without = _COMPILES.get(device.capability, ((0, 0), None))
        if version < oldest or (first_without is not None and version >= first_without):
            wanted = "{}.{} or newer".format(*oldest)
            if first_without is not None:
                wanted += ", older than {}.{}".format(*first_without)
            return Finding(
                MISSING,
                name,
                f"{text}; expected {wanted}, for compute capability {device.capability}",
                "export CUDACXX=/path/to/its/nvcc",
            )
        if found.cuda and int(found.cuda.split(".")[0]) < version[0]:
            return Finding(
                MISSING,
                name,
                f"{text}; expected CUDA {found.cuda} or older, which is what the driver supports",
                "export CUDACXX=/path/to/an/older/nvcc, or a newer driver",
            )
    return Finding(OK, name, text)


def _on_the_bus(root: str) -> bool:
    """Whether a display or 3D controller of NVIDIA is there, whatever its driver."""
    for folder in glob.glob(os.path.join(root, "sys/bus/pci/devices/*")):
        if _text(folder, "vendor").strip() == _NVIDIA and _text(folder, "class").startswith("0x03"):
            return True
    return False


def _run(command: typing.Sequence[str]) -> typing.Tuple[int, str]:
    """Exit status and what was printed, errors too."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=QUERY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _text(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
