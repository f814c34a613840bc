"""Which devices are at hand, and which cores this process may use."""

import os
import sys
import types

import pytest

import packedconv
from packedconv import device as device_module
from packedconv.device import (
    Device,
    DeviceError,
    cpu_title,
    device_limits,
    devices,
    match,
    require,
    usable_cores,
)

A100_40 = {"name": "a100-sxm4-40gb", "kind": "cuda", "match": "NVIDIA A100-SXM4-40GB"}
CPU = {"name": "cpu", "kind": "cpu"}


def test_the_cpu_is_always_there():
    found = devices()
    assert found[0].name == found[0].kind == "cpu"
    assert found[0].title
    assert found[0].cores == usable_cores() >= 1
    assert require(CPU) == found[0]
    assert packedconv.devices() == found


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA A100-PCIE-40GB", False),
        ("NVIDIA A100", False),
    ],
)
def test_variants_stay_apart(title, expected):
    assert match(A100_40, Device("x", "cuda", title, 108)) is expected


def test_kinds_stay_apart():
    assert not match(CPU, Device("cpu", "cuda", "x", 1))
    assert not match(dict(CPU, name="other"), Device("cpu", "cpu", "x", 1))
    assert not match(A100_40, Device("cpu", "cpu", "NVIDIA A100-SXM4-40GB", 1))


def test_require_names_what_was_asked_for_and_found(monkeypatch):
    with pytest.raises(DeviceError, match=r"expected a100-sxm4-40gb .*40GB\), found cpu \("):
        require(A100_40)
    gpu = Device("a100-sxm4-40gb", "cuda", "NVIDIA A100-SXM4-40GB", 108)
    detectors = [lambda: [gpu._replace(title="x")], lambda: [gpu]]
    monkeypatch.setattr("packedconv.device._DETECTORS", detectors)
    assert require(A100_40) == gpu


NANO = {
    "name": "tegra-x1",
    "kind": "cuda",
    "match": "NVIDIA Tegra X1",
    "gpu": {"multiprocessors": 1},
}


def test_multiprocessors_tell_apart_what_shares_a_title():
    assert match(NANO, Device("tegra-x1", "cuda", "NVIDIA Tegra X1", 1))
    assert not match(NANO, Device("tegra-x1", "cuda", "NVIDIA Tegra X1", 2))
    assert match(dict(NANO, gpu=None), Device("tegra-x1", "cuda", "NVIDIA Tegra X1", 2))


# GPUs, as the extension tells of them.

H200 = ("NVIDIA H200", (9, 0), 132)
T4 = ("Tesla T4", (7, 5), 40)
A100_80 = ("NVIDIA A100-SXM4-80GB", (8, 0), 108)


@pytest.fixture
def extension(monkeypatch):
    """Sets the CUDA version, the architectures and the GPUs that the extension tells of."""

    def set_up(version="13.0", architectures=(80, 90), gpus=(), driver="13.0", missing=()):
        info = {"cuda": version, "cuda_architectures": list(architectures)}
        found = [
            {
                "index": index,
                "name": name,
                "compute_capability": capability,
                "multiprocessors": multiprocessors,
                "memory_bytes": 1 << 33,
                "shared_per_block": 1000 * multiprocessors,
                "shared_per_multiprocessor": 2000 * multiprocessors,
            }
            for index, (name, capability, multiprocessors) in enumerate(gpus)
            if index not in missing
        ]
        core = types.SimpleNamespace(
            build_info=lambda: info, gpus=lambda: found, cuda_driver_version=lambda: driver
        )
        monkeypatch.setattr(device_module, "_extension", lambda: core)

    device_limits.cache_clear()
    yield set_up
    device_limits.cache_clear()


def test_gpus_are_listed_after_the_cpu(extension):
    extension(gpus=[H200, A100_80])
    cpu, *gpus = devices()
    assert cpu.kind == "cpu"
    assert gpus == [
        Device("h200", "cuda", "NVIDIA H200", 132),
        Device("a100-sxm4-80gb", "cuda", "NVIDIA A100-SXM4-80GB", 108),
    ]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA Tegra X1", "tegra-x1"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("Tesla T4", "tesla-t4"),
        ("NVIDIA GeForce RTX 4060 (Laptop)", "geforce-rtx-4060-laptop"),
    ],
)
def test_names_of_gpus(extension, title, name):
    extension(gpus=[(title, (9, 0), 10)])
    assert [found.name for found in devices()] == ["cpu", name]


def test_gpus_that_the_build_has_no_kernels_for_are_not_listed(extension):
    extension(gpus=[T4, H200])
    assert [found.name for found in devices()] == ["cpu", "h200"]
    extension(architectures=(90,), gpus=[A100_80, H200])
    assert [found.name for found in devices()] == ["cpu", "h200"]


@pytest.mark.parametrize("broken", [False, True])
def test_cpu_is_listed_without_the_extension(tmp_path, monkeypatch, broken):
    monkeypatch.delitem(sys.modules, "packedconv._core", raising=False)
    monkeypatch.delattr(packedconv, "_core", raising=False)
    if broken:
        (tmp_path / "_core.so").write_bytes(b"not a library")
    monkeypatch.setattr(packedconv, "__path__", [str(tmp_path)])
    assert [found.name for found in devices()] == ["cpu"]
    with pytest.raises(DeviceError, match=r"packedconv._core is not built or does not load"):
        require(A100_40)


def test_limits_of_a_gpu(extension):
    extension(gpus=[H200, A100_80])
    assert device_limits(0) == (90, 132, 132000, 264000)
    assert device_limits(1) == (80, 108, 108000, 216000)


def test_gpus_are_found_by_the_number_that_cuda_gives_them(extension):
    """The first one does not tell its properties."""
    extension(gpus=[T4, H200, A100_80], missing=[0])
    assert device_limits(1) == (90, 132, 132000, 264000)
    assert device_limits(2) == (80, 108, 108000, 216000)
    with pytest.raises(RuntimeError, match=r"cuda:0: .* \(cuda:1 NVIDIA H200, cuda:2 NVIDIA A100"):
        device_limits(0)


@pytest.mark.parametrize(
    ("built", "driver", "expected"),
    [
        ("13.0", "12.4", True),
        ("11.8", "10.2", True),
        ("10.2", "10.1", True),
        # From CUDA 11 on a driver runs what later minor versions built.
        ("12.8", "12.4", False),
        ("12.4", "13.0", False),
        ("10.2", "10.2", False),
        ("9.2", "10.0", False),
        # No driver.
        ("13.0", "", False),
    ],
)
def test_driver_that_is_older_than_the_build(extension, built, driver, expected):
    extension(version=built, driver=driver)
    message = "the driver shows no NVIDIA GPU"
    if expected:
        message = (
            f"the driver supports CUDA {driver} and this build needs {built}: update the driver, "
            "or build with an older CUDA"
        )
    with pytest.raises(RuntimeError, match=f"cuda:0: .*{message}"):
        device_limits(0)
    with pytest.raises(DeviceError, match=f"{message}.*device=cpu"):
        require(A100_40)


@pytest.mark.parametrize(
    ("build", "index", "message"),
    [
        ({"version": None, "architectures": ()}, 0, r"cuda:0: this build has no CUDA kernels"),
        ({}, 0, r"cuda:0: no CUDA device, since the driver shows no NVIDIA GPU; .*nvidia-smi"),
        ({"gpus": [H200]}, 1, r"cuda:1: expected one of the GPUs .* \(cuda:0 NVIDIA H200\)"),
        ({"gpus": [T4]}, 0, r"cuda:0: Tesla T4 \(compute capability 7.5\) is older than every"),
    ],
)
def test_limits_of_a_gpu_that_cannot_be_used(extension, build, index, message):
    extension(**build)
    with pytest.raises(RuntimeError, match=message):
        device_limits(index)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"version": None, "architectures": ()}, r"this build has no CUDA kernels; .*device=cpu"),
        ({}, r"the driver shows no NVIDIA GPU; .*device=cpu"),
        ({"gpus": [T4]}, r"Tesla T4 .* is older than every architecture of this build \(8.0, 9.0"),
        (
            {"gpus": [H200, A100_80]},
            r"found cpu .*, h200 \(NVIDIA H200, 132 multiprocessors\), .* set `device` to the "
            r"machine at hand: device=a100-sxm4-80gb or device=h200",
        ),
    ],
)
def test_require_says_what_is_missing(extension, build, message):
    extension(**build)
    with pytest.raises(DeviceError, match=message):
        require(A100_40)


def test_require_names_the_multiprocessors(extension):
    extension(architectures=(53,), gpus=[("NVIDIA Tegra X1", (5, 3), 2)])
    message = (
        r"expected tegra-x1 \(NVIDIA Tegra X1, 1 multiprocessors\), found .*"
        r"tegra-x1 \(NVIDIA Tegra X1, 2 multiprocessors\)"
    )
    with pytest.raises(DeviceError, match=message):
        require(NANO)
    extension(architectures=(53,), gpus=[("NVIDIA Tegra X1", (5, 3), 1)])
    assert require(NANO).cores == 1


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Four cores of two threads each: CPUs 0 and 4 share a core, and so on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(tmp_path, f"{folder}/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def test_threads_of_a_core_count_once(machine):
    assert usable_cores(str(machine)) == 4


def test_affinity_limits(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 5})
    assert usable_cores(str(machine)) == 2


def test_without_topology_every_cpu_is_a_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert usable_cores(str(tmp_path)) == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)],
)
def test_quota_of_cgroup_2(machine, quota, expected):
    write(machine, "proc/self/cgroup", "0::/a/b\n")
    write(machine, "sys/fs/cgroup/a/cpu.max", quota)
    write(machine, "sys/fs/cgroup/a/b/cpu.max", "max 100000")
    assert usable_cores(str(machine)) == expected


def test_quota_of_a_container_whose_path_is_not_visible(machine):
    write(machine, "proc/self/cgroup", "0::/../../outside\n")
    write(machine, "sys/fs/cgroup/cpu.max", "300000 100000")
    assert usable_cores(str(machine)) == 3


@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("200000", 2)])
def test_quota_of_cgroup_1(machine, quota, expected):
    write(machine, "proc/self/cgroup", "4:memory:/m\n2:cpu,cpuacct:/docker/1\n1:cpuset:/\n0::/\n")
    write(machine, "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us", quota)
    write(machine, "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000")
    assert usable_cores(str(machine)) == expected


def test_model_name(tmp_path):
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU 9\nflags : avx2\n")
    assert cpu_title(str(tmp_path)) == "Some CPU 9"
