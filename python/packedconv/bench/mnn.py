"""MNN, a peer with sparse convolution on CPUs: one-layer models in its format, and its sessions.

MNN (https://github.com/alibaba/MNN) is optional: envs/requirements-peers.txt. It is loaded by
name, when it is used.
"""

import importlib
import importlib.util
import json
import math
import os
import tempfile
import time
import typing

import numpy as np

from packedconv.layer import Layer

VERSION = "3.6"
# Its own layout of input and output, so that a session converts neither.
_LAYOUT = "NC4HW4"
# Numbers of MNN/Interpreter.hpp and MNN/MNNForwardType.h, for which its Python has no names:
# HintMode::WINOGRAD_MEMORY_LEVEL, SessionInfoCode::BACKENDS, and what the latter answers.
_WINOGRAD_MEMORY_LEVEL = 3
_BACKENDS = 2
_BACKEND_NAMES = {0: "CPU", 13: "CPU, its vector extension"}

Facts = typing.Dict[str, typing.Any]


class MissingPeerError(ValueError):
    """A peer is not installed."""


class MnnError(RuntimeError):
    """What MNN does not do, or does wrongly."""


class Setting(typing.NamedTuple):
    """One way to let MNN compute a layer.

    name: as in files. sparse: converted with --detectSparseSpeedUp. block: output channels that
    share a nonzero's position, 1 for its format RANDOM, more for SIMD_OC. winograd: its
    WINOGRAD_MEMORY_LEVEL (0 for none, 1 for small tiles), None for its default, large tiles.
    """

    name: str
    sparse: bool
    block: int = 1
    winograd: typing.Optional[int] = None


# Both of its sparse kernels, and its dense ones: the fastest is what it is measured by.
SETTINGS = (
    Setting("sparse", True),
    Setting("sparse_oc4", True, block=4),
    Setting("dense_winograd", False),
    Setting("dense_winograd_small", False, winograd=1),
    Setting("dense_direct", False, winograd=0),
)


def require() -> None:
    """Raise MissingPeerError, which says how to install it, where MNN is not installed."""
    if importlib.util.find_spec("MNN") is None:
        raise MissingPeerError(
            f"peers: expected MNN {VERSION}, which this target compares with, got none; install "
            "it: .venv/bin/pip install -r envs/requirements-peers.txt"
        )


def load() -> typing.Any:
    """The module MNN. Raises MnnError when it does not load, or is another version."""
    try:
        module = importlib.import_module("MNN")
    except (ImportError, OSError) as error:
        raise MnnError(f"MNN does not load: {error}") from error
    if not module.version().startswith(VERSION + "."):
        raise MnnError(f"expected MNN {VERSION}, got {module.version()}")
    return module


def described(setting: Setting, threads: int) -> str:
    """A setting in words, for tables."""
    parts = []
    if setting.sparse:
        parts.append("--detectSparseSpeedUp")
    if setting.block > 1:
        parts.append(f"--compressionParamsFile (SIMD_OC, oc_blocks {setting.block})")
    if setting.winograd is not None:
        parts.append(f"WINOGRAD_MEMORY_LEVEL {setting.winograd}")
    config = session_config(threads)
    parts += [f"{key} {config[key]}" for key in sorted(config)]
    return ", ".join(parts + [f"input and output {_LAYOUT}"])


def session_config(threads: int) -> Facts:
    """Configuration of a session: 32-bit floats, as fast as it goes."""
    return {"backend": "CPU", "numThread": threads, "precision": "high", "power": "high"}


class Session:
    """A layer in MNN, ready to run.

    Of a weight (OC, IC / groups, K, K), an input (N, IC, H, W), float32, and no bias.
    run: one execution, from MNN's own copy of the input into its own output. sparse_parameter:
    what its converter says of the weight's sparsity, None for a dense one. backend: where it
    runs. Raises MnnError when MNN refuses the layer.
    """

    def __init__(
        self, setting: Setting, layer: Layer, input: np.ndarray, weight: np.ndarray, threads: int
    ) -> None:
        self._module = load()
        self._layer = layer
        with tempfile.TemporaryDirectory() as folder:
            path, self.sparse_parameter = _convert(folder, setting, layer, weight)
            if setting.sparse and self.sparse_parameter is None:
                raise MnnError("its converter takes this weight for a dense one")
            self._interpreter = self._module.Interpreter(path)
        if setting.winograd is not None:
            self._interpreter.setSessionHint(_WINOGRAD_MEMORY_LEVEL, setting.winograd)
        self._session = self._interpreter.createSession(session_config(threads))
        if self._session is None:
            raise MnnError("it makes no session for this layer")
        # Into the layout that the session computes in, once.
        tensor = self._interpreter.getSessionInput(self._session)
        if not tensor.copyFrom(self._tensor(input)):
            raise MnnError("it does not take the layer's input")
        code = self._interpreter.getSessionInfo(self._session, _BACKENDS)
        self.backend = _BACKEND_NAMES.get(code, f"backend {code}")
        status = self.run()
        if status:
            raise MnnError(f"it fails with code {status}")

    def run(self) -> typing.Any:
        return self._interpreter.runSession(self._session)

    def output(self) -> np.ndarray:
        """The latest output, (N, OC, H_out, W_out), copied."""
        copied = self._tensor(np.zeros(self._layer.output_shape, np.float32))
        self._interpreter.getSessionOutput(self._session).copyToHostTensor(copied)
        return np.array(copied.getNumpyData(), np.float32).reshape(self._layer.output_shape)

    def _tensor(self, array: np.ndarray) -> typing.Any:
        module = self._module
        return module.Tensor(
            array.shape,
            module.Halide_Type_Float,
            np.ascontiguousarray(array),
            module.Tensor_DimensionType_Caffe,
        )


def choose(
    layer: Layer,
    input: np.ndarray,
    weight: np.ndarray,
    threads: int,
    error_fraction: typing.Callable[[np.ndarray], float],
    trial_executions: int,
    warmup_executions: int,
) -> typing.Tuple[typing.Optional[Setting], typing.Optional[Session], Facts]:
    """The fastest right setting by the median of its trial executions, its session, all trials.

    `error_fraction(output)`: largest error over what is allowed; a setting above 1 is timed but
    not chosen. Trials go round the settings as those of PyTorch's dense layouts do.
    Returns (setting, session, {"settings": {name: what was found}, "skipped": {name: reason}});
    setting and session are None where every one was skipped.
    """
    sessions, found, skipped = {}, {}, {}
    for setting in SETTINGS:
        try:
            session = Session(setting, layer, input, weight, threads)
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            skipped[setting.name] = str(error)
            continue
        fraction = error_fraction(session.output())
        if not fraction <= 1:
            skipped[setting.name] = f"its error is {fraction:.3g} times what FP32 sums are allowed"
        sessions[setting] = session
        found[setting.name] = {
            "described": described(setting, threads),
            "backend": session.backend,
            "sparse_parameter": session.sparse_parameter,
            # JSON has no infinity and no NaN.
            "error_fraction": fraction if math.isfinite(fraction) else None,
            "seconds": [],
        }
        for _ in range(warmup_executions):
            session.run()
    for _ in range(trial_executions):
        for setting, session in sessions.items():
            session.run()
            begin = time.perf_counter()
            session.run()
            found[setting.name]["seconds"].append(time.perf_counter() - begin)
    facts = {"settings": found, "skipped": skipped}
    right = [setting for setting in sessions if setting.name not in skipped]
    if not right:
        return None, None, facts
    fastest = min(right, key=lambda setting: float(np.median(found[setting.name]["seconds"])))
    return fastest, sessions[fastest], facts


def _convert(
    folder: str, setting: Setting, layer: Layer, weight: np.ndarray
) -> typing.Tuple[str, typing.Optional[Facts]]:
    """Write the model of a layer into a folder; its path, and what it says of sparsity."""
    # The function behind the command mnnconvert, which itself installs packages when it starts.
    convert = importlib.import_module("_tools").mnnconvert
    text, plain, model, dump = (
        os.path.join(folder, name)
        for name in ("layer.json", "plain.mnn", "layer.mnn", "converted.json")
    )
    with open(text, "w", encoding="ascii") as stream:
        json.dump(_network(layer, weight), stream)
    options = ["--detectSparseSpeedUp"] if setting.sparse else []
    if setting.block > 1:
        options += ["--compressionParamsFile", _compression(folder, setting.block)]
    for arguments in (
        ["-f", "JSON", "--modelFile", text, "--MNNModel", plain],
        ["-f", "MNN", "--modelFile", plain, "--MNNModel", model, *options],
        ["-f", "MNN", "--modelFile", model, "--JsonFile", dump],
    ):
        convert(["mnnconvert", *arguments, "--bizCode", "packedconv"])
    try:
        with open(dump, encoding="utf-8") as stream:
            (operator,) = (
                entry for entry in json.load(stream)["oplists"] if entry["type"] == "Convolution"
            )
    except (OSError, ValueError, KeyError) as error:
        raise MnnError(f"its converter does not take the layer: {error!r}") from error
    parameter = operator["main"].get("sparseParameter")
    if parameter is None:
        return model, None
    values = {argument["key"]: argument["i"] for argument in parameter["args"]}
    return model, dict(values, method=parameter["method"])


def _network(layer: Layer, weight: np.ndarray) -> Facts:
    """A layer as a network of its schema (MNN.fbs), in JSON."""
    common = {
        **{f"pad{axis}": layer.padding for axis in "XY"},
        **{f"kernel{axis}": layer.kernel_size for axis in "XY"},
        **{f"stride{axis}": layer.stride for axis in "XY"},
        **{f"dilate{axis}": layer.dilation for axis in "XY"},
        "padMode": "CAFFE",
        "group": layer.groups,
        "outputCount": layer.out_channels,
        "inputCount": layer.in_channels,
    }
    return {
        "oplists": [
            {
                "type": "Input",
                "name": "input",
                "main_type": "Input",
                "main": {
                    "dims": list(layer.input_shape),
                    "dtype": "DT_FLOAT",
                    "dformat": _LAYOUT,
                },
                "outputIndexes": [0],
                "defaultDimentionFormat": _LAYOUT,
            },
            {
                "type": "Convolution",
                "name": "output",
                "main_type": "Convolution2D",
                "main": {
                    "common": common,
                    "weight": weight.ravel().tolist(),
                    "bias": [0.0] * layer.out_channels,
                },
                "inputIndexes": [0],
                "outputIndexes": [1],
                "defaultDimentionFormat": _LAYOUT,
            },
        ],
        "tensorName": ["input", "output"],
        "outputName": ["output"],
        "sourceType": "CAFFE",
        "usage": "INFERENCE",
    }


def _compression(folder: str, block: int) -> str:
    """Write a file of compression parameters for nonzeros in blocks of channels; its path."""
    path = os.path.join(folder, "compression.json")
    pruning = {"type": "SIMD_OC", "simdOcPrunerParams": {"ocBlocks": [block]}}
    with open(path, "w", encoding="ascii") as stream:
        json.dump({"version": "0.0.0", "algo": [{"type": "PRUNE", "pruneParams": pruning}]}, stream)
    return path
