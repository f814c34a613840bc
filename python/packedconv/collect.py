"""From the files of single layers to the files of a run, and the peaks of the device."""

import json
import math
import os
import statistics
import sys
import typing

from packedconv.layer import Layer, sparsity_key
from packedconv.roofline import border_exact_flops
from packedconv.samples_file import (
    CEILING_COLUMNS,
    ERROR_COLUMNS,
    IMPLEMENTATIONS,
    REQUIRED_IMPLEMENTATIONS,
    SAMPLE_COLUMNS,
    format_csv,
    read_rows,
    read_text,
    text_sha256,
    write_text,
)
from packedconv.script import CheckError
from packedconv.seal import require_intact, sealed_text

# A machine whose peak during a layer's rounds falls below this share of its best was busy.
STEADY_SHARE = 0.8

# Dense settings on a GPU that are not held to the FP32 peak: TF32 and FP16 run on tensor
# cores, which are several times as fast, and PyTorch's default allows TF32.
TENSOR_CORES = ("dense", "dense_tf32", "dense_fp16")
# Those that are, but not by the operations of a direct convolution: cuDNN may use Winograd's
# or Fourier's, which save multiplications, K² of them at most.
TRANSFORMED = ("dense_fp32", "dense_channels_last")

Rows = typing.List[typing.Dict[str, str]]
Facts = typing.Dict[str, typing.Any]

_MEASURE_AGAIN = "delete it and measure the layer again"


def collect(
    bench_paths: typing.Sequence[str],
    facts_paths: typing.Sequence[str],
    check_paths: typing.Sequence[str],
    ceilings_path: str,
    ceilings_facts_path: str,
    samples_out: str,
    errors_out: str,
    peaks_out: str,
) -> None:
    """Check the files of all layers against one another and write the three of the run.

    Raises ValueError when files are cut or do not belong together, CheckError when a
    contender is faster than the peak of the device allows. Nothing is written then.
    """
    samples = [row for path in bench_paths for row in read_rows(path, SAMPLE_COLUMNS)]
    facts = load_facts(facts_paths, bench_paths)
    for path in check_paths:
        _require_checked(path)
    errors = [row for path in check_paths for row in read_rows(path, ERROR_COLUMNS)]
    ceilings = read_rows(ceilings_path, CEILING_COLUMNS)
    content = load_ceilings_facts(ceilings_path, ceilings_facts_path)
    _require_same_machine(facts, content, ceilings_facts_path)

    _require_one_run([*samples, *errors, *ceilings])
    _require_complete(samples)
    timed = {(row["layer"], row["sparsity"]) for row in samples}
    checked = {(row["layer"], row["sparsity"]) for row in errors}
    if timed != checked:
        raise ValueError(
            f"checks: expected those of the timed layers and sparsities, they differ in "
            f"{sorted(timed ^ checked)}; make the checks again"
        )
    peaks = reduce_peaks(ceilings, list(facts.values()))
    stated = _stated_peak(facts)
    if stated is None:
        require_below_peak(samples, facts, peaks["peak_flops"])
    else:
        require_below_stated_peak(samples, facts, max(stated, peaks["peak_flops"]))
    for name in peaks["busy_layers"]:
        print(
            f"warning: layer {name}: during its rounds the peak was "
            f"{peaks['burst_share'][name]:.0%} of the device's: the machine was busy, so verdicts "
            f"that need this layer stay open; to measure it again on an idle machine, remove "
            f"{bench_paths[0].rpartition('/')[0]}/{name}.csv and run again",
            file=sys.stderr,
        )

    texts = {
        errors_out: format_csv(errors, ERROR_COLUMNS),
        samples_out: format_csv(samples, SAMPLE_COLUMNS),
    }
    # What is rendered from these files must be what was collected.
    peaks["files_sha256"] = {
        os.path.basename(path): text_sha256(text) for path, text in texts.items()
    }
    write_text(peaks_out, sealed_text(peaks))
    for path, text in texts.items():
        write_text(path, text)


def load_facts(
    facts_paths: typing.Sequence[str], bench_paths: typing.Sequence[str]
) -> typing.Dict[str, Facts]:
    """Facts by layer name, in step with the samples files that they ride with.

    Raises ValueError when one is not JSON, is of other samples than its file holds, or
    settings, extension or threads are not the same for all.
    """
    if len(facts_paths) != len(bench_paths):
        raise ValueError(
            f"facts: expected {len(bench_paths)} files, one per samples file, "
            f"got {len(facts_paths)}"
        )
    facts = {}
    for path, bench_path in zip(facts_paths, bench_paths):
        text = read_text(path)
        if text is None:
            raise ValueError(f"{path}: not found; measure the layer again")
        try:
            content = json.loads(text)
            name, digest = content["layer"]["name"], content["samples_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a facts file ({error}); {_MEASURE_AGAIN}") from error
        require_intact(path, content, _MEASURE_AGAIN)
        if digest != text_sha256(read_text(bench_path) or ""):
            raise ValueError(
                f"{bench_path}: expected the samples that {path} belongs to; {_MEASURE_AGAIN}"
            )
        facts[name] = content
    for key in ("settings_hash", "stamp", "threads", "comparable"):
        values = {json.dumps(content.get(key), sort_keys=True) for content in facts.values()}
        if len(values) != 1:
            raise ValueError(
                f"facts: expected one {key} for all layers, got {sorted(values)}; "
                "measure the older layers again"
            )
    return facts


def load_ceilings_facts(ceilings_path: str, ceilings_facts_path: str) -> Facts:
    """The facts of the ceilings. Raises ValueError where they belong to others."""
    again = "delete it and measure the ceilings again"
    try:
        content = json.loads(read_text(ceilings_facts_path) or "{}")
    except ValueError as error:
        raise ValueError(f"{ceilings_facts_path}: not JSON ({error}); {again}") from error
    require_intact(ceilings_facts_path, content, again)
    if content.get("ceilings_sha256") != text_sha256(read_text(ceilings_path) or ""):
        raise ValueError(
            f"{ceilings_path}: expected the ceilings that {ceilings_facts_path} belongs to; {again}"
        )
    return content


def _require_checked(path: str) -> None:
    """Raise ValueError where the facts beside a check file belong to other errors.

    An earlier version wrote none.
    """
    facts_path = f"{os.path.splitext(path)[0]}.json"
    text = read_text(facts_path)
    if text is None:
        return
    again = "delete it and check the layer again"
    try:
        facts = json.loads(text)
        digest = facts["errors_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{facts_path}: not a facts file ({error}); {again}") from error
    require_intact(facts_path, facts, again)
    if digest != text_sha256(read_text(path) or ""):
        raise ValueError(f"{path}: expected the errors that {facts_path} belongs to; {again}")


def _require_same_machine(
    facts: typing.Mapping[str, Facts], content: Facts, ceilings_facts_path: str
) -> None:
    """Raise ValueError unless the ceilings are of the machine and extension of the layers."""
    layer = next(iter(facts.values()))
    for key in ("stamp", "comparable"):
        if content.get(key) != layer[key]:
            raise ValueError(
                f"{ceilings_facts_path}: {key}: expected {layer[key]}, as the layers have, got "
                f"{content.get(key)}; delete the ceilings and measure them again"
            )


def reduce_peaks(ceilings: Rows, facts: typing.Sequence[Facts]) -> typing.Dict[str, typing.Any]:
    """The device's peaks on the threads of the run.

    peak_flops: the largest of the trials and of the bursts before each round, FLOP/s.
    bandwidth: the largest of the trials on that many threads or fewer, bytes/s: one thread
    may fill the memory bus alone, and a roof is what the run could have reached.
    burst_share: per layer, the median of its bursts over peak_flops.
    busy_layers: those where it fell below STEADY_SHARE.
    peak_of: what the peak of a GPU is, which is only a lower bound; not there for a CPU.
    Raises ValueError when there is no trial.
    """
    threads = facts[0]["threads"]
    trials = {"peak_flops": [], "bandwidth": []}  # type: typing.Dict[str, typing.List[float]]
    for row in ceilings:
        counted = int(row["threads"]) == threads or (
            row["quantity"] == "bandwidth" and int(row["threads"]) < threads
        )
        if counted and row["quantity"] in trials:
            trials[row["quantity"]].append(_positive(row["value"], "ceilings: value"))
    for quantity, values in trials.items():
        if not values:
            raise ValueError(
                f"ceilings: no {quantity} on {threads} threads, which the run used; "
                "delete the ceilings and measure them again"
            )
    bursts = {content["layer"]["name"]: content["peak_bursts"] for content in facts}
    peak_flops = max(trials["peak_flops"] + [max(values) for values in bursts.values()])
    shares = {
        name: round(statistics.median(values) / peak_flops, 4) for name, values in bursts.items()
    }
    peak_of = {"peak_of": facts[0]["peak_of"]} if "peak_of" in facts[0] else {}
    return {
        **peak_of,
        "peak_flops": peak_flops,
        "bandwidth": max(trials["bandwidth"]),
        "threads": threads,
        "burst_share": shares,
        "busy_layers": [name for name, share in shares.items() if share < STEADY_SHARE],
    }


def require_below_peak(samples: Rows, facts: typing.Mapping[str, Facts], peak_flops: float) -> None:
    """Raise CheckError when a contender's median round does more FLOP/s than the peak of a CPU.

    Operations are those inside the image: all weights for dense, the nonzeros for sparse.
    """
    for (name, sparsity, implementation), rounds in _round_means(samples).items():
        flops = _flops(facts[name], sparsity, implementation) / statistics.median(rounds)
        if flops > peak_flops:
            raise CheckError(
                f"{_too_fast(name, sparsity, implementation, rounds, flops)}"
                f"more than the measured peak of {peak_flops / 1e9:.1f} GFLOP/s "
                f"({facts[name]['comparable']['isa']}); the machine was disturbed while one of "
                "them was measured: delete ceilings.csv and this layer's bench files and measure "
                "again on an idle machine"
            )


def require_below_stated_peak(
    samples: Rows, facts: typing.Mapping[str, Facts], peak_flops: float
) -> None:
    """Raise CheckError when a contender's median round does more FLOP/s than a GPU can.

    peak_flops: FP32 peak of the device file, or what was measured where that is more. Not
    asked of TENSOR_CORES; of TRANSFORMED the K²-th part of their operations.
    """
    for (name, sparsity, implementation), rounds in _round_means(samples).items():
        if implementation in TENSOR_CORES:
            continue
        flops = _flops(facts[name], sparsity, implementation) / statistics.median(rounds)
        if implementation in TRANSFORMED:
            flops /= facts[name]["layer"]["kernel_size"] ** 2
        if flops > peak_flops:
            raise CheckError(
                f"{_too_fast(name, sparsity, implementation, rounds, flops)}"
                f"more than the FP32 peak of {peak_flops / 1e9:.1f} GFLOP/s that the device file "
                "states; it did not do its work, or the file is of another device: see which GPU "
                "was measured, delete this layer's bench files and measure again"
            )


def _flops(facts: Facts, sparsity: str, implementation: str) -> int:
    """Operations inside the image: of all weights for a dense one, else of the nonzeros."""
    positions = facts["nonzeros_by_kernel_position"][sparsity_key(float(sparsity))]
    dense = implementation.startswith("dense")
    return border_exact_flops(Layer(**facts["layer"]), None if dense else positions)


def _too_fast(
    name: str,
    sparsity: str,
    implementation: str,
    rounds: typing.Sequence[float],
    flops: float,
) -> str:
    return (
        f"layer {name}, sparsity {sparsity}: {implementation} does {flops / 1e9:.1f} GFLOP/s "
        f"({statistics.median(rounds) * 1e3:.3f} ms per execution), "
    )


def _stated_peak(facts: typing.Mapping[str, Facts]) -> typing.Optional[float]:
    """FP32 peak of a GPU's device file, FLOP/s, infinite where the file has none; None for a
    CPU, whose peak is measured."""
    stated = next(iter(facts.values())).get("stated")
    if stated is None:
        return None
    return stated["peak_flops"] or math.inf


def _round_means(
    samples: Rows,
) -> typing.Dict[typing.Tuple[str, str, str], typing.List[float]]:
    """Mean seconds of every round by (layer, sparsity, implementation)."""
    rounds = {}  # type: typing.Dict[typing.Tuple[str, ...], typing.List[float]]
    for row in samples:
        key = (row["layer"], row["sparsity"], row["implementation"], row["round"])
        rounds.setdefault(key, []).append(_positive(row["seconds"], "samples: seconds"))
    means = {}  # type: typing.Dict[typing.Tuple[str, str, str], typing.List[float]]
    for key, seconds in rounds.items():
        means.setdefault((key[0], key[1], key[2]), []).append(sum(seconds) / len(seconds))
    return means


def _require_one_run(rows: Rows) -> None:
    for column in ("device", "run"):
        values = {row[column] for row in rows}
        if len(values) != 1:
            raise ValueError(
                f"{column}: expected one for all files, got {sorted(values)}; "
                f"keep the files of each {column} in a folder of its own"
            )


def _require_complete(samples: Rows) -> None:
    """ "sparse" and "dense" of every layer and sparsity, each execution of each round once; so
    for every further implementation at all sparsities of a layer that has any of it."""
    found = {}  # type: typing.Dict[typing.Tuple[str, ...], typing.List[typing.Tuple[int, int]]]
    sparsities = {}  # type: typing.Dict[str, typing.Dict[str, None]]
    for row in samples:
        sparsities.setdefault(row["layer"], {})[row["sparsity"]] = None
    for row in samples:
        if row["implementation"] not in IMPLEMENTATIONS:
            raise ValueError(f"samples: implementation {row['implementation']!r} is not known")
        for implementation in (*REQUIRED_IMPLEMENTATIONS[::-1], row["implementation"]):
            for sparsity in sparsities[row["layer"]]:
                found.setdefault((row["layer"], sparsity, implementation), [])
        key = (row["layer"], row["sparsity"], row["implementation"])
        found[key].append((int(row["round"]), int(row["execution"])))
    every = sorted(set().union(*found.values()))
    for key, pairs in found.items():
        if sorted(pairs) != every:
            raise ValueError(
                f"samples of layer {key[0]}, sparsity {key[1]}, {key[2]}: expected "
                f"{len(every)} executions, got {len(pairs)}; measure the layer again"
            )


def _positive(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a positive number, got {text!r}; measure again")
    return value
