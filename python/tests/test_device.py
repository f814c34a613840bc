"""Which devices are at hand, and which cores this process may use."""

import os

import pytest

import packedconv
from packedconv.device import (
    Device,
    DeviceError,
    cpu_title,
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
