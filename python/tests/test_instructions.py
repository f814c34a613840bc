"""Counting instructions: hand-counted text, real machine code, and machines without the tools."""

import os
import pathlib
import runpy
import stat
import subprocess
import sys

import pandas as pd
import pytest

from packedconv.evidence import instructions, nvrtc, sass
from packedconv.evidence.tabular import write_table
from packedconv.script import CheckError

ROOT = pathlib.Path(__file__).resolve().parents[2]

# An outer loop (.L_1) around a main loop (.L_2) of two nonzeros with two rows and a loop of
# one nonzero (.L_4); before them a loop that fills the tile.
SASS = """
	.section	.text._ZN10packedconv13column_kernelILi2ELi1ELi40EEEvi,"ax",@progbits
.text._ZN10packedconv13column_kernelILi2ELi1ELi40EEEvi:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_0:
        /*0010*/                   LDG.E.CONSTANT R2, [R2.64] ;
        /*0020*/                   STS [R0.X4], R2 ;
        /*0030*/              @!P0 BRA `(.L_0) ;
.L_1:
        /*0040*/                   LDS R9, [R8] ;
        /*0050*/               @P1 BRA `(.L_3) ;
.L_2:
        /*0060*/                   LDS.128 R4, [R10] ;
        /*0070*/                   IMAD.IADD R5, R5, 0x1, R3 ;
        /*0080*/                   LDS R12, [R5.X4] ;
        /*0090*/                   LDS R13, [R5.X4+0xa0] ;
        /*00a0*/              @!P2 FFMA R20, R4.reuse, R12, R20 ;
        /*00b0*/                   FFMA R21, R4, R13, R21 ;
        /*00c0*/                   IADD3 R7, R7, R3, RZ ;
        /*00d0*/                   LDS.U R14, [R7.X4] ;
        /*00e0*/                   LDS R15, [R7.X4+0xa0] ;
        /*00f0*/                   FFMA.FTZ R20, R6, R14, R20 ;
        /*0100*/                   FFMA R21, R6, R15, R21 ;
        /*0110*/                   IADD3 R10, R10, 0x10, RZ ;
        /*0120*/                   ISETP.GT.AND P0, PT, R16, 0x3, PT ;
        /*0130*/               @P0 BRA `(.L_2) ;
.L_3:
        /*0140*/               @P3 BRA `(.L_5) ;
.L_4:
        /*0150*/                   LDS.64 R4, [R10] ;
        /*0160*/                   LDS R12, [R5.X4] ;
        /*0170*/                   LDS R13, [R5.X4+0xa0] ;
        /*0180*/                   FFMA R20, R4, R12, R20 ;
        /*0190*/                   FFMA R21, R4, R13, R21 ;
        /*01a0*/               @P0 BRA `(.L_4) ;
.L_5:
        /*01b0*/                   FFMA R20, R20, R9, RZ ;
        /*01c0*/                   STG.E [R2.64], R20 ;
        /*01d0*/               @P4 BRA `(.L_1) ;
        /*01e0*/                   EXIT ;
.L_6:
        /*01f0*/                   BRA `(.L_6);
        /*0200*/                   NOP;
"""
MAIN_LOOP = sass.Loop(
    instructions=14,
    fma=4,
    input_loads=4,
    weight_shared_loads=1,
    weight_global_loads=0,
    branches=0,
    others={"IADD3": 2, "BRA": 1, "IMAD.IADD": 1, "ISETP.GT.AND": 1},
)
NAME = "_ZN10packedconv13column_kernelILi2ELi1ELi40EEEvi"
RESOURCES = f"""
Resource usage:
 Common:
  GLOBAL:0
 Function {NAME}:
  REG:49 STACK:16 SHARED:0 LOCAL:8 CONSTANT[2]:8 CONSTANT[0]:720 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = instructions.Code(SASS, RESOURCES, "a compiler", "a disassembler")


def with_addresses(text):
    """The same code as cuobjdump prints it: addresses in place of labels."""
    (function,) = sass.functions(text).values()
    lines = [f"\t\tFunction : {NAME}"]
    for part in function:
        operands = part.operands if part.target is None else f"{part.target:#x}"
        lines.append(
            f"        /*{part.address:04x}*/ {part.predicate:>6} {part.opcode} {operands} ;"
            f"    /* 0x0000000000007947 */\n{'':60}/* 0x000fea0003800000 */"
        )
    return "\n".join(lines)


def test_the_main_loop_is_counted_as_by_hand():
    (found,) = sass.functions(SASS).items()
    name, parts = found
    assert name == NAME
    assert len(parts) == 33
    assert sass.main_loop(parts) == MAIN_LOOP
    assert MAIN_LOOP.shared_loads == 5


def test_addresses_in_place_of_labels_count_the_same():
    (parts,) = sass.functions(with_addresses(SASS)).values()
    assert sass.main_loop(parts) == MAIN_LOOP


def test_what_the_text_has_is_what_is_counted():
    more = SASS.replace("IADD3 R10, R10, 0x10, RZ ;", "LDG.E R10, [R2.64] ;", 1)
    (parts,) = sass.functions(more).values()
    loop = sass.main_loop(parts)
    assert (loop.weight_global_loads, loop.others["IADD3"]) == (1, 1)
    # A second way back to the head of the loop is a part of it, and a branch inside.
    twice = SASS.replace(
        "/*00c0*/                   IADD3 R7, R7, R3, RZ", "/*00c0*/ @P5 BRA `(.L_2)"
    )
    (parts,) = sass.functions(twice).values()
    loop = sass.main_loop(parts)
    assert (loop.instructions, loop.branches) == (14, 1)


def test_without_a_loop_that_multiplies():
    (parts,) = sass.functions(SASS.replace("FFMA", "FADD")).values()
    assert sass.main_loop(parts) is None
    (parts,) = sass.functions(SASS.replace("LDS", "LDG")).values()
    assert sass.main_loop(parts) is None


def test_a_branch_to_nowhere_is_an_error():
    with pytest.raises(ValueError, match=r"a branch to \.L_9, expected a label"):
        sass.functions(SASS.replace("`(.L_4)", "`(.L_9)"))


def test_resources():
    assert sass.resources(RESOURCES) == {NAME: sass.Resources(49, 16, 8)}


def test_a_row_of_the_table():
    points = [
        instructions.Point("a100", 80, 128, 0.9, (2, 1, 40)),
        instructions.Point("a100", 80, 128, 0.95, (4, 2, 72)),
        instructions.Point("h200", 90, 128, 0.9, (2, 1, 40)),
        instructions.Point("a100", 80, 48, 0.98, None),
    ]
    (row,) = instructions.count_kernels(80, CODE, points)
    expected = {
        "kernel": "column",
        "rows_per_thread": 2,
        "column_groups": 1,
        "pitch": 40,
        "fma_per_nonzero": 2,
        "nonzeros_per_iteration": 2,
        "instructions_per_fma": 14 / 4,
        "others_per_nonzero": (14 - 4 - 4) / 2,
        "shared_loads_per_fma": 5 / 4,
        "registers": 49,
        "stack_bytes": 16,
        "local_bytes": 8,
        "picked": "a100 128 0.90",
    }
    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (CODE._replace(disassembly=SASS.replace("FFMA", "FADD")), "expected a loop"),
        (CODE._replace(disassembly=SASS.replace("@!P2 FFMA", "FADD")), "a multiple of 2 FMAs"),
        (CODE._replace(resources=""), "expected its resource usage, got none"),
        (CODE._replace(disassembly=SASS.replace("Li40E", "")), "expected template parameters"),
        (CODE._replace(disassembly=""), "expected kernels in the code, got none"),
    ],
)
def test_code_that_is_not_understood_is_an_error(code, message):
    with pytest.raises(CheckError, match=message):
        instructions.count_kernels(80, code)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NAME, ("column", {"rows_per_thread": 2, "column_groups": 1, "pitch": 40})),
        (
            "_ZN10packedconv12paper_kernelILi16ELi8ELi2EEEvPKf",
            ("paper", {"col_per_warp": 16, "rows_per_thread": 8, "warps_per_block": 2}),
        ),
        (
            "_ZN10packedconv22paper_kernel_any_shapeILi4ELi1EEEvPKf",
            ("paper, any shape", {"col_per_warp": 4, "rows_per_thread": 1}),
        ),
        ("_ZN10packedconv14general_kernelEPKf", (None, {})),
        ("_Z13column_kernelILi2ELi1ELi40EEvi", (None, {})),
    ],
)
def test_names_of_kernels(name, expected):
    assert instructions.kernel_of(name) == expected


# Real machine code

KERNEL = """
template <int kRows, int kPitch>
__global__ void scratch(const float* x, const unsigned* words, const int* ends, float* y) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) tile[i] = x[i];
  __syncthreads();
  float sums[kRows] = {};
  for (int i = ends[blockIdx.x]; i < ends[blockIdx.x + 1]; ++i) {
    const unsigned word = __ldg(words + i);
    const float* tap = tile + threadIdx.x + (word & 0xffff);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      sums[r] = fmaf(__uint_as_float(word & 0xffff0000u), tap[r * kPitch], sums[r]);
  }
  for (int r = 0; r < kRows; ++r) y[r * 4096 + blockIdx.x * 32 + threadIdx.x] = sums[r];
}
template __global__ void scratch<1, 40>(const float*, const unsigned*, const int*, float*);
template __global__ void scratch<6, 40>(const float*, const unsigned*, const int*, float*);
"""


def need(architecture):
    """The compiler and the disassemblers, or a skip with the reason."""
    nvcc = instructions.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    if f"sm_{architecture}" not in listed.stdout.split():
        pytest.skip(f"nvcc does not compile for sm_{architecture}")
    cuobjdump = instructions._tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("no cuobjdump")
    try:
        return nvcc, instructions.disassembler(architecture), cuobjdump
    except instructions.MissingToolError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", [80, 90])
def test_real_code(architecture, tmp_path):
    nvcc, nvdisasm, cuobjdump = need(architecture)
    source, cubin = tmp_path / "scratch.cu", tmp_path / "scratch.cubin"
    source.write_text(KERNEL)
    command = [nvcc, "-cubin", f"-arch=sm_{architecture}", str(source), "-o", str(cubin)]
    subprocess.run(command, check=True)
    labels = subprocess.run(
        [nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True
    )
    environment = {**os.environ, "PATH": f"{pathlib.Path(nvdisasm).parent}:{os.environ['PATH']}"}
    addresses = subprocess.run(
        [cuobjdump, "-sass", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    used = sass.resources(
        subprocess.run(
            [cuobjdump, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    )
    found = {name: sass.main_loop(part) for name, part in sass.functions(labels.stdout).items()}
    assert found == {
        name: sass.main_loop(part) for name, part in sass.functions(addresses.stdout).items()
    }
    assert set(found) == set(used)
    assert len(found) == 2
    for name, loop in found.items():
        rows = 1 if "ILi1E" in name else 6
        nonzeros, rest = divmod(loop.fma, rows)
        assert rest == 0
        # One load of the input per FMA and one of a weight per nonzero, each seen.
        assert loop.input_loads == loop.fma
        assert loop.weight_global_loads == nonzeros
        counted = loop.fma + loop.shared_loads + loop.weight_global_loads
        assert loop.instructions == counted + sum(loop.others.values())
        assert loop.others["BRA"] == 1
        assert used[name].registers > rows
        assert used[name][1:] == (0, 0)


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_column_kernel_takes_few_instructions_and_spills_nothing(architecture):
    need(architecture)
    core = pytest.importorskip("packedconv._core", reason="the extension is not built")
    if not hasattr(core, "cuda_plan"):
        pytest.skip("the built extension is older than the launch plans")
    rows = pd.DataFrame(
        instructions.count_kernels(
            architecture,
            instructions.machine_code(ROOT, architecture),
            instructions.tile_choices(ROOT),
        ),
        columns=instructions.COLUMNS,
    )
    assert (rows["stack_bytes"] + rows["local_bytes"]).max() == 0
    assert (rows["input_loads"] == rows["fma"]).all()
    paper = rows[rows["kernel"] == "paper"]
    axes = paper[["col_per_warp", "rows_per_thread", "warps_per_block"]].to_numpy().tolist()
    assert sorted(axes) == [
        [c, r, w] for c in (4, 8, 16, 32) for r in (1, 2, 4, 8) for w in (2, 4, 8)
    ]
    picked = rows[rows["picked"] != ""]
    assert set(picked["kernel"]) == {"column"}
    # Every layer of the device at every sparsity has its tile.
    family = {80: "a100", 90: "h200"}[architecture]
    keys = [key for text in picked["picked"] for key in text.split("; ")]
    assert len([key for key in keys if key.startswith(family)]) == 6 * 9
    assert picked["instructions_per_fma"].max() <= 2.4
    assert picked["others_per_nonzero"].max() <= 5
    assert picked["instructions_per_fma"].max() < paper["instructions_per_fma"].min()


# Machines without the tools


def test_without_a_disassembler_there_are_registers_alone():
    code = CODE._replace(disassembly="", disassembler="", missing="no nvdisasm")
    rows = instructions.count_kernels(80, code, [instructions.Point("a", 80, 8, 0.9, (2, 1, 40))])
    frame = pd.DataFrame(rows, columns=instructions.COLUMNS)
    assert frame["registers"].tolist() == [49]
    assert frame["picked"].tolist() == ["a 8 0.90"]
    assert frame["instructions_per_fma"].isna().all()
    assert instructions.is_missing(frame, 80) == "no nvdisasm"
    (part,) = instructions.shown(frame)
    assert part.intro == "a compiler. No instructions counted: no nvdisasm."
    assert part.frame["Spilled bytes"].tolist() == [24]
    assert "Per FMA" not in part.frame
    assert any("spill 24 bytes." in note for note in instructions.notes(frame))


def script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def no_tools(monkeypatch):
    monkeypatch.setattr(instructions, "_tools", lambda name: [])
    monkeypatch.setattr(instructions, "find_nvcc", lambda: None)


def test_without_tools_the_table_says_what_is_missing(no_tools, tmp_path):
    frame = instructions.table(ROOT)
    assert list(frame["architecture"]) == list(instructions.ARCHITECTURES)
    for architecture in instructions.ARCHITECTURES:
        assert "pip install nvidia-cuda-nvdisasm" in instructions.is_missing(frame, architecture)
    out = str(tmp_path / "instructions.csv")
    shown = instructions.shown(frame)
    write_table(frame, out, "Instructions", "tab:i", shown=shown, notes=instructions.notes(frame))
    assert (tmp_path / "instructions.md").read_text().count("pip install nvidia-cuda-nvdisasm") == 3
    again = instructions.read_table(out)
    assert list(again["missing"]) == list(frame["missing"])


def test_the_script_renders_without_tools(no_tools, tmp_path, monkeypatch):
    monkeypatch.setattr(instructions, "tile_choices", lambda root: [])
    out = tmp_path / "instructions.csv"
    monkeypatch.setattr(sys, "argv", ["instructions.py", "--root", str(ROOT), "--out", str(out)])
    runpy.run_path(str(ROOT / "scripts" / "instructions.py"), run_name="__main__")
    assert "no cuobjdump: pip install" in out.read_text()


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(instructions, "find_nvcc", lambda: None)
    monkeypatch.setattr(nvrtc.importlib.metadata, "files", lambda package: None)
    for architecture, words in ((80, "set CUDACXX"), (53, "pip install nvidia-cuda-nvrtc-cu11")):
        with pytest.raises(instructions.MissingToolError, match=words):
            instructions.compile_kernels(ROOT, architecture, str(tmp_path / "cubin"))


def test_source_that_nvrtc_refuses_is_a_fault(monkeypatch, tmp_path):
    def refused(architecture):
        raise nvrtc.CompilationError("nvrtcCompileProgram: 6\nconv2d.cu(3): error: out of luck")

    monkeypatch.setattr(instructions, "find_nvcc", lambda: None)
    monkeypatch.setattr(nvrtc, "compile_kernels", refused)
    monkeypatch.setattr(nvrtc, "version", lambda: "NVRTC 11.8.89")
    with pytest.raises(CheckError, match=r"NVRTC 11\.8\.89 failed for sm_53: .*\n.*out of luck"):
        instructions.compile_kernels(ROOT, 53, str(tmp_path / "cubin"))


def test_an_older_or_newer_disassembler_is_looked_for(monkeypatch, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    new = script(tmp_path / "new", "nvdisasm", "echo \"'SM80', 'SM90'. V13.5.37\"")
    old = script(tmp_path / "old", "nvdisasm", "echo \"'SM53', 'SM80'. V11.8.89\"")
    monkeypatch.setattr(instructions, "_tools", lambda name: [new, old])
    assert instructions.disassembler(80) == new
    assert instructions.disassembler(53) == old
    monkeypatch.setattr(instructions, "_tools", lambda name: [new])
    with pytest.raises(
        instructions.MissingToolError, match=r"nvdisasm 13\.5\.37 does not know sm_53: put"
    ):
        instructions.disassembler(53)


def test_a_compiler_that_fails_is_a_fault(monkeypatch, tmp_path):
    text = 'case $1 in --list*) echo sm_80;; *) echo "conv2d.cu: out of luck" >&2; exit 3;; esac'
    monkeypatch.setenv("CUDACXX", script(tmp_path, "nvcc", text))
    with pytest.raises(CheckError, match=r"status 3.*\n.*out of luck"):
        instructions.compile_kernels(ROOT, 80, str(tmp_path / "cubin"))


def test_another_table_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("architecture,kernel\n80,column\n")
    with pytest.raises(ValueError, match=r"other.csv: expected columns \["):
        instructions.read_table(str(path))


def test_where_a_tile_is_picked_in_words():
    frame = pd.DataFrame(
        {"picked": ["a100 48 0.90; a100 64 0.90; x1 32 0.90", "x1 32 0.95; x1 40 0.90", ""]}
    )
    first, second, none = (instructions._picked_text(text, frame) for text in frame["picked"])
    assert first == "a100: all; x1: OC 32 at S 0.90"
    assert second == "x1: OC 32 at S 0.95; OC 40 at S 0.90"
    assert none == ""
