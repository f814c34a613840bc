"""From source to every figure, table and claim of the paper, with measurements of one device.

build -> weights -> check -> bench -> collect -> figures, tables, claims, audit -> all
"""

import atexit
import glob
import json
import logging
import os
import pathlib
import shlex
import sys
import sysconfig

from snakemake.exceptions import WorkflowError

sys.path.insert(0, os.path.join(workflow.basedir, "python"))

from packedconv import compared
from packedconv import config as configuration
from packedconv import disk
from packedconv import extended as beyond
from packedconv import imported
from packedconv.bench import mnn
from packedconv.imports import imported_modules
from packedconv.report.marks import Report

# A full disk is said once: here, or at the end, when the logs of jobs may be empty and Snakemake
# itself may have stopped. Its own complaints about its log file say nothing more.
logging.raiseExceptions = False
hindrance = disk.hindrance(workflow.basedir)
if hindrance:
    raise WorkflowError(hindrance)
atexit.register(disk.say_full_disks, workflow.basedir)


onstart:
    # For a limit of jobs by time, which nothing here needs, Snakemake would look through all jobs
    # that wait once a second, and once more for every job that has ended: a core that a
    # measurement under way would have to share with it.
    workflow.scheduler.job_rate_limiter = None


configfile: "config/config.yaml"


ROOT = pathlib.Path(workflow.basedir)
# Jobs run in the environment that runs Snakemake, whether or not it is activated, and with
# this checkout's package even where another copy is installed.
for variable, folder in (
    ("PATH", os.path.dirname(sys.executable)),
    ("PYTHONPATH", str(ROOT / "python")),
):
    given = os.environ.get(variable, "")
    if folder not in given.split(os.pathsep):
        os.environ[variable] = os.pathsep.join(filter(None, [folder, given]))

# Caches of fonts stay in the checkout, also where there is no home to write to.
os.environ.setdefault("MPLCONFIGDIR", str(ROOT / "build" / "matplotlib"))

try:
    # An imported run has the settings it was measured with, and is only read.
    SETTINGS, RUN, ORIGIN = imported.find_run(config, ROOT)
    DEVICE, IMPORTED = SETTINGS["device"]["name"], ORIGIN is not None
    STORED = f"results/{DEVICE}/{RUN}"
    # What rules write: nothing in the folder of an imported run.
    RESULTS = f"{STORED}/.unmeasured" if IMPORTED else STORED
    # By table ("layers", "layers_cold", "ladder", "peers") or experiment beyond the paper, and name
    # of a layer: what is measured on a CPU beside the paper's layers.
    LISTED = {
        **configuration.resolve_layer_tables(config, ROOT),
        **beyond.resolve_extended(config, ROOT),
    }
    if IMPORTED:
        LISTED = imported.listing(ROOT / STORED, LISTED)
except ValueError as error:
    raise WorkflowError(str(error)) from None

LAYERS = [layer["name"] for layer in SETTINGS["layers"]]
# How long rendering took, in this checkout.
RENDER_TIMES = f"logs/{DEVICE}/{RUN}/times"
# The default run's figures lie directly in figures/.
FIGURES = "figures" if RUN == configuration.DEFAULT_RUN else f"figures/{RUN}"
REPORT = Report(ROOT, FIGURES, STORED, DEVICE)

DEVICES = {
    name: configuration.load_device(ROOT, name)
    for name in configuration.device_names(ROOT)
}
FAMILIES = {name: device["family"] for name, device in DEVICES.items()}
# Targets that only a GPU has; experiments are no part of the paper's protocol.
CONTENDERS = SETTINGS.get("contenders")
GPU_TABLES = [] if CONTENDERS is None else ["contenders"]
EVERY_EXPERIMENT = ("ablation", "fixed_cost")
EXPERIMENTS = [
    name
    for name in EVERY_EXPERIMENT
    if CONTENDERS == "all" and not (IMPORTED and not os.path.isdir(f"{STORED}/{name}"))
]
# The device family that each panel of the paper shows.
PANELS = {"a": "a100", "b": "tegra-x1"}

PANEL_SCRIPTS = {
    "fig5": "scripts/fig5_speedup.py",
    "fig6": "scripts/fig6_times.py",
    "fig7": "scripts/fig7_measured_roofline.py",
    "fig8": "scripts/fig8_errors.py",
}
DRAWING_SCRIPTS = {
    "fig1": "scripts/fig1_sparse_convolution.py",
    "fig3": "scripts/fig3_thread_mapping.py",
    "fig4": "scripts/fig4_packed_word.py",
}
TABLE_SCRIPTS = {
    "table1": "scripts/table1_arithmetic_intensity.py",
    "table2": "scripts/table2_winograd_a100.py",
    "table3": "scripts/table3_winograd_jetson_nano.py",
    "table4": "scripts/table4_artifacts.py",
    "table6": "scripts/table6_versions.py",
    "audit": "scripts/audit.py",
}

# What a rule's result depends on beside its script: two lists, so that an edit of a plot
# never measures again. How a script reports an error (script.py) changes no result.
PACKAGE = "python/packedconv"
MEASURE_MODULES = (
    "arguments autotune conv cpu cuda device files layer ops packed plan samples_file schedule"
    " seal settings weights"
)
PLOT_MODULES = (
    "arguments device files layer roofline samples_file schedule seal settings weights"
)
# Of layers beside the paper's, and of those beside MNN: the paper's run knows none of them.
LISTED_MODULES = "cpu_experiments cpu_steps experiment rotation rungs spread"
PEER_MODULES = "mnn peers"
LISTED_MEASURE, PEER_MEASURE = (
    [f"{PACKAGE}/bench/{name}.py" for name in names.split()]
    for names in (LISTED_MODULES, PEER_MODULES)
)
MEASURE_SOURCES = [
    *sorted({*glob.glob(f"{PACKAGE}/bench/*.py")} - {*LISTED_MEASURE, *PEER_MEASURE}),
    *(f"{PACKAGE}/{name}.py" for name in MEASURE_MODULES.split()),
]
PLOT_SOURCES = [
    *sorted(glob.glob(f"{PACKAGE}/plots/*.py")),
    *sorted(glob.glob(f"{PACKAGE}/evidence/*.py")),
    *(f"{PACKAGE}/{name}.py" for name in PLOT_MODULES.split()),
    # What the spread of rounds is, and the names of rungs.
    *(f"{PACKAGE}/bench/{name}.py" for name in ("rungs", "spread")),
    "figures/packedconv.mplstyle",
    "config/schema/paper.schema.yaml",
]
# What the configuration is.
CONFIG_SOURCES = [f"{PACKAGE}/{name}.py" for name in ("config", "run_names")]
# What a packed weight is.
PACKING = [f"{PACKAGE}/{name}.py" for name in ("arguments", "packed", "schedule")]
# Of experiments that are checked against the ceilings as a run's layers are.
LISTED_SOURCES = [*PLOT_SOURCES, f"{PACKAGE}/collect.py"]


# Of an experiment beyond the paper, which nothing else depends on: what its module imports.
def beyond_sources(side, name):
    path = f"{PACKAGE}/{side}/extended/{name}.py"
    imported = imported_modules(ROOT / path)
    return [path, *sorted(str(found.relative_to(ROOT)) for found in imported)]


# Of two results side by side, which nothing else depends on.
COMPARE_SOURCES = [
    *PLOT_SOURCES,
    *sorted(glob.glob(f"{PACKAGE}/evidence/compare/*.py")),
    *sorted(glob.glob(f"{PACKAGE}/plots/compare/*.py")),
]


COMPILED_SOURCES = sorted(
    path for path in glob.glob("csrc/**", recursive=True) if os.path.isfile(path)
)
# Of the table of instructions: the kernels, the choice among them, and what counts.
INSTRUCTION_MODULES = (
    "arguments config files layer packed run_names schedule settings weights"
)
INSTRUCTION_SOURCES = [
    *(f"{PACKAGE}/{name}.py" for name in INSTRUCTION_MODULES.split()),
    *(
        f"{PACKAGE}/evidence/{name}.py"
        for name in ("instructions", "nvrtc", "page", "sass", "tabular")
    ),
    *(path for path in COMPILED_SOURCES if path.startswith("csrc/cuda/")),
    *sorted(glob.glob("csrc/*.h")),
    "csrc/tests/all_kernels.cu",
    *sorted(glob.glob("config/devices/*.yaml")),
    "config/config.yaml",
]


def trio(stem):
    """A figure and its plotted data."""
    return [f"{stem}.{suffix}" for suffix in ("pdf", "png", "csv")]


def table(stem):
    return [f"{stem}.{suffix}" for suffix in ("csv", "md", "tex", "html")]


def figure_files(stem, **more):
    """The same as outputs of a rule, named by their suffixes; the picture is for the report."""
    return REPORT.marked(multiext(stem, pdf=".pdf", png=".png", csv=".csv", **more))


def table_files(stem):
    return REPORT.marked(multiext(stem, csv=".csv", md=".md", tex=".tex", html=".html"))


def results_of(family):
    """Results folders of this run for a device family: measured here, or imported."""
    devices = [name for name in FAMILIES if FAMILIES[name] == family]
    return [
        f"results/{name}/{RUN}"
        for name in devices
        if name == DEVICE or os.path.exists(f"results/{name}/{RUN}/samples.csv")
    ]


def measured(folder):
    """The files of a results folder that figures and claims read."""
    names = ("settings.json", "samples.csv", "errors.csv", "peaks.json")
    return [
        *(f"{folder}/{name}" for name in names),
        *layer_files(folder, "bench"),
    ]


def layer_files(folder, step, suffixes=("json",)):
    """The files of a step in a results folder: of all layers where it is measured here."""
    if folder == RESULTS and not IMPORTED:
        return [
            f"{folder}/{step}/{layer}.{suffix}"
            for layer in LAYERS
            for suffix in suffixes
        ]
    return [
        path
        for suffix in suffixes
        for path in sorted(glob.glob(f"{folder}/{step}/*.{suffix}"))
    ]


def behind(folder):
    """What is measured in a results folder, with the facts of all of it."""
    return [
        *measured(folder),
        *(f"{folder}/ceilings.{suffix}" for suffix in ("csv", "json")),
        *layer_files(folder, "bench", ("csv",)),
        *layer_files(folder, "check", ("csv", "json")),
    ]


def measured_here(wildcards):
    """No file. Raises ValueError where the run was imported, before anything is overwritten."""
    if IMPORTED:
        raise ValueError(
            f"run: {STORED} was imported and is only read; name another run, which is measured "
            f"here, or look into {STORED}/origin.json for where it was measured"
        )
    return []


def steps_times(wildcards):
    """Measured seconds of the steps. Raises ValueError where an imported run has none."""
    path = f"{STORED}/steps.csv"
    if IMPORTED and not os.path.exists(path):
        raise ValueError(
            f"{path}: expected seconds of the workflow's steps, which the bundle that was "
            "imported does not hold; measure with the workflow to have them"
        )
    return path


def beside_the_layers(wildcards):
    """What is measured in this run beside the paper's layers, as absolute paths, so that no rule
    measures it again."""
    patterns = [
        *(f"{RESULTS}/{table}/*" for table in LISTED),
        *(f"{RESULTS}/{name}.*" for name in ("numerics", "digits")),
    ]
    return sorted(
        str(ROOT / path)
        for pattern in patterns
        for path in glob.glob(pattern)
        if os.path.isfile(path)
    )


def panel_inputs(wildcards):
    return [
        path
        for folder in results_of(PANELS[wildcards.panel])
        for path in measured(folder)
    ]


def results_option(folders):
    return f"--results {' '.join(folders)}" if folders else ""


# What `all` asks for beside figures: Snakemake does not miss a file that only lies in between.
MEASURED = (
    []
    if IMPORTED
    else [
        *measured(RESULTS),
        *(f"{RESULTS}/ceilings.{suffix}" for suffix in ("csv", "json")),
        *layer_files(RESULTS, "check", ("csv", "json")),
        *layer_files(RESULTS, "bench", ("csv",)),
        *(
            path
            for step in EXPERIMENTS
            for path in layer_files(RESULTS, step, ("csv", "json"))
        ),
    ]
)
# Judged for real where results of the paper's device are at hand, by analogy on this one.
CLAIM_RESULTS = list(
    dict.fromkeys(
        [STORED] + [path for family in PANELS.values() for path in results_of(family)]
    )
)

# A measurement takes the whole machine, whatever --cores says.
MEASURE_THREADS = 1_000_000


def versions_found(wildcards):
    """What table 6 depends on: the software at hand, or of an imported run the facts of its
    first layer."""
    if wildcards.table != "table6":
        return []
    if IMPORTED:
        return f"{STORED}/bench/{LAYERS[0]}.json"
    return ["envs/requirements.lock", rules.build.output.stamp]


def gpu_results(wildcards):
    """The results folder of a GPU. Raises ValueError for another device."""
    if DEVICES[wildcards.device]["kind"] != "cuda":
        raise ValueError(
            f"device: expected a GPU, which this target is about, got {wildcards.device}; "
            "name one: figures/h200/... --config device=h200"
        )
    return f"results/{wildcards.device}/{RUN}"


def experiment_results(wildcards):
    """The files of an experiment on a GPU that its figure reads."""
    folder = gpu_results(wildcards)
    return [
        f"{folder}/settings.json",
        *layer_files(folder, wildcards.experiment, ("csv", "json")),
        *layer_files(folder, "bench"),
    ]


def cpu_results(wildcards):
    """The results folder of a CPU. Raises ValueError for another device."""
    if DEVICES[wildcards.device]["kind"] != "cpu":
        raise ValueError(
            f"device: expected a CPU, which this target is about, got {wildcards.device}; "
            "name one: figures/cpu/..."
        )
    return f"results/{wildcards.device}/{RUN}"


def listed_samples(folder, table):
    """Samples of the layers of a table, or of the ladder, in the order of config/layers.yaml."""
    return [f"{folder}/{table}/{name}.csv" for name in LISTED.get(table, ())]


def listed_results(wildcards, table):
    """The files that a table of layers, or the ladder, is rendered from."""
    folder = cpu_results(wildcards)
    samples = listed_samples(folder, table)
    if IMPORTED and not samples:
        raise ValueError(f"{folder}/{table}: not in the bundle that was imported")
    names = ("settings.json", "ceilings.csv", "ceilings.json")
    return [
        *(f"{folder}/{name}" for name in names),
        *samples,
        *(path.replace(".csv", ".json") for path in samples),
    ]


def experiment_text(table, wildcards):
    """What is measured of a listed layer, for a script."""
    return json.dumps(LISTED[table][wildcards.listed]["experiment"], sort_keys=True)


def experiment_environment(wildcards):
    """Variables that the process which measures a listed layer needs, as env takes them."""
    asked = LISTED[wildcards.table][wildcards.listed]["experiment"]["environment"]
    return [f"{name}={shlex.quote(value)}" for name, value in asked.items()]


def part_titles(wildcards):
    """Titles of the parts of a table by layer, for a script."""
    listed = LISTED.get(wildcards.table, {}).items()
    return json.dumps({name: layer["title"] for name, layer in listed})


def installed_peer(wildcards):
    """No file. Raises ValueError before anything runs, where nothing can be measured."""
    if SETTINGS["device"]["kind"] != "cpu":
        raise ValueError(
            f"device: expected a CPU, which peers compares on, got {DEVICE}; name one: "
            "snakemake --cores 1 peers --config device=cpu"
        )
    if not os.path.exists(f"{RESULTS}/peers/{wildcards.listed}.csv"):
        mnn.require()
    return []


MEASURE_TIMES = [
    f"{RESULTS}/times/{step}.tsv"
    for step in (
        *(
            f"{step}_{layer}"
            for step in ("weights", "check", *EXPERIMENTS)
            for layer in LAYERS
        ),
        "ceilings",
        "collect",
    )
]
ANALYSIS_TIMES = [
    f"{RENDER_TIMES}/{target}.tsv"
    for target in (
        *DRAWING_SCRIPTS,
        *(
            f"{figure}{panel}"
            for figure in ("fig2", *PANEL_SCRIPTS)
            for panel in PANELS
        ),
        *(f"device_{figure}" for figure in ("fig2", *PANEL_SCRIPTS)),
        *(f"device_{name}" for name in ("machine", *GPU_TABLES, *EXPERIMENTS)),
        *TABLE_SCRIPTS,
        "claims",
    )
]


# A machine that measured without the workflow has no times of its steps.
TIMES_TABLES = (
    [] if IMPORTED and not os.path.exists(f"{STORED}/steps.csv") else ["table5"]
)
# Of GPUs in general, whatever run it is: in figures/ itself, and in `all` of the default run alone,
# because counting instructions compiles the CUDA kernels anew for each of them.
GPU_FAMILIES = sorted(
    {device["family"] for device in DEVICES.values() if device.get("gpu")}
)
BOUNDS = [
    table("figures/instructions"),
    [trio(f"figures/bounds_{family}") for family in GPU_FAMILIES],
]


wildcard_constraints:
    layer="|".join(LAYERS),
    panel="a|b",
    device="|".join(FAMILIES),
    # A layer of config/layers.yaml.
    listed="|".join({name for table in LISTED.values() for name in table}) or "(?!)",
    table="layers|layers_cold",
    experiment="|".join(EVERY_EXPERIMENT),
    beyond="|".join(beyond.EXPERIMENTS),


report: "docs/report/workflow.rst"


rule all:
    input:
        MEASURED,
        [trio(f"{FIGURES}/{figure}") for figure in DRAWING_SCRIPTS],
        [
            trio(f"{FIGURES}/{figure}{panel}")
            for figure in ("fig2", *PANEL_SCRIPTS)
            for panel in PANELS
        ],
        [
            trio(f"{FIGURES}/{DEVICE}/{figure}")
            for figure in ("fig2", *PANEL_SCRIPTS, *EXPERIMENTS)
        ],
        [table(f"{FIGURES}/{DEVICE}/{name}") for name in GPU_TABLES],
        # Of every device whose results are shown.
        [
            table(f"{FIGURES}/{pathlib.Path(folder).parent.name}/machine")
            for folder in CLAIM_RESULTS
        ],
        [
            table(f"{FIGURES}/{name}")
            for name in (*TABLE_SCRIPTS, *TIMES_TABLES, "claims")
        ],
        multiext(f"{FIGURES}/appendix", ".md", ".tex"),
        BOUNDS if RUN == configuration.DEFAULT_RUN else [],
    message:
        "All figures, tables, claims and the audit are there"


if REPORT.asked:
    from packedconv.report import captions

    captions.register(REPORT)

    rule reported:
        """What has been made, of `all` and beyond it; what is missing is named and no error."""
        default_target: True
        input:
            REPORT.made(rules.all.input),


rule build:
    """Compile the extension in place; measuring depends on the stamp, not on the binary."""
    input:
        script="scripts/build.py",
        stamp="scripts/stamp.py",
        # The second has the version.
        sources=[*COMPILED_SOURCES, f"{PACKAGE}/__init__.py"],
    output:
        module=f"{PACKAGE}/_core{sysconfig.get_config_var('EXT_SUFFIX')}",
        stamp="build/extension.json",
    log:
        "logs/build.log",
    benchmark:
        "build/build.tsv"
    conda:
        "envs/environment.yaml"
    threads: lambda wildcards: workflow.cores
    message:
        "Compiling the extension"
    shell:
        "python {input.script} --stamp {output.stamp} > {log} 2>&1"


rule settings:
    """What this run measures, for scripts that know neither YAML nor Snakemake."""
    input:
        measured_here,
        script="scripts/settings.py",
    output:
        f"{RESULTS}/settings.json",
    log:
        f"logs/{DEVICE}/{RUN}/settings.log",
    conda:
        "envs/environment.yaml"
    params:
        text=configuration.settings_text(SETTINGS),
    message:
        "Writing the settings of the run: {output}"
    shell:
        "python {input.script} --text {params.text:q} --out {output} > {log} 2>&1"


rule weights:
    """Fixed-seed sparse weights of one layer at every sparsity."""
    input:
        script="scripts/weights.py",
        settings=rules.settings.output,
        sources=MEASURE_SOURCES,
    output:
        weights=f"{RESULTS}/weights/{{layer}}.npz",
        manifest=f"{RESULTS}/weights/{{layer}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/weights_{{layer}}.log",
    benchmark:
        f"{RESULTS}/times/weights_{{layer}}.tsv"
    conda:
        "envs/environment.yaml"
    message:
        "Drawing weights of layer {wildcards.layer}"
    shell:
        "python {input.script} --settings {input.settings} --layer {wildcards.layer}"
        " --out {output.weights} --manifest {output.manifest} > {log} 2>&1"


rule check:
    """The kernels against float64, before anything is timed."""
    input:
        script="scripts/check.py",
        settings=rules.settings.output,
        # The manifest has their hashes; a file of that size would count by its time alone.
        manifest=rules.weights.output.manifest,
        weights=ancient(rules.weights.output.weights),
        stamp=rules.build.output.stamp,
        sources=MEASURE_SOURCES,
    output:
        errors=f"{RESULTS}/check/{{layer}}.csv",
        facts=f"{RESULTS}/check/{{layer}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/check_{{layer}}.log",
    benchmark:
        f"{RESULTS}/times/check_{{layer}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: lambda wildcards: workflow.cores
    message:
        "Checking layer {wildcards.layer} against float64"
    shell:
        "python {input.script} --settings {input.settings} --layer {wildcards.layer}"
        " --weights {input.weights} --stamp {input.stamp}"
        " --out {output.errors} --facts {output.facts} > {log} 2>&1"


rule ceilings:
    """Measured roofs of the device: FP32 peak and memory bandwidth."""
    input:
        script="scripts/ceilings.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        sources=MEASURE_SOURCES,
    output:
        ceilings=f"{RESULTS}/ceilings.csv",
        facts=f"{RESULTS}/ceilings.json",
    log:
        f"logs/{DEVICE}/{RUN}/ceilings.log",
    benchmark:
        f"{RESULTS}/times/ceilings.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    message:
        "Measuring the ceilings of the device"
    shell:
        "python {input.script} --settings {input.settings} --stamp {input.stamp}"
        " --out {output.ceilings} --facts {output.facts} > {log} 2>&1"


rule bench:
    """Time one layer: all sparsities and contenders, rounds interleaved, in one process."""
    input:
        script="scripts/bench.py",
        settings=rules.settings.output,
        manifest=rules.weights.output.manifest,
        weights=ancient(rules.weights.output.weights),
        check=rules.check.output,
        stamp=rules.build.output.stamp,
        sources=MEASURE_SOURCES,
    output:
        samples=f"{RESULTS}/bench/{{layer}}.csv",
        facts=f"{RESULTS}/bench/{{layer}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/bench_{{layer}}.log",
    benchmark:
        f"{RESULTS}/times/bench_{{layer}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    message:
        "Timing layer {wildcards.layer}"
    shell:
        "python {input.script} --settings {input.settings} --layer {wildcards.layer}"
        " --weights {input.weights} --stamp {input.stamp}"
        " --out {output.samples} --facts {output.facts} --log {log}"


rule ablation:
    """Time every mapping of the paper's kernel for one layer; on a GPU only."""
    input:
        script="scripts/ablation.py",
        settings=rules.settings.output,
        manifest=rules.weights.output.manifest,
        weights=ancient(rules.weights.output.weights),
        check=rules.check.output,
        stamp=rules.build.output.stamp,
        sources=MEASURE_SOURCES,
    output:
        times=f"{RESULTS}/ablation/{{layer}}.csv",
        facts=f"{RESULTS}/ablation/{{layer}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/ablation_{{layer}}.log",
    benchmark:
        f"{RESULTS}/times/ablation_{{layer}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    message:
        "Timing every mapping for layer {wildcards.layer}"
    shell:
        "python {input.script} --settings {input.settings} --layer {wildcards.layer}"
        " --weights {input.weights} --stamp {input.stamp}"
        " --out {output.times} --facts {output.facts} > {log} 2>&1"


rule fixed_cost:
    """Time what of one layer does not depend on its nonzeros; on a GPU only."""
    input:
        script="scripts/fixed_cost.py",
        settings=rules.settings.output,
        manifest=rules.weights.output.manifest,
        weights=ancient(rules.weights.output.weights),
        # The mapping that was chosen for the layer.
        bench=rules.bench.output.facts,
        stamp=rules.build.output.stamp,
        sources=MEASURE_SOURCES,
    output:
        times=f"{RESULTS}/fixed_cost/{{layer}}.csv",
        facts=f"{RESULTS}/fixed_cost/{{layer}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/fixed_cost_{{layer}}.log",
    benchmark:
        f"{RESULTS}/times/fixed_cost_{{layer}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    message:
        "Timing what nonzeros do not explain in layer {wildcards.layer}"
    shell:
        "python {input.script} --settings {input.settings} --layer {wildcards.layer}"
        " --weights {input.weights} --stamp {input.stamp} --bench-facts {input.bench}"
        " --out {output.times} --facts {output.facts} > {log} 2>&1"


rule listed_layer:
    """Time one layer of the tables of layers: all contenders, rounds interleaved; on a CPU only."""
    input:
        script="scripts/layers.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        sources=[*MEASURE_SOURCES, *LISTED_MEASURE],
    output:
        samples=f"{RESULTS}/{{table}}/{{listed}}.csv",
        facts=f"{RESULTS}/{{table}}/{{listed}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/{{table}}_{{listed}}.log",
    benchmark:
        f"{RESULTS}/times/{{table}}_{{listed}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    params:
        experiment=lambda wildcards: experiment_text(wildcards.table, wildcards),
        environment=experiment_environment,
    message:
        "Timing {wildcards.listed} of {wildcards.table}"
    shell:
        "env {params.environment} python {input.script} --settings {input.settings}"
        " --experiment {params.experiment:q} --stamp {input.stamp}"
        " --out {output.samples} --facts {output.facts} > {log} 2>&1"


rule listed_ladder:
    """Time every rung of the ladder for one layer; on a CPU only."""
    input:
        script="scripts/ladder.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        sources=[*MEASURE_SOURCES, *LISTED_MEASURE],
    output:
        samples=f"{RESULTS}/ladder/{{listed}}.csv",
        facts=f"{RESULTS}/ladder/{{listed}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/ladder_{{listed}}.log",
    benchmark:
        f"{RESULTS}/times/ladder_{{listed}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    params:
        experiment=lambda wildcards: experiment_text("ladder", wildcards),
    message:
        "Timing the ladder of {wildcards.listed}"
    shell:
        "python {input.script} --settings {input.settings}"
        " --experiment {params.experiment:q} --stamp {input.stamp}"
        " --out {output.samples} --facts {output.facts} > {log} 2>&1"


rule collect:
    """All samples of the run in one table, refused when they exceed the measured peak."""
    input:
        script="scripts/collect.py",
        bench=expand(rules.bench.output.samples, layer=LAYERS),
        facts=expand(rules.bench.output.facts, layer=LAYERS),
        checks=expand(rules.check.output.errors, layer=LAYERS),
        checks_facts=expand(rules.check.output.facts, layer=LAYERS),
        ceilings=rules.ceilings.output.ceilings,
        ceilings_facts=rules.ceilings.output.facts,
        sources=[*MEASURE_SOURCES, f"{PACKAGE}/collect.py", f"{PACKAGE}/roofline.py"],
    output:
        samples=f"{RESULTS}/samples.csv",
        errors=f"{RESULTS}/errors.csv",
        peaks=f"{RESULTS}/peaks.json",
    log:
        f"logs/{DEVICE}/{RUN}/collect.log",
    benchmark:
        f"{RESULTS}/times/collect.tsv"
    conda:
        "envs/environment.yaml"
    message:
        "Collecting the samples"
    shell:
        "python {input.script} --bench {input.bench} --facts {input.facts}"
        " --checks {input.checks} --ceilings {input.ceilings}"
        " --ceilings-facts {input.ceilings_facts} --out {output.samples}"
        " --errors {output.errors} --peaks {output.peaks} 2>&1 | tee {log}"


rule drawing:
    """Figures 1, 3 and 4: drawn from a layer, the mapping and a packed weight."""
    input:
        script=lambda wildcards: DRAWING_SCRIPTS[wildcards.figure],
        module=rules.build.output.module,
        sources=PLOT_SOURCES,
        packing=PACKING,
    output:
        figure_files(f"{FIGURES}/{{figure}}"),
    log:
        f"logs/{DEVICE}/{RUN}/{{figure}}.log",
    benchmark:
        f"{RENDER_TIMES}/{{figure}}.tsv"
    wildcard_constraints:
        figure="|".join(DRAWING_SCRIPTS),
    conda:
        "envs/environment.yaml"
    message:
        "Drawing {output.pdf}"
    shell:
        "python {input.script} --out {output.pdf} > {log} 2>&1"


rule roofline_panel:
    """Figure 2a or 2b: the paper's device as stated."""
    input:
        script="scripts/fig2_roofline.py",
        paper="config/paper.yaml",
        sources=PLOT_SOURCES,
    output:
        figure_files(f"{FIGURES}/fig2{{panel}}"),
    log:
        f"logs/{DEVICE}/{RUN}/fig2{{panel}}.log",
    benchmark:
        f"{RENDER_TIMES}/fig2{{panel}}.tsv"
    conda:
        "envs/environment.yaml"
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --panel {wildcards.panel} --paper {input.paper}"
        " --out {output.pdf} > {log} 2>&1"


rule panel:
    """Figures 5 to 8, a and b: printed values, and measurements of that device family."""
    input:
        script=lambda wildcards: PANEL_SCRIPTS[wildcards.figure],
        paper="config/paper.yaml",
        results=panel_inputs,
        sources=PLOT_SOURCES,
    output:
        figure_files(f"{FIGURES}/{{figure}}{{panel}}"),
    log:
        f"logs/{DEVICE}/{RUN}/{{figure}}{{panel}}.log",
    benchmark:
        f"{RENDER_TIMES}/{{figure}}{{panel}}.tsv"
    wildcard_constraints:
        figure="|".join(PANEL_SCRIPTS),
    conda:
        "envs/environment.yaml"
    params:
        results=lambda wildcards: results_option(results_of(PANELS[wildcards.panel])),
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --panel {wildcards.panel} --paper {input.paper}"
        " {params.results} --out {output.pdf} > {log} 2>&1"


rule device_figure:
    """Figures 2 and 5 to 8 of one device, measured."""
    input:
        script=lambda wildcards: {"fig2": "scripts/fig2_roofline.py", **PANEL_SCRIPTS}[
            wildcards.figure
        ],
        results=lambda wildcards: measured(f"results/{wildcards.device}/{RUN}"),
        sources=PLOT_SOURCES,
    output:
        figure_files(f"{FIGURES}/{{device}}/{{figure}}"),
    log:
        f"logs/{{device}}/{RUN}/{{figure}}.log",
    benchmark:
        f"logs/{{device}}/{RUN}/times/device_{{figure}}.tsv"
    wildcard_constraints:
        figure="|".join(["fig2", *PANEL_SCRIPTS]),
    conda:
        "envs/environment.yaml"
    params:
        results=lambda wildcards: f"results/{wildcards.device}/{RUN}",
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --results {params.results} --out {output.pdf} > {log} 2>&1"


rule machine:
    """The machine behind a run, by the facts beside its measurements."""
    input:
        script="scripts/table_machine.py",
        results=lambda wildcards: behind(f"results/{wildcards.device}/{RUN}"),
        sources=[*PLOT_SOURCES, f"{PACKAGE}/run_folder.py"],
    output:
        table_files(f"{FIGURES}/{{device}}/machine"),
    log:
        f"logs/{{device}}/{RUN}/machine.log",
    benchmark:
        f"logs/{{device}}/{RUN}/times/device_machine.tsv"
    conda:
        "envs/environment.yaml"
    params:
        results=lambda wildcards: f"results/{wildcards.device}/{RUN}",
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --results {params.results} --out {output.csv} > {log} 2>&1"


rule contenders:
    """Every contender of a GPU beside the sparse kernel, with ratios and what was left out."""
    input:
        script="scripts/contenders.py",
        results=lambda wildcards: measured(gpu_results(wildcards)),
        sources=PLOT_SOURCES,
    output:
        table_files(f"{FIGURES}/{{device}}/contenders"),
    log:
        f"logs/{{device}}/{RUN}/contenders.log",
    benchmark:
        f"logs/{{device}}/{RUN}/times/device_contenders.tsv"
    conda:
        "envs/environment.yaml"
    params:
        results=gpu_results,
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --results {params.results} --out {output.csv} > {log} 2>&1"


rule experiment_figure:
    """The ablation and the fixed cost of a GPU."""
    input:
        script="scripts/figure_experiment.py",
        results=experiment_results,
        sources=PLOT_SOURCES,
    output:
        figure_files(f"{FIGURES}/{{device}}/{{experiment}}"),
    log:
        f"logs/{{device}}/{RUN}/{{experiment}}.log",
    benchmark:
        f"logs/{{device}}/{RUN}/times/device_{{experiment}}.tsv"
    conda:
        "envs/environment.yaml"
    params:
        results=gpu_results,
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --experiment {wildcards.experiment}"
        " --results {params.results} --out {output.pdf} > {log} 2>&1"


rule layers:
    """Both tables of layers, which `all` does not make."""
    input:
        [table(f"{FIGURES}/{DEVICE}/{name}") for name in ("layers", "layers_cold")],
        [listed_samples(STORED, name) for name in ("layers", "layers_cold")],
    message:
        "The tables of layers are there"


rule layer_table:
    """Layers of a CPU with warm or cold caches: speedup, fraction of the bound, plan."""
    input:
        script="scripts/table_layers.py",
        results=lambda wildcards: listed_results(wildcards, wildcards.table),
        sources=LISTED_SOURCES,
    output:
        table_files(f"{FIGURES}/{{device}}/{{table}}"),
    log:
        f"logs/{{device}}/{RUN}/table_{{table}}.log",
    conda:
        "envs/environment.yaml"
    params:
        results=cpu_results,
        samples=lambda wildcards: listed_samples(
            cpu_results(wildcards), wildcards.table
        ),
        titles=part_titles,
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --table {wildcards.table} --results {params.results}"
        " --samples {params.samples} --titles {params.titles:q} --out {output.csv} > {log} 2>&1"


rule ladder_figure:
    """What each idea bought on a CPU, from Algorithm 1 as it stands to the plan."""
    input:
        script="scripts/figure_ladder.py",
        results=lambda wildcards: listed_results(wildcards, "ladder"),
        sources=LISTED_SOURCES,
    output:
        figure_files(f"{FIGURES}/{{device}}/ladder"),
    log:
        f"logs/{{device}}/{RUN}/figure_ladder.log",
    conda:
        "envs/environment.yaml"
    params:
        results=cpu_results,
        samples=lambda wildcards: listed_samples(cpu_results(wildcards), "ladder"),
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --results {params.results} --samples {params.samples}"
        " --out {output.pdf} > {log} 2>&1"


rule theory:
    """Tables 1 to 3 recomputed, tables 4 and 6, and the audit: no measurement needed."""
    input:
        script=lambda wildcards: TABLE_SCRIPTS[wildcards.table],
        paper="config/paper.yaml",
        versions=versions_found,
        sources=PLOT_SOURCES,
    output:
        table_files(f"{FIGURES}/{{table}}"),
    log:
        f"logs/{DEVICE}/{RUN}/{{table}}.log",
    benchmark:
        f"{RENDER_TIMES}/{{table}}.tsv"
    wildcard_constraints:
        table="|".join(TABLE_SCRIPTS),
    conda:
        "envs/environment.yaml"
    params:
        facts=lambda wildcards, input: (
            f" --facts {input.versions}"
            if wildcards.table == "table6" and IMPORTED
            else ""
        ),
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --paper {input.paper}{params.facts} --out {output.csv} > {log} 2>&1"


rule claims:
    """Every statement of the paper with what was obtained here, and a verdict."""
    input:
        script="scripts/claims.py",
        paper="config/paper.yaml",
        results=[path for folder in CLAIM_RESULTS for path in measured(folder)],
        sources=PLOT_SOURCES,
    output:
        table_files(f"{FIGURES}/claims"),
    log:
        f"logs/{DEVICE}/{RUN}/claims.log",
    benchmark:
        f"{RENDER_TIMES}/claims.tsv"
    conda:
        "envs/environment.yaml"
    params:
        results=CLAIM_RESULTS,
        device=DEVICE,
    message:
        "Judging the claims: {output.md}"
    shell:
        "python {input.script} --paper {input.paper} --results {params.results}"
        " --device {params.device} --out {output.csv} > {log} 2>&1"


rule device:
    """What `all` makes of this device alone, so that several can be measured in one folder."""
    input:
        [
            trio(f"{FIGURES}/{DEVICE}/{figure}")
            for figure in ("fig2", *PANEL_SCRIPTS, *EXPERIMENTS)
        ],
        [table(f"{FIGURES}/{DEVICE}/{name}") for name in GPU_TABLES],
    message:
        "The results and figures of {DEVICE} are there"


def compare_targets(wildcards):
    """Every file of the comparison that --config left= right= asks for."""
    folder = "figures/compare/" + "--".join(compared.asked(config, ROOT))
    return [
        *(path for name in compared.FIGURES for path in trio(f"{folder}/{name}")),
        *table(f"{folder}/speedups"),
    ]


rule compare:
    """Two stored results side by side: compare --config left=cpu.paper right=cpu.seed2."""
    input:
        compare_targets,
    message:
        "The comparison is there"


rule compare_figure:
    """A figure of two stored results; never measures."""
    input:
        script="scripts/compare.py",
        paper="config/paper.yaml",
        # Absolute paths, which no rule makes.
        left=lambda wildcards: compared.files(wildcards.left, ROOT),
        right=lambda wildcards: compared.files(wildcards.right, ROOT),
        sources=COMPARE_SOURCES,
    output:
        multiext(
            "figures/compare/{left}--{right}/{figure}",
            out=".pdf",
            png=".png",
            data=".csv",
        ),
    log:
        "logs/compare/{left}--{right}/{figure}.log",
    wildcard_constraints:
        left=compared.NAME,
        right=compared.NAME,
        figure="|".join(compared.FIGURES),
    conda:
        "envs/environment.yaml"
    params:
        figure=lambda wildcards: f"--figure {wildcards.figure}",
        left=lambda wildcards: wildcards.left.replace(".", "/"),
        right=lambda wildcards: wildcards.right.replace(".", "/"),
    message:
        "Rendering {output.out}"
    shell:
        "python {input.script} --paper {input.paper} --left results/{params.left}"
        " --right results/{params.right} {params.figure} --out {output.out} > {log} 2>&1"


use rule compare_figure as compare_table with:
    output:
        multiext(
            "figures/compare/{left}--{right}/speedups",
            out=".csv",
            md=".md",
            tex=".tex",
            html=".html",
        ),
    log:
        "logs/compare/{left}--{right}/speedups.log",
    wildcard_constraints:
        left=compared.NAME,
        right=compared.NAME,
    params:
        figure="",
        left=lambda wildcards: wildcards.left.replace(".", "/"),
        right=lambda wildcards: wildcards.right.replace(".", "/"),


rule steps:
    """Measured seconds of each step of table 5, from what Snakemake timed."""
    input:
        script="scripts/steps.py",
        # How long a re-rendering took says nothing new: only a first run counts.
        setup=ancient([path for path in ["build/setup.json"] if os.path.exists(path)]),
        compilation=ancient(rules.build.benchmark),
        facts=ancient([f"{RESULTS}/bench/{layer}.json" for layer in LAYERS]),
        benchmark=ancient(MEASURE_TIMES),
        # A report of a part has table 5 without every figure; nothing is run for it.
        analysis=ancient([] if REPORT.asked else ANALYSIS_TIMES),
    output:
        f"{RESULTS}/steps.csv",
    log:
        f"logs/{DEVICE}/{RUN}/steps.log",
    conda:
        "envs/environment.yaml"
    message:
        "Adding up the time that each step took"
    shell:
        "python {input.script} --setup {input.setup} --compilation {input.compilation}"
        " --benchmark {input.benchmark} --facts {input.facts} --analysis {input.analysis} --out {output} > {log} 2>&1"


rule table5:
    """Minutes of each step, measured beside printed."""
    input:
        script="scripts/table5_times.py",
        paper="config/paper.yaml",
        steps=steps_times,
        settings=f"{STORED}/settings.json",
        sources=PLOT_SOURCES,
    output:
        table_files(f"{FIGURES}/table5"),
    log:
        f"logs/{DEVICE}/{RUN}/table5.log",
    conda:
        "envs/environment.yaml"
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --paper {input.paper} --steps {input.steps}"
        " --out {output.csv} > {log} 2>&1"


rule appendix:
    """Artifact description and evaluation, with the measured times."""
    input:
        script="scripts/appendix.py",
        paper="config/paper.yaml",
        results=measured(STORED),
        # Who measured without the workflow has no times of its steps.
        steps=steps_times if TIMES_TABLES else [],
        claims=rules.claims.output.csv,
        templates=glob.glob(f"{PACKAGE}/evidence/templates/*.j2"),
        sources=PLOT_SOURCES,
    output:
        multiext(f"{FIGURES}/appendix", md=".md", tex=".tex"),
    log:
        f"logs/{DEVICE}/{RUN}/appendix.log",
    conda:
        "envs/environment.yaml"
    params:
        results=lambda wildcards: STORED,
        figures=lambda wildcards: FIGURES,
    message:
        "Writing {output.md}"
    shell:
        "python {input.script} --paper {input.paper} --results {params.results}"
        " --steps {input.steps} --claims {input.claims} --figures {params.figures}"
        " --out {output.md} > {log} 2>&1"


rule bounds:
    """The bounds of all GPUs and the counts that they rest on."""
    input:
        BOUNDS,
    message:
        "The instruction table and all bounds are there"


rule instructions:
    """Instructions per FMA of every CUDA kernel, from its machine code; needs no GPU."""
    input:
        script="scripts/instructions.py",
        # Picks the tiles.
        stamp=rules.build.output.stamp,
        sources=INSTRUCTION_SOURCES,
    output:
        table_files("figures/instructions"),
    log:
        "logs/instructions.log",
    conda:
        "envs/environment.yaml"
    message:
        "Counting instructions: {output.md}"
    shell:
        "python {input.script} --out {output.csv} > {log} 2>&1"


rule bounds_page:
    """Lower bounds of the times on a GPU; nothing is measured."""
    input:
        script="scripts/bounds.py",
        paper="config/paper.yaml",
        instructions=rules.instructions.output.csv,
        devices=sorted(glob.glob("config/devices/*.yaml")),
        sources=[*PLOT_SOURCES, *PACKING, *CONFIG_SOURCES],
    output:
        figure_files("figures/bounds_{family}"),
    log:
        "logs/bounds_{family}.log",
    wildcard_constraints:
        family="|".join(GPU_FAMILIES),
    conda:
        "envs/environment.yaml"
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --family {wildcards.family} --paper {input.paper}"
        " --instructions {input.instructions} --out {output.pdf} > {log} 2>&1"


rule listing:
    """Layers beside the paper's that are measured, for readers of a bundle."""
    input:
        script="scripts/settings.py",
        settings=rules.settings.output,
    output:
        f"{RESULTS}/{imported.LISTING}",
    log:
        f"logs/{DEVICE}/{RUN}/listing.log",
    conda:
        "envs/environment.yaml"
    params:
        text=imported.listing_text(LISTED, ROOT / RESULTS),
    message:
        "Listing what was measured beside the paper's layers: {output}"
    shell:
        "python {input.script} --text {params.text:q} --out {output} > {log} 2>&1"


rule bundle:
    """The run as one file, which scripts/import_results takes in another checkout."""
    input:
        script="scripts/bundle.py",
        steps=rules.steps.output,
        collected=rules.collect.output,
        listing=rules.listing.output,
        experiments=[
            layer_files(RESULTS, name, ("csv", "json")) for name in EXPERIMENTS
        ],
        # What is beside the paper's layers, where it was measured.
        further=beside_the_layers,
        sources=[
            f"{PACKAGE}/{name}.py"
            for name in (
                "bundle files layer run_folder run_names samples_file seal settings"
            ).split()
        ],
    output:
        f"bundles/{DEVICE}-{RUN}.tar.gz",
    log:
        f"logs/{DEVICE}/{RUN}/bundle.log",
    conda:
        "envs/environment.yaml"
    params:
        results=lambda wildcards: STORED,
    message:
        "Packing {params.results} into {output}"
    shell:
        "python {input.script} --results {params.results} --out {output} > {log} 2>&1"


# An optional comparison, which `all` does not ask for and which needs MNN.
rule peers:
    """Beside MNN, the open peer with sparse convolution on CPUs."""
    input:
        table(f"{FIGURES}/{DEVICE}/peers"),
        listed_samples(STORED, "peers"),
    message:
        "The comparison with MNN is there"


rule peers_layer:
    """Time one layer beside MNN, rounds interleaved, in one process; on a CPU only."""
    input:
        installed_peer,
        script="scripts/peers.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        sources=[*MEASURE_SOURCES, *LISTED_MEASURE, *PEER_MEASURE],
    output:
        samples=f"{RESULTS}/peers/{{listed}}.csv",
        facts=f"{RESULTS}/peers/{{listed}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/peers_{{listed}}.log",
    benchmark:
        f"{RESULTS}/times/peers_{{listed}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    params:
        experiment=lambda wildcards: experiment_text("peers", wildcards),
    message:
        "Timing layer {wildcards.listed} beside MNN"
    shell:
        "python {input.script} --settings {input.settings}"
        " --experiment {params.experiment:q} --stamp {input.stamp} --out {output.samples} --facts {output.facts} > {log} 2>&1"


rule peers_table:
    """packedconv beside MNN and PyTorch's best dense convolution."""
    input:
        script="scripts/table_peers.py",
        results=lambda wildcards: listed_results(wildcards, "peers"),
        sources=LISTED_SOURCES,
    output:
        table_files(f"{FIGURES}/{{device}}/peers"),
    log:
        f"logs/{{device}}/{RUN}/peers.log",
    conda:
        "envs/environment.yaml"
    params:
        results=cpu_results,
        samples=lambda wildcards: listed_samples(cpu_results(wildcards), "peers"),
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --results {params.results} --samples {params.samples}"
        " --out {output.csv} > {log} 2>&1"


rule extended:
    """Every experiment beyond the paper, on a CPU only; `all` does not make them."""
    input:
        [trio(f"{FIGURES}/{DEVICE}/{name}") for name in beyond.EXPERIMENTS],
        [listed_samples(STORED, name) for name in beyond.EXPERIMENTS],
        trio(f"{FIGURES}/{DEVICE}/numerics"),
        table(f"{FIGURES}/{DEVICE}/digits"),
        table(f"{FIGURES}/{DEVICE}/claims_extended"),
        trio("figures/mappings"),
    message:
        "All experiments beyond the paper are there"


rule beyond_layer:
    """Time one layer of an experiment beyond the paper; on a CPU only."""
    input:
        script="scripts/extended.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        # Masks of a trained network are among those that are compared.
        trained=lambda wildcards: (
            [f"{RESULTS}/digits.npz"] if wildcards.beyond == "masks" else []
        ),
        sources=lambda wildcards: [
            *MEASURE_SOURCES,
            *LISTED_MEASURE,
            *beyond_sources("bench", wildcards.beyond),
        ],
    output:
        samples=f"{RESULTS}/{{beyond}}/{{listed}}.csv",
        facts=f"{RESULTS}/{{beyond}}/{{listed}}.json",
    log:
        f"logs/{DEVICE}/{RUN}/{{beyond}}_{{listed}}.log",
    benchmark:
        f"{RESULTS}/times/{{beyond}}_{{listed}}.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    params:
        experiment=lambda wildcards: experiment_text(wildcards.beyond, wildcards),
        trained=lambda wildcards, input: (
            f" --trained {input.trained}" if input.trained else ""
        ),
    message:
        "Timing {wildcards.listed} of {wildcards.beyond}"
    shell:
        "python {input.script} --name {wildcards.beyond} --settings {input.settings}"
        " --experiment {params.experiment:q} --stamp {input.stamp}{params.trained}"
        " --out {output.samples} --facts {output.facts} > {log} 2>&1"


rule beyond_figure:
    """The figure of an experiment beyond the paper."""
    input:
        script="scripts/figure_{beyond}.py",
        # What the advice on layers held out is calibrated by.
        seen=lambda wildcards: (
            listed_results(wildcards, "crossover")
            if wildcards.beyond == "held_out"
            else []
        ),
        # Beside figures that the paper cites.
        paper=lambda wildcards: (
            ["config/paper.yaml"] if wildcards.beyond == "utilisation" else []
        ),
        results=lambda wildcards: listed_results(wildcards, wildcards.beyond),
        sources=lambda wildcards: [
            *LISTED_SOURCES,
            *beyond_sources("evidence", wildcards.beyond),
            *beyond_sources("plots", wildcards.beyond),
        ],
    output:
        figure_files(f"{FIGURES}/{{device}}/{{beyond}}"),
    log:
        f"logs/{{device}}/{RUN}/figure_{{beyond}}.log",
    wildcard_constraints:
        beyond="|".join(name for name in beyond.EXPERIMENTS if name != "crossover"),
    conda:
        "envs/environment.yaml"
    params:
        results=cpu_results,
        samples=lambda wildcards: listed_samples(
            cpu_results(wildcards), wildcards.beyond
        ),
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --results {params.results} --samples {params.samples}"
        " --out {output.pdf} > {log} 2>&1"


use rule beyond_figure as crossover_figure with:
    output:
        # The calibration, which packedconv.advise takes, too.
        figure_files(f"{FIGURES}/{{device}}/{{beyond}}", json=".json"),
    wildcard_constraints:
        beyond="crossover",


rule numerics:
    """Errors by cause, against float64, over distributions; not timed; on a CPU only."""
    input:
        script="scripts/numerics.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        sources=[
            *MEASURE_SOURCES,
            *LISTED_MEASURE,
            *beyond_sources("bench", "numerics"),
        ],
    output:
        rows=f"{RESULTS}/numerics.csv",
        facts=f"{RESULTS}/numerics.json",
    log:
        f"logs/{DEVICE}/{RUN}/numerics.log",
    benchmark:
        f"{RESULTS}/times/numerics.tsv"
    conda:
        "envs/environment.yaml"
    threads: lambda wildcards: workflow.cores
    params:
        experiment=json.dumps(
            configuration.load_yaml(ROOT / config["extended"])["numerics"],
            sort_keys=True,
        ),
    message:
        "Computing errors by cause"
    shell:
        "python {input.script} --settings {input.settings}"
        " --experiment {params.experiment:q} --stamp {input.stamp}"
        " --out {output.rows} --facts {output.facts} > {log} 2>&1"


rule numerics_figure:
    """The figure of errors by cause, and of other baselines of figure 8."""
    input:
        script="scripts/figure_numerics.py",
        paper="config/paper.yaml",
        results=lambda wildcards: [
            f"{cpu_results(wildcards)}/{name}"
            for name in ("settings.json", "numerics.csv", "numerics.json")
        ],
        sources=[
            *PLOT_SOURCES,
            *beyond_sources("evidence", "numerics"),
            *beyond_sources("plots", "numerics"),
        ],
    output:
        figure_files(f"{FIGURES}/{{device}}/numerics"),
    log:
        f"logs/{{device}}/{RUN}/figure_numerics.log",
    conda:
        "envs/environment.yaml"
    params:
        results=cpu_results,
    message:
        "Rendering {output.pdf}"
    shell:
        "python {input.script} --paper {input.paper} --results {params.results}"
        " --out {output.pdf} > {log} 2>&1"


rule mappings:
    """Every mapping of the paper's kernel by counts; needs no GPU and no measurement."""
    input:
        script="scripts/figure_mappings.py",
        # Makes the plans.
        stamp=rules.build.output.stamp,
        instructions=rules.instructions.output.csv,
        devices=sorted(glob.glob("config/devices/*.yaml")),
        sources=[
            *PLOT_SOURCES,
            *PACKING,
            *CONFIG_SOURCES,
            *beyond_sources("evidence", "mappings"),
            *beyond_sources("plots", "mappings"),
        ],
    output:
        figure_files("figures/mappings"),
    log:
        "logs/mappings.log",
    conda:
        "envs/environment.yaml"
    message:
        "Counting mappings: {output.pdf}"
    shell:
        "python {input.script} --instructions {input.instructions} --out {output.pdf} > {log} 2>&1"


rule digits:
    """Train and prune a network on digits, and run it through packedconv; on a CPU only."""
    input:
        script="scripts/digits.py",
        settings=rules.settings.output,
        stamp=rules.build.output.stamp,
        sources=[
            *MEASURE_SOURCES,
            *LISTED_MEASURE,
            *beyond_sources("bench", "digits_step"),
        ],
    output:
        weights=f"{RESULTS}/digits.npz",
        facts=f"{RESULTS}/digits.json",
    log:
        f"logs/{DEVICE}/{RUN}/digits.log",
    benchmark:
        f"{RESULTS}/times/digits.tsv"
    conda:
        "envs/environment.yaml"
    threads: MEASURE_THREADS
    params:
        training=json.dumps(
            configuration.load_yaml(ROOT / config["extended"])["digits"],
            sort_keys=True,
        ),
    message:
        "Training and pruning the digits network"
    shell:
        "python {input.script} --settings {input.settings}"
        " --training {params.training:q} --stamp {input.stamp}"
        " --out {output.weights} --facts {output.facts} > {log} 2>&1"


rule digits_table:
    """Accuracy of the digits network, dense, pruned and through packedconv."""
    input:
        script="scripts/table_digits.py",
        results=lambda wildcards: [
            f"{cpu_results(wildcards)}/{name}"
            for name in ("settings.json", "digits.json")
        ],
        sources=[*PLOT_SOURCES, *beyond_sources("evidence", "digits")],
    output:
        table_files(f"{FIGURES}/{{device}}/digits"),
    log:
        f"logs/{{device}}/{RUN}/table_digits.log",
    conda:
        "envs/environment.yaml"
    params:
        results=cpu_results,
    message:
        "Computing {output.md}"
    shell:
        "python {input.script} --results {params.results} --facts {params.results}/digits.json"
        " --out {output.csv} > {log} 2>&1"


rule claims_extended:
    """Statements that experiments beyond the paper bear on."""
    input:
        script="scripts/claims_extended.py",
        paper="config/paper.yaml",
        gap=f"{FIGURES}/{{device}}/gap.csv",
        utilisation=f"{FIGURES}/{{device}}/utilisation.csv",
        sources=[*LISTED_SOURCES, *beyond_sources("evidence", "claims_extended")],
    output:
        table_files(f"{FIGURES}/{{device}}/claims_extended"),
    log:
        f"logs/{{device}}/{RUN}/claims_extended.log",
    conda:
        "envs/environment.yaml"
    message:
        "Judging by the experiments beyond the paper: {output.md}"
    shell:
        "python {input.script} --paper {input.paper} --gap {input.gap}"
        " --utilisation {input.utilisation} --device {wildcards.device}"
        " --out {output.csv} > {log} 2>&1"


# On a cluster (profiles/slurm) what measures or computes on the device is a job of its own, and
# all else stays on the machine that runs Snakemake. Last, since it asks which rules there are.
ON_DEVICE = {"check", "numerics"} | {
    each.name
    for each in workflow.rules
    if each.resources.get("_cores") == MEASURE_THREADS
}
workflow.localrules(
    *(each.name for each in workflow.rules if each.name not in ON_DEVICE)
)
