"""The comparison with a peer: four layers, packedconv, PyTorch's best dense and MNN's best.

A run of its own beside that of the paper's layers, with the same protocol.
"""

import json
import math
import os
import time
import typing

import numpy as np

from packedconv.bench import mnn, steps
from packedconv.bench.lock import measurement_lock
from packedconv.bench.spread import spread
from packedconv.device import DeviceError, require
from packedconv.layer import Layer
from packedconv.samples_file import SAMPLE_COLUMNS, format_csv, text_sha256, write_text
from packedconv.settings import Settings, settings_hash
from packedconv.weights import input_seed, make_input, make_weight, sparsity_key

# The two workloads of the paper, and two layers of a ResNet.
LAYERS = (
    Layer("a_oc64_n1", 1, 32, 64, 256, 256),
    Layer("b_oc48_n8", 8, 16, 48, 128, 128),
    Layer("r56_oc64_n1", 1, 64, 64, 56, 56),
    Layer("r14_oc256_n1", 1, 256, 256, 14, 14),
)
SPARSITIES = (0.90, 0.95, 0.98)
MNN = "mnn"
# A point whose rounds spread by more is measured again, so many times at most.
WIDEST_SPREAD = 0.15
REPEATS = 3

Facts = typing.Dict[str, typing.Any]


def find_layer(name: str) -> Layer:
    """The layer of that name. Raises ValueError when there is none."""
    for layer in LAYERS:
        if layer.name == name:
            return layer
    names = ", ".join(layer.name for layer in LAYERS)
    raise ValueError(f"layer: expected one of {names}, got {name!r}")


def peers(settings: Settings, layer_name: str, stamp_path: str, out: str, facts_path: str) -> None:
    """Time a layer beside MNN and write its samples (`out`) and facts, the facts first.

    Raises MissingPeerError without MNN, DeviceError for another device than a CPU, ValueError,
    CheckError when packedconv computes wrongly.
    """
    layer = find_layer(layer_name)
    if settings["device"]["kind"] != "cpu":
        raise DeviceError(
            f"device: expected a CPU, on which MNN's sparse convolution runs, got "
            f"{settings['device']['name']}; name one: --config device=cpu"
        )
    mnn.require()
    device = require(settings["device"])
    settings = dict(settings, sparsities=list(SPARSITIES))
    with measurement_lock(settings["device"]["name"]):
        stamp = steps._load_stamp(stamp_path)
        steps._require_stamped_extension(stamp_path, stamp)
        from packedconv.bench.machine import comparable_facts

        rows, facts = measure_layer(settings, layer, settings["threads"] or device.cores)
        samples = format_csv(rows, SAMPLE_COLUMNS)
        facts.update(
            schema=steps.SCHEMA,
            settings_hash=settings_hash(settings),
            stamp=stamp,
            comparable=comparable_facts(),
            samples_sha256=text_sha256(samples),
        )
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        write_text(facts_path, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        write_text(out, samples)
        steps.keep_in_archive([facts_path, out], facts["samples_sha256"])


def measure_layer(
    settings: Settings, layer: Layer, threads: int
) -> typing.Tuple[typing.List[typing.Dict[str, typing.Any]], Facts]:
    """Rows of samples and facts of one layer at the settings' sparsities, on `threads` threads.

    All sides compute the weights as packed. What is timed: conv2d of the input as it lies (NCHW)
    into an output that is there; PyTorch's conv2d in its fastest layout, into memory that is
    reused; runSession of MNN, whose input and output stay in its own layout. A sparsity at
    which no setting of MNN is right has no rows of it, and the reasons in facts["mnn"].
    Raises CheckError when packedconv computes wrongly.
    """
    import torch

    from packedconv.bench import contenders as sides
    from packedconv.bench.ceilings import peak_flops
    from packedconv.bench.check import compare_with_float64, require_within_bound
    from packedconv.bench.machine import machine_facts, moment
    from packedconv.bench.protocol import PEAK_BURST_SECONDS, WARMUP_SECONDS, run_rounds
    from packedconv.bench.rows import layer_facts, pack_timed, sample_rows

    torch.set_num_threads(threads)
    reused = sides.reuse_memory()
    before, begin = moment(), time.perf_counter()
    protocol = settings["protocol"]
    trials = (protocol["trial_executions"], protocol["warmup_executions"])
    array = make_input(layer, settings["seed"], settings["inputs"])
    # Cloned, since torch aligns its own memory to cache lines and numpy does not.
    image = torch.from_numpy(array).clone()
    out = torch.zeros(layer.output_shape)
    packed, packing_seconds = {}, {}
    contenders = {}  # type: typing.Dict[str, typing.List[sides.Contender]]
    peer = _load_facts()
    with torch.inference_mode():
        for sparsity in settings["sparsities"]:
            key = sparsity_key(sparsity)
            original = make_weight(layer, sparsity, settings["seed"], settings["weights"])
            packed[key], packing_seconds[key] = pack_timed(torch.from_numpy(original))
            weight = packed[key].unpack()
            sparse = sides.sparse_contender(layer, image, packed[key], out)
            sparse.execute()
            exact = compare_with_float64(out, layer, image, weight)
            require_within_bound(layer, sparsity, exact)
            if not contenders:
                layout, dense_trials = sides.choose_dense(layer, image, weight, *trials)
            contenders[key] = [sparse, sides.dense_contender(layout, layer, image, weight)]
            if peer["unavailable"] is None:
                setting, session, peer["sparsities"][key] = mnn.choose(
                    layer, array, weight.numpy(), threads, _error(layer, image, weight), *trials
                )
                if setting is not None and session is not None:
                    peer["chosen"][key] = setting.name
                    contenders[key].append(sides.Contender(MNN, setting.name, session.run))

        def time_rounds(group: typing.Any) -> typing.Any:
            return run_rounds(
                group,
                protocol["rounds"],
                protocol["executions"],
                protocol["warmup_executions"],
                input_seed(settings["seed"], layer),
                lambda: peak_flops(threads, PEAK_BURST_SECONDS),
                layer.name,
            )

        measured, spreads = steady_rounds(contenders, time_rounds)
    faults = {}  # type: typing.Dict[str, typing.Dict[str, float]]
    for (key, implementation), count in measured.page_faults.items():
        faults.setdefault(implementation, {})[key] = count
    facts = {
        **layer_facts(settings, layer, threads, array, packed, packing_seconds),
        "dense": dict(dense_trials, layout=layout),
        MNN: peer,
        "spreads": spreads,
        "widest_spread": WIDEST_SPREAD,
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


def steady_rounds(
    contenders: typing.Mapping[str, typing.Any],
    time_rounds: typing.Callable[[typing.Any], typing.Any],
) -> typing.Tuple[typing.Any, typing.Dict[str, typing.List[float]]]:
    """A measurement by `time_rounds(contenders)`, and the widest spread of every attempt by key.

    A key of which a contender spreads by more than WIDEST_SPREAD is measured again, all its
    contenders, REPEATS times at most; its attempt of the smallest spread is kept.
    """
    measured = time_rounds(contenders)
    kept = _by_key(measured.samples)
    spreads = {key: [_widest(samples)] for key, samples in kept.items()}
    bursts, faults = list(measured.peak_bursts), dict(measured.page_faults)
    for _ in range(REPEATS):
        wide = {key: contenders[key] for key in kept if min(spreads[key]) > WIDEST_SPREAD}
        if not wide:
            break
        again = time_rounds(wide)
        bursts.extend(again.peak_bursts)
        for key, samples in _by_key(again.samples).items():
            widest = _widest(samples)
            if widest < min(spreads[key]):
                kept[key] = samples
                faults.update({name: again.page_faults[name] for name in faults if name[0] == key})
            spreads[key].append(widest)
    samples = [sample for group in kept.values() for sample in group]
    return measured._replace(samples=samples, peak_bursts=bursts, page_faults=faults), spreads


def _by_key(samples: typing.Iterable[typing.Any]) -> typing.Dict[str, typing.List[typing.Any]]:
    groups = {}  # type: typing.Dict[str, typing.List[typing.Any]]
    for sample in samples:
        groups.setdefault(sample.key, []).append(sample)
    return groups


def _widest(samples: typing.Iterable[typing.Any]) -> float:
    """The largest spread of any contender's round medians."""
    seconds = {}  # type: typing.Dict[str, typing.Dict[int, typing.List[float]]]
    for sample in samples:
        rounds = seconds.setdefault(sample.implementation, {})
        rounds.setdefault(sample.round, []).append(sample.seconds)
    return max(
        spread([float(np.median(values)) for values in rounds.values()])
        for rounds in seconds.values()
    )


def _load_facts() -> Facts:
    """What the facts say of MNN, before it has been given a layer."""
    facts = {"version": None, "unavailable": None, "chosen": {}, "sparsities": {}}  # type: Facts
    try:
        facts["version"] = mnn.load().version()
    except mnn.UnavailableError as error:
        facts["unavailable"] = str(error)
    return facts


def _error(
    layer: Layer, image: typing.Any, weight: typing.Any
) -> typing.Callable[[np.ndarray], float]:
    """The error of an output against float64, over what is allowed.

    Allowed is, for every output, what FP32 sums are for the output with the largest sum of
    |w x|: fast algorithms such as Winograd's err by what a whole tile holds.
    """
    import torch

    convolve, arguments = torch.nn.functional.conv2d, layer.conv2d_arguments
    reference = convolve(image.double(), weight.double(), **arguments)
    largest = float(convolve(image.abs().double(), weight.abs().double(), **arguments).max())
    nonzeros = int((weight != 0).flatten(1).sum(1).max())
    allowed = (4 + nonzeros**0.5) * 2.0**-23 * largest

    def error_fraction(output: np.ndarray) -> float:
        error = (torch.from_numpy(output).double() - reference).abs()
        return math.inf if bool(torch.isnan(error).any()) else float(error.max()) / allowed

    return error_fraction
