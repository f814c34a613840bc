"""From the files of single layers to the files of a run, and the peaks of the device."""

import json
import math
import statistics
import sys
import typing

from packedconv.layer import Layer
from packedconv.roofline import border_exact_flops
from packedconv.samples_file import (
    CEILING_COLUMNS,
    ERROR_COLUMNS,
    SAMPLE_COLUMNS,
    format_csv,
    read_rows,
    read_text,
    text_sha256,
    write_text,
)
from packedconv.script import CheckError
from packedconv.weights import sparsity_key

# A machine whose peak during a layer's rounds falls below this share of its best was busy.
STEADY_SHARE = 0.8

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
    errors = [row for path in check_paths for row in read_rows(path, ERROR_COLUMNS)]
    ceilings = read_rows(ceilings_path, CEILING_COLUMNS)
    _require_same_machine(facts, ceilings_path, ceilings_facts_path)

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
    require_below_peak(samples, facts, peaks["peak_flops"])
    for name in peaks["busy_layers"]:
        print(
            f"warning: layer {name}: during its rounds the peak was "
            f"{peaks['burst_share'][name]:.0%} of the device's: the machine was busy, so verdicts "
            f"that need this layer stay open; to measure it again on an idle machine, remove "
            f"{bench_paths[0].rpartition('/')[0]}/{name}.csv and run again",
            file=sys.stderr,
        )

    write_text(errors_out, format_csv(errors, ERROR_COLUMNS))
    write_text(peaks_out, json.dumps(peaks, indent=1, sort_keys=True) + "\n")
    write_text(samples_out, format_csv(samples, SAMPLE_COLUMNS))


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


def _require_same_machine(
    facts: typing.Mapping[str, Facts], ceilings_path: str, ceilings_facts_path: str
) -> None:
    """Raise ValueError unless the ceilings are of the machine and extension of the layers."""
    content = json.loads(read_text(ceilings_facts_path) or "{}")
    if content.get("ceilings_sha256") != text_sha256(read_text(ceilings_path) or ""):
        raise ValueError(
            f"{ceilings_path}: expected the ceilings that {ceilings_facts_path} belongs to; "
            "delete it and measure the ceilings again"
        )
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
    return {
        "peak_flops": peak_flops,
        "bandwidth": max(trials["bandwidth"]),
        "threads": threads,
        "burst_share": shares,
        "busy_layers": [name for name, share in shares.items() if share < STEADY_SHARE],
    }


def require_below_peak(samples: Rows, facts: typing.Mapping[str, Facts], peak_flops: float) -> None:
    """Raise CheckError when a contender's median round does more FLOP/s than the peak.

    Operations are those inside the image: all weights for dense, the nonzeros for sparse.
    """
    for (name, sparsity, implementation), rounds in _round_means(samples).items():
        layer = Layer(**facts[name]["layer"])
        key = sparsity_key(float(sparsity))
        positions = facts[name]["nonzeros_by_kernel_position"][key]
        flops = border_exact_flops(layer, positions if implementation == "sparse" else None)
        seconds = statistics.median(rounds)
        if flops / seconds > peak_flops:
            raise CheckError(
                f"layer {name}, sparsity {sparsity}: {implementation} does "
                f"{flops / seconds / 1e9:.1f} GFLOP/s ({seconds * 1e3:.3f} ms per execution), "
                f"more than the measured peak of {peak_flops / 1e9:.1f} GFLOP/s "
                f"({facts[name]['comparable']['isa']}); the machine was disturbed while one of "
                "them was measured: delete ceilings.csv and this layer's bench files and measure "
                "again on an idle machine"
            )


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
    """Both implementations of every layer and sparsity, each execution of each round once."""
    found = {}  # type: typing.Dict[typing.Tuple[str, ...], typing.List[typing.Tuple[int, int]]]
    for row in samples:
        for implementation in ("dense", "sparse"):
            found.setdefault((row["layer"], row["sparsity"], implementation), [])
        key = (row["layer"], row["sparsity"], row["implementation"])
        if key not in found:
            raise ValueError(f"samples: implementation {key[2]!r} is not known")
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
