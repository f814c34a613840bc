"""The steps that use the device, one at a time: check, ceilings, bench; ablation and
fixed_cost on a GPU."""

import errno
import hashlib
import json
import os
import shutil
import sys
import time
import typing

import numpy as np

from packedconv.bench.lock import measurement_lock
from packedconv.device import Device, DeviceError, require
from packedconv.files import atomic_write
from packedconv.layer import Layer, sparsity_key
from packedconv.samples_file import (
    ABLATION_COLUMNS,
    CEILING_COLUMNS,
    ERROR_COLUMNS,
    FIXED_COST_COLUMNS,
    IMPLEMENTATIONS,
    SAMPLE_COLUMNS,
    format_csv,
    read_text,
    text_sha256,
    write_facts,
    write_text,
)
from packedconv.seal import is_intact
from packedconv.settings import Settings, find_layer, settings_hash
from packedconv.weights import (
    array_sha256,
    input_seed,
    load_weights,
    make_input,
)

SCHEMA = 1
# More than this per execution and memory was not reused: 4 KiB pages of 256 KiB.
_MANY_FAULTS = 64
# Generous sizes of what is written.
_ROW_BYTES = 200
_FACTS_BYTES = 2**20

Facts = typing.Dict[str, typing.Any]


def check(
    settings: Settings,
    layer_name: str,
    weights_path: str,
    stamp_path: str,
    out: str,
    facts_path: str,
) -> None:
    """Check one layer and write its errors (`out`) and facts, the facts first.

    Under the lock too, since its work would disturb a measurement. Raises CheckError when an
    output is wrong.
    """
    stamp = load_stamp(stamp_path)
    layer = find_layer(settings, layer_name)
    device = require(settings["device"])
    weights = load_weights(weights_path, layer, settings["sparsities"])
    with measurement_lock(settings["device"]["name"]):
        import torch

        from packedconv.bench.check import check_layer
        from packedconv.bench.contenders import reuse_memory
        from packedconv.bench.machine import comparable_facts, machine_facts

        require_stamped_extension(stamp_path, stamp)
        reuse_memory()
        comparable = comparable_facts()
        torch.set_num_threads(thread_count(settings, device))
        arguments = (
            settings["device"]["name"],
            settings["run"],
            layer,
            {sparsity: weights[sparsity_key(sparsity)] for sparsity in settings["sparsities"]},
            make_input(layer, settings["seed"], settings["inputs"]),
        )
        comparable = comparable_facts()
        if device.kind == "cpu":
            rows = check_layer(*arguments)
        else:
            from packedconv.bench import gpu_check

            accelerator = _accelerator(device)
            comparable.update(accelerator.comparable())
            rows = gpu_check.check_layer(accelerator, *arguments)
        text = format_csv(rows, ERROR_COLUMNS)
        facts = {
            "schema": SCHEMA,
            "device": settings["device"]["name"],
            "run": settings["run"],
            "settings_hash": settings_hash(settings),
            "stamp": stamp,
            "weights_sha256": {key: array_sha256(weight) for key, weight in weights.items()},
            "layer": dict(layer._asdict()),
            "comparable": comparable,
            "errors_sha256": text_sha256(text),
            "machine": machine_facts(),
        }
        write_facts(facts_path, facts)
        write_text(out, text)


def ceilings(settings: Settings, stamp_path: str, out: str, facts_path: str) -> None:
    """Measure the ceilings and write them (`out`) with their facts, the facts first."""
    device = require(settings["device"])
    name = settings["device"]["name"]
    stamp = load_stamp(stamp_path)
    with measurement_lock(name):
        from packedconv.bench.ceilings import measure_ceilings
        from packedconv.bench.machine import comparable_facts, machine_facts, moment

        require_stamped_extension(stamp_path, stamp)
        before, comparable = moment(), comparable_facts()
        arguments = (name, settings["run"], thread_count(settings, device))
        if device.kind == "cpu":
            rows = measure_ceilings(*arguments)
        else:
            from packedconv.bench import gpu_ceilings

            accelerator = _accelerator(device)
            comparable.update(accelerator.comparable())
            before["gpu"] = accelerator.state()
            rows = gpu_ceilings.measure_ceilings(*arguments, accelerator)
        after = moment()
        if device.kind != "cpu":
            after["gpu"] = accelerator.state()
        text = format_csv(rows, CEILING_COLUMNS)
        facts = {
            "schema": SCHEMA,
            "stamp": stamp,
            "comparable": comparable,
            "ceilings_sha256": text_sha256(text),
            "before": before,
            "after": after,
            "machine": machine_facts(),
        }
        write_facts(facts_path, facts)
        write_text(out, text)
        keep_in_archive([facts_path, out], facts["ceilings_sha256"])


def bench(
    settings: Settings,
    layer_name: str,
    weights_path: str,
    stamp_path: str,
    out: str,
    facts_path: str,
    force: bool = False,
) -> None:
    """Time a layer and write its samples (`out`) and facts, the facts first.

    Waits for the lock of the device before anything heavy. When both files are there by
    then and belong to these settings, weights and extension (another process measured
    the layer meanwhile), they are kept, unless `force`.
    Raises ValueError, DeviceError, MemoryError, and OSError when a file cannot be written.
    Where "sparse" or "dense" fails during the rounds on a GPU, what was timed until then is
    kept in archive/, and the error says so.
    """
    layer = find_layer(settings, layer_name)
    device = require(settings["device"])
    weights = load_weights(weights_path, layer, settings["sparsities"])
    identity = {
        "schema": SCHEMA,
        "settings_hash": settings_hash(settings),
        "stamp": load_stamp(stamp_path),
        "weights_sha256": {key: array_sha256(weight) for key, weight in weights.items()},
    }
    with measurement_lock(settings["device"]["name"]):
        from packedconv.bench.machine import comparable_facts, require_environment

        identity["comparable"] = comparable_facts()
        accelerator = None
        if device.kind == "cpu":
            require_environment({})
        else:
            accelerator = _accelerator(device)
            identity["comparable"].update(accelerator.comparable())
        if not force and is_complete(out, facts_path, layer, identity):
            print(
                f"kept {out}: this layer has been measured with these settings "
                "(--force measures it again)",
                file=sys.stderr,
            )
            return
        require_space(out, _run_rows(settings))
        require_stamped_extension(stamp_path, identity["stamp"])
        arguments = (settings, layer, weights, thread_count(settings, device))
        if accelerator is None:
            rows, facts = measure_layer(*arguments)
        else:
            from packedconv.bench import gpu_layer

            rows, facts = gpu_layer.measure_layer(*arguments, accelerator)
        samples = format_csv(rows, SAMPLE_COLUMNS)
        facts = dict(identity, samples_sha256=text_sha256(samples), **facts)
        if facts.get("stopped"):
            raise DeviceError(facts["stopped"] + _keep_part(out, facts_path, samples, facts))
        write_facts(facts_path, facts)
        write_text(out, samples)
        keep_in_archive([facts_path, out], facts["samples_sha256"])


def ablation(
    settings: Settings, layer_name: str, weights_path: str, stamp_path: str, out: str, facts: str
) -> None:
    """Time every mapping of the paper's kernel for a layer on a GPU; writes `out` and facts.

    Raises DeviceError for a device that is no GPU.
    """

    def measure(measurement: typing.Any) -> typing.List[typing.Dict[str, typing.Any]]:
        return measurement.ablation()

    _experiment(
        settings, layer_name, weights_path, stamp_path, out, facts, ABLATION_COLUMNS, measure
    )


def fixed_cost(
    settings: Settings,
    layer_name: str,
    weights_path: str,
    stamp_path: str,
    bench_facts_path: str,
    out: str,
    facts: str,
) -> None:
    """Time what of a layer does not depend on its nonzeros on a GPU; writes `out` and facts.

    The mapping of the paper's kernel is the one that bench chose at the lowest sparsity:
    `bench_facts_path`.
    Raises DeviceError for a device that is no GPU, ValueError for facts without a mapping.
    """
    _require_gpu(settings)
    try:
        mappings = json.loads(read_text(bench_facts_path) or "{}")["mapping"]
        mapping = mappings[sparsity_key(min(settings["sparsities"]))]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{bench_facts_path}: expected the facts of a layer with its mapping, got none "
            f"({error!r}); measure the layer first"
        ) from error

    def measure(measurement: typing.Any) -> typing.List[typing.Dict[str, typing.Any]]:
        return measurement.fixed_cost(mapping)

    _experiment(
        settings, layer_name, weights_path, stamp_path, out, facts, FIXED_COST_COLUMNS, measure
    )


def _experiment(
    settings: Settings,
    layer_name: str,
    weights_path: str,
    stamp_path: str,
    out: str,
    facts_path: str,
    columns: typing.Sequence[str],
    measure: typing.Callable[[typing.Any], typing.List[typing.Dict[str, typing.Any]]],
) -> None:
    """Write the rows of an experiment on a layer and a GPU, the facts first."""
    layer = find_layer(settings, layer_name)
    _require_gpu(settings)
    device = require(settings["device"])
    weights = load_weights(weights_path, layer, settings["sparsities"])
    stamp = load_stamp(stamp_path)
    with measurement_lock(settings["device"]["name"]):
        from packedconv.bench.gpu_experiments import Measurement
        from packedconv.bench.machine import comparable_facts

        require_space(out, _run_rows(settings))
        require_stamped_extension(stamp_path, stamp)
        accelerator = _accelerator(device)
        measurement = Measurement(settings, layer, weights, accelerator)
        text = format_csv(measure(measurement), columns)
        facts = {
            "schema": SCHEMA,
            "settings_hash": settings_hash(settings),
            "stamp": stamp,
            "comparable": dict(comparable_facts(), **accelerator.comparable()),
            "rows_sha256": text_sha256(text),
        }
        facts.update(measurement.facts())
        write_facts(facts_path, facts)
        write_text(out, text)
        keep_in_archive([facts_path, out], facts["rows_sha256"])


def _require_gpu(settings: Settings) -> None:
    """Raise DeviceError for settings of another device than a GPU."""
    if settings["device"]["kind"] == "cpu":
        raise DeviceError(
            "device: expected a GPU, which this experiment is about, got "
            f"{settings['device']['name']}; name one: --config device=h200"
        )


def _accelerator(device: Device) -> typing.Any:
    from packedconv.bench import accelerator

    return accelerator.find(device)


def keep_in_archive(paths: typing.Sequence[str], digest: str) -> None:
    """Keep files under another name too, in archive/ beside them.

    The workflow removes a measurement before it repeats it; what was measured once stays.
    A failure is a warning: the files themselves are there.
    """
    for path in paths:
        kept = _archived(path, digest[:12])
        archive = os.path.dirname(kept)
        try:
            os.makedirs(archive, exist_ok=True)
            if not os.path.exists(kept):
                _second_name(path, kept)
        except OSError as error:
            print(f"warning: {path} was not kept in {archive}: {error}", file=sys.stderr)


def _archived(path: str, label: str) -> str:
    """Where the file of a step is kept: under its name and a label in archive/ beside it."""
    folder, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    return os.path.join(folder, "archive", f"{stem}-{label}{suffix}")


def _keep_part(out: str, facts_path: str, samples: str, facts: Facts) -> str:
    """Write what was timed of a layer into archive/ alone; returns where, in words."""
    label = "part-" + facts["samples_sha256"][:12]
    kept, kept_facts = _archived(out, label), _archived(facts_path, label)
    try:
        for path in (kept, kept_facts):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_facts(kept_facts, facts)
        write_text(kept, samples)
    except OSError as error:
        return f"; what had been timed could not be kept as {kept}: {error}"
    return f"; what had been timed is kept in {kept}, its facts in {kept_facts}"


def _second_name(path: str, kept: str) -> None:
    try:
        # Files are replaced, never written into, so a second name costs no space.
        os.link(path, kept)
    except OSError:
        with atomic_write(kept) as temporary:
            shutil.copyfile(path, temporary)


def is_complete(out: str, facts_path: str, layer: Layer, identity: Facts) -> bool:
    """Whether both files are there, belong together, and have this identity."""
    samples, text = read_text(out), read_text(facts_path)
    if samples is None or text is None:
        return False
    try:
        facts = json.loads(text)
    except ValueError:
        return False
    return (
        is_intact(facts)
        and facts.get("layer") == dict(layer._asdict())
        and all(facts.get(key) == value for key, value in identity.items())
        and facts.get("samples_sha256") == text_sha256(samples)
    )


def measure_layer(
    settings: Settings,
    layer: Layer,
    weights: typing.Mapping[str, np.ndarray],
    threads: int,
) -> typing.Tuple[typing.List[typing.Dict[str, typing.Any]], Facts]:
    """Rows of the samples file and facts of one layer, on `threads` threads."""
    import torch

    from packedconv.bench import contenders as sides
    from packedconv.bench.ceilings import peak_flops
    from packedconv.bench.machine import machine_facts, moment
    from packedconv.bench.protocol import (
        PEAK_BURST_SECONDS,
        WARMUP_SECONDS,
        faults_by_implementation,
        run_rounds,
    )
    from packedconv.bench.rows import layer_facts, pack_timed, sample_rows

    # Not OMP_NUM_THREADS, which the workflow sets to its own number.
    torch.set_num_threads(threads)
    reused = sides.reuse_memory()
    before, begin = moment(), time.perf_counter()
    protocol = settings["protocol"]
    array = make_input(layer, settings["seed"], settings["inputs"])
    # Cloned, since torch aligns its own memory to cache lines and numpy does not.
    image = torch.from_numpy(array).clone()
    out = torch.zeros(layer.output_shape)

    with torch.inference_mode():
        packed, packing_seconds = {}, {}
        for key, weight in weights.items():
            packed[key], packing_seconds[key] = pack_timed(torch.from_numpy(weight))
        # What both sides compute: the weights as packed.
        dense_weights = {key: packed[key].unpack() for key in packed}
        layout, trials = sides.choose_dense(
            layer,
            image,
            dense_weights[sparsity_key(settings["sparsities"][0])],
            protocol["trial_executions"],
            protocol["warmup_executions"],
        )
        contenders = {
            key: [
                sides.sparse_contender(layer, image, packed[key], out),
                sides.dense_contender(layout, layer, image, dense_weights[key]),
            ]
            for key in packed
        }
        measured = run_rounds(
            contenders,
            protocol["rounds"],
            protocol["executions"],
            protocol["warmup_executions"],
            input_seed(settings["seed"], layer),
            lambda: peak_flops(threads, PEAK_BURST_SECONDS),
            layer.name,
        )
    faults = faults_by_implementation(measured)
    warn_of_faults(layer, faults)
    facts = {
        **layer_facts(settings, layer, threads, array, packed, packing_seconds),
        "dense": dict(trials, layout=layout),
        "peak_bursts": measured.peak_bursts,
        "page_faults_per_execution": faults,
        "reuses_freed_memory": reused,
        "warmup_seconds": WARMUP_SECONDS,
        "measuring_seconds": time.perf_counter() - begin,
        "before": before,
        "after": moment(),
        "machine": machine_facts(),
    }
    return sample_rows(settings, layer, packed, threads, measured.samples), facts


def thread_count(settings: Settings, device: Device) -> int:
    """Threads of a measurement: those of the settings, or all physical cores usable."""
    return settings["threads"] or device.cores


def warn_of_faults(layer: Layer, faults: typing.Mapping[str, typing.Mapping[str, float]]) -> None:
    worst = max(faults.get("dense", {"": 0.0}).values())
    if worst > _MANY_FAULTS:
        print(
            f"warning: layer {layer.name}: {worst:.0f} page faults per dense execution: the "
            "C library does not reuse freed memory, and the dense side looks slower than it is",
            file=sys.stderr,
        )


def _run_rows(settings: Settings) -> int:
    """Rows of a layer of a run, at most."""
    protocol = settings["protocol"]
    sides = 2 if settings["device"]["kind"] == "cpu" else len(IMPLEMENTATIONS)
    return sides * len(settings["sparsities"]) * protocol["rounds"] * protocol["executions"]


def require_space(path: str, rows: int) -> None:
    """Raise OSError before so many rows are measured that could not be written."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    if shutil.disk_usage(folder).free < rows * _ROW_BYTES + _FACTS_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


def require_stamped_extension(path: str, stamp: typing.Any) -> None:
    """Raise ValueError unless the stamp is of the extension that this process runs."""
    # torch first: whichever OpenMP library comes first serves both.
    import torch  # noqa: F401

    from packedconv import _core

    with open(_core.__file__, "rb") as stream:
        digest = hashlib.sha256(stream.read()).hexdigest()
    if not isinstance(stamp, dict) or stamp.get("sha256") != digest:
        raise ValueError(
            f"stamp {path}: it is not of the extension in use ({_core.__file__}); "
            "build the extension again, or remove another packedconv that is installed "
            "in this environment (pip uninstall packedconv)"
        )


def load_stamp(path: str) -> typing.Any:
    text = read_text(path)
    if text is None:
        raise ValueError(f"stamp: no file {os.fspath(path)}; build the extension first")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"stamp {path}: not JSON: {error}; build the extension again") from error
