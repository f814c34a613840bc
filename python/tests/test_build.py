"""What the extension is compiled with and for, and that it needs neither a GPU nor a driver."""

import json
import locale
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pybind11
import pytest

from packedconv import _core
from packedconv.evidence import nvrtc
from packedconv.evidence.instructions import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CUDA = _core.build_info()["cuda"]
ARCHITECTURES = _core.build_info()["cuda_architectures"]

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")
needs_cuda = pytest.mark.skipif(CUDA is None, reason="the extension is built without CUDA")


def run(*command, **options):
    return subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )


def python(code, **environment):
    """Output of code in a process of its own, with this checkout's package."""
    done = run(
        *(sys.executable, "-c", code),
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def configure(folder, *options, **environment):
    return run(
        *("cmake", "-S", CSRC, "-B", folder, "-G", "Ninja"),
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *options,
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            **environment,
        },
    )


def kernels_of(path):
    """Mangled names under which a built module knows its kernels."""
    names = re.findall(rb"\0(_ZN10packedconv\w*_kernel\w*)(?=\0)", Path(path).read_bytes())
    return sorted({name.decode() for name in names})


# The module in use.


@needs_nvcc
def test_a_cuda_compiler_is_used_where_there_is_one():
    release = re.search(r"release (\d+\.\d+)", run(find_nvcc(), "--version").stdout)
    assert release[1] == CUDA
    if int(CUDA.split(".")[0]) >= 13:
        assert ARCHITECTURES == [80, 90]


def test_without_a_cuda_compiler_nothing_is_compiled_for_a_gpu():
    assert (CUDA is None) == (ARCHITECTURES == [])


@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd")
def test_the_module_needs_no_cuda_library():
    libraries = run("ldd", _core.__file__).stdout
    assert "libc.so" in libraries
    assert "libcuda" not in libraries


def test_without_a_gpu_only_the_cpu_is_listed():
    """Also where there is one: none is visible. Without a driver it is the same call that fails."""
    code = (
        "import json, packedconv\n"
        "from packedconv import _core\n"
        "print(json.dumps([_core.gpus(), [device.name for device in packedconv.devices()]]))\n"
    )
    assert json.loads(python(code, CUDA_VISIBLE_DEVICES="")) == [[], ["cpu"]]


@needs_cuda
def test_machine_code_for_every_architecture():
    """By cuobjdump, which reads the finished module."""
    from packedconv.evidence import instructions

    cuobjdump = instructions._tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    for listing, suffix in (("--list-elf", "cubin"), ("--list-ptx", "ptx")):
        found = re.findall(
            rf"sm_(\d+)\.{suffix}$", run(cuobjdump, listing, _core.__file__).stdout, re.M
        )
        assert sorted({int(number) for number in found}) == ARCHITECTURES


def test_the_stamp_is_of_the_module(tmp_path):
    import hashlib

    path = tmp_path / "stamp.json"
    done = run(
        *(sys.executable, ROOT / "scripts" / "stamp.py", "--out", path),
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )
    assert done.returncode == 0, done.stdout
    digest = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()
    assert json.loads(path.read_text()) == {**_core.build_info(), "sha256": digest}


# Device code for a Jetson Nano (sm_53), which nvcc 13 no longer compiles for.


@pytest.fixture(scope="module")
def compile_with_nvrtc():
    """compile_kernels, or a skip that says what to install."""

    def call(*arguments, **options):
        try:
            return nvrtc.compile_kernels(*arguments, **options)
        except nvrtc.NotInstalledError as error:
            pytest.skip(str(error))

    return call


def test_compiling_leaves_the_locale_alone(compile_with_nvrtc, tmp_path):
    source = tmp_path / "small.cu"
    source.write_text("__global__ void small_kernel(int* value) { *value = 1; }")
    before = locale.getpreferredencoding()
    compile_with_nvrtc(53, source)
    assert locale.getpreferredencoding() == before


def test_every_kernel_compiles_for_a_jetson_nano(compile_with_nvrtc):
    """The same kernels as in the module, where that has any, at the Nano's C++14."""
    kernels = nvrtc.kernels_in(compile_with_nvrtc(53))
    assert len(kernels) > 60
    for kind in ("column_kernel", "paper_kernel", "paper_kernel_any_shape", "general_kernel"):
        assert any(kind in name for name in kernels)
    if CUDA is not None:
        assert kernels == kernels_of(_core.__file__)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("if constexpr (true) *x = 1;", "expected a"),
        ("*x = __reduce_add_sync(~0u, 1);", "__reduce_add_sync"),
    ],
    ids=["C++17", "sm_80"],
)
def test_what_a_jetson_nano_lacks_is_an_error(compile_with_nvrtc, tmp_path, statement, message):
    """C++17, and instructions of newer GPUs: the compilation above can fail."""
    source = tmp_path / "small.cu"
    source.write_text(f"__global__ void small_kernel(int* x) {{ {statement} }}")
    with pytest.raises(nvrtc.CompilationError, match=message):
        compile_with_nvrtc(53, source)
    source.write_text("__global__ void small_kernel(int* x) { *x = 1; }")
    assert nvrtc.kernels_in(compile_with_nvrtc(53, source)) == ["_Z12small_kernelPi"]


# Host code at C++14, all that a Jetson Nano compiles but for the kernels.


@pytest.mark.parametrize("compiler", ["c++", "g++-11"])
def test_host_code_is_cpp14(compiler, tmp_path):
    """Warnings are errors. Without optimization, since that hides what has no definition."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    done = configure(
        tmp_path,
        *("-DPACKEDCONV_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Debug"),
        *(f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_CXX_FLAGS=-O0 -g0 -Wpedantic -Werror"),
    )
    assert done.returncode == 0, done.stdout
    done = run("cmake", "--build", tmp_path)
    assert done.returncode == 0, done.stdout

    (module,) = tmp_path.glob("_core.*.so")
    code = (
        "import importlib.util, json\n"
        f"spec = importlib.util.spec_from_file_location('_core', {str(module)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps([module.build_info(), module.gpus()]))\n"
    )
    info, gpus = json.loads(python(code))
    assert info["cplusplus"] == 201402
    assert (info["cuda"], info["cuda_architectures"], gpus) == (None, [], [])


def test_the_cpu_kernel_compiles_for_any_processor(tmp_path):
    """The one instruction set that is built where the processor is not an x86-64."""
    done = run(
        *("c++", "-std=c++14", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-c"),
        *("-DPACKEDCONV_ISA=generic", "-DPACKEDCONV_LANES=4", CSRC / "cpu" / "kernel.cpp"),
        *("-o", tmp_path / "kernel.o"),
    )
    assert done.returncode == 0, done.stdout


# What CMake says.


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (["-DPACKEDCONV_CUDA=YES"], {}, "expected AUTO, ON, OFF or EMULATED, got YES"),
        (
            ["-DPACKEDCONV_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND"],
            {"CUDACXX": "", "PATH": "/usr/bin:/bin"},
            "no working CUDA compiler; set CUDACXX, or use AUTO",
        ),
    ],
    ids=["unknown", "no compiler"],
)
def test_a_build_that_cannot_be(tmp_path, options, environment, message):
    if "PATH" in environment:
        environment = {**environment, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        if shutil.which("nvcc", path=environment["PATH"]):
            pytest.skip("nvcc is in a folder that the build cannot do without")
    done = configure(tmp_path, *options, **environment)
    assert done.returncode != 0
    assert message in re.sub(r"\s+", " ", done.stdout)


@needs_nvcc
@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        ("53", r"CUDA [\d.]+ compiles for 75 and later, got 53; such a GPU needs CUDA 12 or older"),
        ("80;native", "expected numbers such as 80, got native"),
    ],
    ids=["53", "native"],
)
def test_an_architecture_that_cannot_be(tmp_path, architectures, message):
    if architectures == "53" and CUDA is not None and int(CUDA.split(".")[0]) < 13:
        pytest.skip(f"CUDA {CUDA} compiles for sm_53")
    done = configure(tmp_path, f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
    assert done.returncode != 0
    assert re.search(message, re.sub(r"\s+", " ", done.stdout)), done.stdout


@needs_nvcc
@needs_cuda
def test_a_build_folder_is_configured_again(tmp_path):
    """What is stored in it neither decides against a change nor is lost without one."""

    def architectures(*options):
        done = configure(tmp_path, *options)
        assert done.returncode == 0, done.stdout
        return set(re.findall(r"arch=compute_(\d+)", (tmp_path / "build.ninja").read_text()))

    every, last = {str(number) for number in ARCHITECTURES}, str(ARCHITECTURES[-1])
    assert architectures("-DCMAKE_CUDA_COMPILER=NOTFOUND") == every
    assert architectures(f"-DCMAKE_CUDA_ARCHITECTURES={last}") == {last}
    assert architectures() == {last}
    assert architectures("-DPACKEDCONV_CUDA=OFF") == set()
    assert architectures("-DPACKEDCONV_CUDA=ON") == {last}


# Measuring without the workflow (envs/jetson-nano.md).


@pytest.fixture
def bare_machine(tmp_path):
    """The script beside settings of two layers, and a Python that writes what it is told."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "build").mkdir()
    shutil.copy(ROOT / "scripts" / "measure_here.sh", tmp_path / "scripts")
    results = tmp_path / "results" / "tegra-x1" / "paper"
    results.mkdir(parents=True)
    settings = {"device": {"kind": "cuda"}, "layers": [{"name": "oc32"}, {"name": "oc40"}]}
    (results / "settings.json").write_text(json.dumps(settings))
    interpreter = tmp_path / "python3"
    interpreter.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "OUTPUTS = ['--out', '--manifest', '--facts', '--errors', '--peaks']\n"
        "if sys.argv[1].endswith('collect.py'):\n"
        "    OUTPUTS.remove('--facts')\n"
        "if sys.argv[1] == '-c':\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        "with open('commands', 'a') as file:\n"
        "    print(json.dumps(sys.argv[1:]), file=file)\n"
        "if os.environ.get('FAIL', 'nothing') in sys.argv[1]:\n"
        "    sys.exit('killed')\n"
        "for option, value in zip(sys.argv[2:], sys.argv[3:]):\n"
        "    if option in OUTPUTS:\n"
        "        with open(value, 'w') as file:\n"
        "            file.write('made')\n"
    )
    interpreter.chmod(0o755)

    def measure(**environment):
        """Exit status, and the calls of scripts by name, each with its options."""
        log = tmp_path / "commands"
        log.unlink(missing_ok=True)
        done = run(
            *(tmp_path / "scripts" / "measure_here.sh", "results/tegra-x1/paper"),
            cwd=tmp_path,
            env={**os.environ, "PYTHON": str(interpreter), **environment},
        )
        calls = [json.loads(line) for line in log.read_text().splitlines()]
        return done.returncode, [(Path(script).stem, options_of(rest)) for script, *rest in calls]

    return measure, results


def options_of(arguments):
    """Values by option: one as a text, several as a list."""
    options = {}
    for argument in arguments:
        if argument.startswith("--"):
            values = options[argument] = []
        else:
            values.append(argument)
    return {name: found[0] if len(found) == 1 else found for name, found in options.items()}


def test_a_run_without_the_workflow(bare_machine):
    measure, results = bare_machine
    status, calls = measure()
    assert status == 0
    layers = [("weights", "oc32"), ("check", "oc32"), ("weights", "oc40"), ("check", "oc40")]
    assert [(name, options.get("--layer")) for name, options in calls] == [
        ("stamp", None),
        *layers,
        ("ceilings", None),
        *(("bench", "oc32"), ("bench", "oc40")),
        *((name, "oc32") for name in ("ablation", "fixed_cost")),
        *((name, "oc40") for name in ("ablation", "fixed_cost")),
        ("collect", None),
    ]
    collected = calls[-1][1]
    for option, step, kind in (
        ("--bench", "bench", "csv"),
        ("--facts", "bench", "json"),
        ("--checks", "check", "csv"),
    ):
        paths = [results / step / f"{layer}.{kind}" for layer in ("oc32", "oc40")]
        assert [Path(path).resolve() for path in collected[option]] == paths
    made = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}
    assert made == {
        *("settings.json", "ceilings.csv", "ceilings.json"),
        *("samples.csv", "errors.csv", "peaks.json"),
        *(f"weights/{layer}.{kind}" for layer in ("oc32", "oc40") for kind in ("npz", "json")),
        *(
            f"{step}/{layer}.{kind}"
            for step in ("check", "bench", "ablation", "fixed_cost")
            for layer in ("oc32", "oc40")
            for kind in ("csv", "json")
        ),
    }


@pytest.mark.parametrize(
    "changes", [{"device": {"kind": "cpu"}}, {"contenders": "paper-protocol"}], ids=str
)
def test_experiments_are_about_all_contenders_of_a_gpu(bare_machine, changes):
    measure, results = bare_machine
    settings = json.loads((results / "settings.json").read_text())
    (results / "settings.json").write_text(json.dumps({**settings, **changes}))
    status, calls = measure()
    assert status == 0
    assert not {"ablation", "fixed_cost"} & {name for name, _ in calls}
    assert not (results / "ablation").exists()


def test_another_mapping_is_another_fixed_cost(bare_machine):
    measure, _ = bare_machine
    measure()
    # What stands in for bench.py writes its facts again.
    again = ["stamp", "bench", "bench", "fixed_cost", "fixed_cost", "collect"]
    assert [name for name, _ in measure()[1]] == again


def test_the_scripts_know_the_options(bare_machine):
    """And none is missing: with --help in their place the scripts are run for real."""
    measure, _ = bare_machine
    _, calls = measure()
    for name, options in calls:
        done = run(
            *(sys.executable, ROOT / "scripts" / f"{name}.py", "--help"),
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "COLUMNS": "1000"},
        )
        usage = done.stdout.split("\n\n")[0]
        required = set(re.findall(r"(?<!\[)(--[a-z-]+)", re.sub(r"\[[^]]*\]", "", usage)))
        assert required <= set(options)
        assert all(option in usage for option in options)


def test_a_killed_run_goes_on(bare_machine):
    measure, results = bare_machine
    status, calls = measure(FAIL="bench")
    assert status != 0
    assert calls[-1][0] == "bench"
    status, calls = measure()
    assert status == 0
    # bench.py knows by itself what has been measured.
    experiments = ["ablation", "fixed_cost"]
    again = ["stamp", "bench", "bench", *experiments, *experiments, "collect"]
    assert [name for name, _ in calls] == again
    # Another build: nothing that depends on it is kept.
    (results.parents[2] / "build" / "extension.json").write_text("of another build")
    os.utime(results / "settings.json", (0, 0))
    status, calls = measure()
    assert [name for name, _ in calls].count("check") == 2
    assert [name for name, _ in calls].count("ceilings") == 1


def test_other_measuring_code_measures_again(bare_machine):
    measure, results = bare_machine
    package = results.parents[2] / "python" / "packedconv"
    (package / "bench").mkdir(parents=True)
    (package / "bench" / "protocol.py").write_text("rounds")
    (package / "plots").mkdir()
    assert all("--force" not in options for _, options in measure()[1])

    def changed(name):
        """What is called, and what is forced, after a change of this file."""
        before = time.time() - 60
        for path in (*results.rglob("*"), *(results.parents[2] / "build").iterdir()):
            os.utime(path, (before, before))
        (package / name).write_text("changed")
        calls = measure()[1]
        forced = [name for name, options in calls if "--force" in options]
        return [name for name, _ in calls], forced

    names, forced = changed("bench/protocol.py")
    assert (names.count("check"), names.count("ceilings"), names.count("weights")) == (2, 1, 2)
    assert forced == ["bench", "bench"]
    for other in ("plots/style.py", "bench/rungs.py", "bundle.py"):
        names, forced = changed(other)
        assert not {"check", "ceilings", "weights"} & set(names), other
        assert forced == []


def test_the_measuring_code_is_that_of_the_workflow():
    script = (ROOT / "scripts" / "measure_here.sh").read_text()
    workflow = (ROOT / "Snakefile").read_text()

    def of_the_workflow(name):
        (found,) = re.findall(rf"^{name} = \(?([^()=]*?)\)?\n(?=\S)", workflow, re.MULTILINE)
        return " ".join(re.findall(r'"([^"]*)"', found)).split()

    (modules,) = re.findall(r'^modules="([^"]*)"', script, re.MULTILINE)
    assert modules.split() == of_the_workflow("MEASURE_MODULES")
    left_out = re.findall(r"(\w+)\.py(?= \||\) ;;)", script)
    assert left_out == [*of_the_workflow("LISTED_MODULES"), *of_the_workflow("PEER_MODULES")]


def test_a_run_without_settings_says_so(bare_machine):
    _, results = bare_machine
    (results / "settings.json").unlink()
    done = run(
        *(results.parents[2] / "scripts" / "measure_here.sh", "results/tegra-x1/paper"),
        cwd=results.parents[2],
    )
    assert done.returncode == 1
    assert re.search(r"error: no .*settings\.json; see envs/jetson-nano\.md", done.stdout)
