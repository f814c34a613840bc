"""What the doctor finds, and the claim matrix."""

import base64
import contextlib
import csv
import http.server
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from packedconv import announce
from packedconv.bench.lock import measurement_lock
from packedconv.doctor import __main__ as doctor
from packedconv.doctor import gpu, machine, matrix, network
from packedconv.doctor.findings import MISSING, OK, WARNING, Finding, line

ROOT = Path(__file__).parents[2]
FILES = gpu.device_files(str(ROOT / "config/devices"))


def place(root, files):
    """Write files below a root: texts by path."""
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def test_a_finding_is_one_line():
    assert line(Finding(OK, "load", "3 % in use")) == "ok       load             3 % in use"
    text = line(Finding(MISSING, "GPU", "none", "--config device=cpu"))
    assert text == "missing  GPU              none. Mend it with: --config device=cpu"


def meminfo(total, available):
    return f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n"


@pytest.mark.parametrize(
    ("available", "state"), [(8 * 10**9, OK), (2 * 10**9, WARNING), (10**9, MISSING)]
)
def test_memory(tmp_path, available, state):
    place(tmp_path, {"proc/meminfo": meminfo(16 * 10**9, available)})
    found = machine.memory(str(tmp_path))
    assert found.state == state
    assert f"{available / 1e9:.1f} of 16.0 GB free" in found.found
    assert bool(found.mend) == (state != OK)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_control_group(tmp_path, version):
    """The group's limit holds, and pages of files in it can be had back."""
    folder = tmp_path / "sys/fs/cgroup" / ("memory/box" if version == 1 else "box")
    place(
        tmp_path,
        {
            "proc/meminfo": meminfo(16 * 10**9, 8 * 10**9),
            "proc/self/cgroup": "4:memory:/box\n" if version == 1 else "0::/box\n",
        },
    )
    folder.mkdir(parents=True)
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    (folder / limit).write_text(f"{4 * 10**9}\n")
    (folder / used).write_text(f"{3 * 10**9}\n")
    assert machine.memory(str(tmp_path)).state == MISSING
    (folder / "memory.stat").write_text(f"inactive_file {10**9}\ntotal_inactive_file {10**9}\n")
    found = machine.memory(str(tmp_path))
    assert found.state == WARNING
    assert "may take 2.0 GB more" in found.found
    (folder / limit).write_text("max\n")
    assert machine.memory(str(tmp_path)).state == OK


def test_cpus_under_a_quota(tmp_path):
    assert machine.cpus(str(tmp_path)).state == OK
    place(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": ""})
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU: a quota of one takes nothing away")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    found = machine.cpus(str(tmp_path))
    assert found.state == WARNING
    assert "1 usable cores" in found.found
    assert "--cpuset-cpus" in found.mend


def test_held_back_cpus(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    found = machine.cpus()
    assert found.state == OK
    assert "of 64 logical CPUs (taskset or a cpuset holds the others back)" in found.found


def test_load(monkeypatch):
    """The share in use is what passed between two looks, and the busiest process is named."""
    looks = iter([(100.0, 1000.0), (190.0, 1100.0)])
    processes = iter([{1: 5.0, 4242: 10.0}, {1: 5.0, 4242: 95.0, os.getpid(): 900.0}])
    monkeypatch.setattr(machine, "_cpu_times", lambda root: next(looks))
    monkeypatch.setattr(machine, "_process_times", lambda root: next(processes))
    found = machine.load(seconds=0.0)
    assert found.state == WARNING
    assert "90% of the CPUs in use" in found.found
    assert "busiest is process 4242" in found.found
    monkeypatch.setattr(machine, "_process_times", lambda root: {})
    for busy, state in ((0.1, OK), (0.3, WARNING)):
        looks = iter([(0.0, 0.0), (busy, 1.0)])
        assert machine.load(seconds=0.0).state == state


def test_cpu_times(tmp_path):
    """Waiting for disks is idle, and guests are not counted twice."""
    place(tmp_path, {"proc/stat": "cpu  10 20 30 400 50 6 7 8 10 20\ncpu0 1 1 1 1\n"})
    assert machine._cpu_times(str(tmp_path)) == (81.0, 531.0)


def test_process_times(tmp_path):
    fields = " ".join(str(number) for number in range(4, 30))
    place(tmp_path, {"proc/77/stat": f"77 (a ) name) S {fields}\n"})
    # Fields 14 and 15 of proc(5).
    assert machine._process_times(str(tmp_path)) == {77: 14 + 15}


def test_equal_bursts_are_stable():
    found = machine.judge_bursts([1.0e-3] * 95 + [1.15e-3] * 5)
    assert found.state == OK
    assert "100 equal bursts of 1.0 ms: the median 0% above the fastest" in found.found


@pytest.mark.parametrize(
    "times",
    [
        [1.0e-3] * 40 + [1.1e-3] * 60,  # two clocks
        [1.0e-3] * 90 + [2.0e-3] * 10,  # somebody else takes a turn
    ],
)
def test_bursts_that_spread(times):
    assert machine.judge_bursts(times).state == WARNING


def test_bursts_take_as_long_as_they_are_told():
    times = machine._bursts(0.05)
    assert sum(times) > 0.03
    assert min(times) > 0


def test_no_bursts_beside_a_measurement():
    _, stability = machine.clocks([1234], seconds=1e9)
    assert stability.state == OK
    assert "not tried" in stability.found


def governor(root, *names):
    for cpu, name in enumerate(names):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(name + "\n")


def test_governor(tmp_path):
    root = tmp_path / "fast"
    governor(root, "performance", "performance")
    place(root, {"sys/devices/system/cpu/intel_pstate/no_turbo": "1\n"})
    found = machine._governor(str(root))
    assert (found.state, found.found) == (OK, "governor performance; turbo off")
    root = tmp_path / "mixed"
    governor(root, "powersave", "performance")
    place(root, {"sys/devices/system/cpu/cpufreq/boost": "1\n"})
    found = machine._governor(str(root))
    assert found.state == WARNING
    assert "governor performance and powersave; turbo on" in found.found
    assert "cpupower" in found.mend


def test_virtual_machine(tmp_path):
    place(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu hypervisor avx2\n"})
    found = machine._governor(str(tmp_path))
    assert found.state == OK
    assert "a virtual machine" in found.found
    place(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu avx2\n"})
    assert "virtual" not in machine._governor(str(tmp_path)).found


def test_measurement_lock(tmp_path):
    assert machine.measuring(FILES, str(tmp_path)) == {}
    assert machine.measurement({}).state == OK
    with measurement_lock("h200", str(tmp_path)):
        holders = machine.measuring(FILES, str(tmp_path))
        assert machine.measuring(["cpu"], str(tmp_path)) == {}
    assert holders == {"h200": os.getpid()}
    found = machine.measurement(holders)
    assert found.state == WARNING
    assert f"process {os.getpid()} (h200)" in found.found
    assert machine.measuring(FILES, str(tmp_path)) == {}


def test_device_files():
    """Read without YAML, they are what YAML reads."""
    from packedconv import config

    assert sorted(FILES) == config.device_names(ROOT)
    for name, found in FILES.items():
        device = config.load_device(ROOT, name)
        assert (found.name, found.kind) == (name, device["kind"])
        assert found.match == device.get("match", "")
        assert found.capability == device.get("gpu", {}).get("compute_capability", "")


SMI = """#!{shell}
if [[ $* == *query* ]]; then
    {query}
else
    echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4 |"
fi
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """An empty PATH; returns a function that puts a bash script there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDACXX", raising=False)

    def put(name, text):
        path = folder / name
        path.write_text(text.replace("{shell}", "/bin/bash"))
        path.chmod(0o755)
        return path

    return put


def test_a_gpu_that_a_file_names(tools, tmp_path):
    query = 'echo "NVIDIA H200, 550.54.15"; echo "NVIDIA L4, 550.54.15"'
    tools("nvidia-smi", SMI.replace("{query}", query))
    found = gpu.gpus(str(tmp_path))
    assert found == gpu.Gpus(["NVIDIA H200", "NVIDIA L4"], "550.54.15", "12.4")
    assert gpu.judge_gpus(found, FILES["h200"], FILES.values()).state == OK
    beside = gpu.judge_gpus(found, FILES["cpu"], FILES.values())
    assert beside.state == OK
    assert "NVIDIA H200 (device=h200) and NVIDIA L4 (no file" in beside.found
    assert "driver 550.54.15, for CUDA up to 12.4" in beside.found
    other = gpu.judge_gpus(found, FILES["a100-sxm4-40gb"], FILES.values())
    assert other.state == MISSING
    assert "expected NVIDIA A100-SXM4-40GB (device=a100-sxm4-40gb)" in other.found
    assert other.mend == "--config device=h200 or device=cpu"


def test_no_gpu(tools, tmp_path):
    found = gpu.gpus(str(tmp_path))
    assert found == gpu.Gpus([])
    assert gpu.judge_gpus(found, FILES["cpu"], FILES.values()).state == OK
    missing = gpu.judge_gpus(found, FILES["h200"], FILES.values())
    assert missing.state == MISSING
    assert missing.found == "none; expected NVIDIA H200 (device=h200)"


def test_a_gpu_without_its_driver(tools, tmp_path):
    place(
        tmp_path,
        {
            "sys/bus/pci/devices/d0/vendor": "0x10de\n",
            "sys/bus/pci/devices/d0/class": "0x030200\n",
        },
    )
    assert gpu.gpus(str(tmp_path)).trouble == "no nvidia-smi in PATH"
    tools("nvidia-smi", "#!{shell}\necho NVIDIA-SMI has failed; exit 9\n")
    found = gpu.gpus(str(tmp_path))
    assert found.trouble == 'nvidia-smi says "NVIDIA-SMI has failed"'
    assert gpu.judge_gpus(found, FILES["cpu"], FILES.values()).state == WARNING
    judged = gpu.judge_gpus(found, FILES["h200"], FILES.values())
    assert judged.state == MISSING
    assert "has failed" in judged.found


def test_jetson_nano(tools, tmp_path):
    model = tmp_path / "proc/device-tree/model"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"NVIDIA Jetson Nano Developer Kit\0")
    assert gpu.judge_gpus(gpu.gpus(str(tmp_path)), FILES["tegra-x1"], FILES.values()).state == OK


def nvcc(tools, release, name="nvcc"):
    return tools(name, f'#!{{shell}}\necho "Cuda compilation tools, release {release}, V1"\n')


def test_cuda_compiler(tools, monkeypatch):
    none = gpu.Gpus([])
    assert gpu.cuda_compiler(FILES["cpu"], none).state == WARNING
    assert gpu.cuda_compiler(FILES["h200"], none).state == MISSING
    path = nvcc(tools, "12.4")
    for device in ("cpu", "h200", "tegra-x1"):
        found = gpu.cuda_compiler(FILES[device], none)
        assert (found.state, found.found) == (OK, f"CUDA 12.4 ({path})")
    monkeypatch.setenv("CUDACXX", str(nvcc(tools, "13.0", "another")))
    assert "CUDA 13.0" in gpu.cuda_compiler(FILES["cpu"], none).found


@pytest.mark.parametrize(
    ("release", "device", "driver", "expected"),
    [
        ("13.0", "tegra-x1", "", "6.5 or newer, older than 13.0, for compute capability 5.3"),
        ("11.4", "h200", "", "11.8 or newer, for compute capability 9.0"),
        ("13.0", "h200", "12.4", "CUDA 12.4 or older, which is what the driver supports"),
    ],
)
def test_a_cuda_compiler_that_does_not_suit(tools, release, device, driver, expected):
    nvcc(tools, release)
    found = gpu.cuda_compiler(FILES[device], gpu.Gpus([], cuda=driver))
    assert found.state == MISSING
    assert expected in found.found


def test_a_broken_cuda_compiler(tools):
    tools("nvcc", "#!{shell}\necho cannot find cicc; exit 1\n")
    assert gpu.cuda_compiler(FILES["cpu"], gpu.Gpus([])).state == WARNING
    found = gpu.cuda_compiler(FILES["h200"], gpu.Gpus([]))
    assert found.state == MISSING
    assert "cannot find cicc" in found.found


@pytest.fixture
def no_pip_settings(tmp_path, monkeypatch):
    """Neither files nor variables of pip, nor a proxy."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@contextlib.contextmanager
def index(status):
    """A package index on this machine that answers with a status; yields its address and pages."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html></html>")

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_package_index(no_pip_settings):
    with index(200) as (url, asked):
        assert network.package_index(url).state == OK
        assert asked == [("/simple/pip/", None)]
    with index(403) as (url, asked):
        found = network.package_index(url.replace("http://", "http://user:secr%40t@"))
        assert found.state == WARNING
        assert "127.0.0.1 answers with HTTP 403" in found.found
        assert asked == [("/simple/pip/", "Basic " + base64.b64encode(b"user:secr@t").decode())]
    # Nobody listens there any more.
    found = network.package_index(url)
    assert found.state == MISSING
    assert "127.0.0.1 does not answer" in found.found
    assert "HTTPS_PROXY" in found.mend


def test_pip_settings(no_pip_settings, monkeypatch):
    root = no_pip_settings
    assert network.pip_settings(str(root)) == {}
    place(root, {"etc/pip.conf": "[global]\nindex-url = https://one/simple\n"})
    assert network.pip_settings(str(root)) == {"index-url": "https://one/simple"}
    place(root, {".config/pip/pip.conf": "[install]\nindex-url = https://two/simple\n"})
    assert network.pip_settings(str(root))["index-url"] == "https://two/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://three/simple")
    assert network.pip_settings(str(root))["index-url"] == "https://three/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    found = network.package_index()
    assert found.state == OK
    assert "/wheels" in found.found


def options(*arguments):
    return doctor.arguments(arguments)


def test_device_of_the_options(tmp_path):
    few = tmp_path / "few.yaml"
    few.write_text("run: few\ndevice: h200  # the one in the rack\n")
    assert doctor.device_name(options()) == "cpu"
    assert doctor.device_name(options("--configfile", str(few))) == "h200"
    both = options("--configfile", str(few), "--config", "seed=2", "device=tegra-x1")
    assert doctor.device_name(both) == "tegra-x1"
    with pytest.raises(SystemExit, match="--configfile"):
        doctor.device_name(options("--configfile", str(tmp_path / "none.yaml")))


@pytest.fixture
def healthy(monkeypatch):
    """A machine with nothing to say about, and no CPU time taken."""
    for name in ("memory", "cpus", "load"):
        found = Finding(OK, name, "well")
        monkeypatch.setattr(machine, name, lambda *_, found=found: found)
    monkeypatch.setattr(machine, "clocks", lambda *_: [Finding(OK, "clock stability", "well")])
    monkeypatch.setattr(machine, "measuring", lambda _: {})
    monkeypatch.setattr(gpu, "gpus", lambda: gpu.Gpus([]))
    monkeypatch.setattr(gpu, "cuda_compiler", lambda *_: Finding(WARNING, "CUDA compiler", "none"))
    monkeypatch.setattr(network, "package_index", lambda: Finding(OK, "package index", "answers"))
    monkeypatch.setattr(doctor, "show_matrix", lambda _: True)


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def test_ready(healthy, capsys):
    assert doctor.main([]) == 0
    text = last_line(capsys)
    assert text == (
        "Ready. 1 warning. Next: scripts/artifact smoke (minutes), then scripts/artifact all"
    )
    text = doctor.summary(options("--config", "device=h200", "seed=2"), 0, 0)
    assert "scripts/artifact smoke --config device=h200 (minutes), then" in text
    assert text.endswith("scripts/artifact all --config device=h200 seed=2")


def test_not_set_up(healthy, capsys):
    assert doctor.main(["--environment", "missing", "--config", "seed=2"]) == 0
    text = last_line(capsys)
    assert "2 warnings. The claim matrix needs .venv: scripts/artifact doctor --set-up" in text
    assert "--config seed=2" in text


def test_everything_is_looked_at_when_something_is_missing(healthy, capsys):
    """A missing GPU, beside what the launcher found missing itself."""
    assert doctor.main(["--missing", "2", "--config", "device=h200"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Not ready: 3 missing")
    assert lines[-1].endswith("scripts/artifact doctor --config device=h200")
    names = ("GPU", "CUDA compiler", "measurement lock", "cpus", "load", "clock stability")
    for name in names:
        assert sum(text[9:].startswith(name) for text in lines) == 1, name
    assert doctor.main(["--config", "device=h20"]) == 1
    said = capsys.readouterr().out
    assert "no file config/devices/h20.yaml" in said
    assert "Not ready: 1 missing" in said


def test_a_configuration_that_the_workflow_refuses(capsys):
    assert not doctor.show_matrix(options("--config", "sead=2"))
    assert "sead" in capsys.readouterr().err


@pytest.fixture(scope="module")
def full():
    return matrix.matrix([], str(ROOT))


def test_every_statement_is_in_the_matrix(full):
    plan = announce.plan([], [], str(ROOT))
    assert {row.id: row.here for row in full.rows} == {
        identity: matrix.ANSWERS[answer] for identity, answer in plan.decidable.items()
    }
    for row in full.rows:
        assert bool(row.reason) == (row.here != "decidable"), row.id
        assert (row.minutes is None) == (row.here == "not"), row.id


def row_of(found, identity):
    return next(row for row in found.rows if row.id == identity)


def test_reasons_on_a_cpu(full):
    assert row_of(full, "theory.table1").measured is False
    assert row_of(full, "a100.trend.speedup").reason == "about the NVIDIA A100"
    assert row_of(full, "a100.trend.speedup").tolerance == (
        "rank correlation ≥ 0.9, S 0.90 to 0.98"
    )
    for identity, reason in (
        ("a100.below1.s90.oc256", "not measured in this run: OC 256"),
        ("a100.one_block", "a CPU kernel has no counterpart"),
        ("a100.throughput.sparse.s90", "an absolute throughput belongs to its device"),
        ("nano.trend.speedup", "the statement is about IC 16, 128×128, K 3"),
        ("cited.csrmv.sparse", "a result of another paper, about another library"),
    ):
        row = row_of(full, identity)
        assert row.here == "not"
        assert row.reason.endswith(reason), row


def test_a_measurement_takes_longer_than_arithmetic(full):
    computed, measured = (row_of(full, name).minutes for name in ("theory.table1", "a100.sem"))
    assert computed == round(full.plan.steps["analysis"] / 60, 1)
    assert measured == round(sum(full.plan.steps.values()) / 60, 1)
    assert measured > computed


def test_matrix_of_a_small_run():
    found = matrix.matrix(["--configfile", "config/smoke.yaml"], str(ROOT))
    assert row_of(found, "a100.sem").here == "not"
    assert "3 of 10 rounds of 5 of 40 executions measured" in row_of(found, "a100.sem").reason


def test_matrix_of_the_papers_device(full):
    found = matrix.matrix(["--config", "device=a100-sxm4-40gb"], str(ROOT))
    assert row_of(found, "a100.sem").here == "decidable"
    assert row_of(found, "nano.below_roofs").here == "not"
    decided = sum(row.here == "decidable" for row in found.rows)
    # All but OC 256, of which no run of the defaults knows.
    assert full.elsewhere["NVIDIA A100"] == decided + 1
    assert "NVIDIA A100" not in found.elsewhere


@pytest.mark.parametrize("width", [90, 120])
def test_matrix_in_words(full, width):
    text = matrix.describe(full, width)
    lines = text.splitlines()
    assert max(len(part) for part in lines) <= width
    for row in full.rows:
        assert sum(part.split()[:1] == [row.id] for part in lines) == 1, row.id
    counts = [sum(row.here == answer for row in full.rows) for answer in matrix.ANSWERS.values()]
    assert (
        "{} statements: {} decidable, {} analogue only, {} not.".format(len(full.rows), *counts)
        in lines
    )
    assert "about the NVIDIA A100: a CPU kernel has no counterpart" in text
    assert "\N{NBSP}" not in text


def test_matrix_as_a_table(full, tmp_path):
    path = tmp_path / "matrix.csv"
    matrix.write(full, str(path))
    with open(path, encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["id"] for row in rows] == [row.id for row in full.rows]
    assert rows[0]["minutes"] == str(full.rows[0].minutes)
    assert {row["minutes"] for row in rows if row["here"] == "not"} == {""}


def test_no_torch_and_nothing_written(tmp_path):
    """The checks import nothing but the standard library."""
    code = (
        "import sys\nfrom packedconv.doctor import __main__\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not names & {'torch', 'numpy', 'yaml', 'psutil', 'pandas'}, names"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    subprocess.run([sys.executable, "-B", "-c", code], check=True, cwd=tmp_path, env=environment)
    assert list(tmp_path.iterdir()) == []


def test_launcher_and_doctor_write_the_same_columns():
    """scripts/artifact prints lines of its own, before any Python is known to be there."""
    path = ROOT / "scripts/artifact"
    assert stat.S_IXUSR & path.stat().st_mode
    format_ = next(part for part in path.read_text().splitlines() if "printf '%-8s" in part)
    script = f"say() {{\n{format_}\n}}\nsay ok Python 3.11.7"
    said = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == line(Finding(OK, "Python", "3.11.7")) + "\n"
