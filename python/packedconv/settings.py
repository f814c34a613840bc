"""The settings of a run: what is measured, on which device, and how (settings.json)."""

import hashlib
import json
import math
import typing

from packedconv.layer import Layer, nonzero_count, sparsity_key

Settings = typing.Dict[str, typing.Any]

_KEYS = {"device", "run", "seed", "sparsities", "threads", "protocol", "layers"}
_OPTIONAL = {"weights", "inputs", "contenders"}
# What a run on a GPU times: everything, or the paper's kernel against default PyTorch.
CONTENDERS = ("all", "paper-protocol")
# How weights and inputs are drawn, where settings do not say.
BOUND_FORMULA = "sqrt(6/(K^2*IC))"
UNIFORM_WEIGHTS = {"distribution": "uniform", "bound": BOUND_FORMULA}
UNIFORM_INPUTS = {"distribution": "uniform", "low": 0.0, "high": 1.0}
_PROTOCOL = {"rounds": 1, "executions": 1, "warmup_executions": 0, "trial_executions": 1}


def load_settings(path: str) -> Settings:
    """Read and validate settings.json. Raises ValueError that names the key at fault."""
    try:
        with open(path, encoding="utf-8") as stream:
            settings = json.load(stream)
    except ValueError as error:
        raise ValueError(f"settings {path}: not JSON: {error}; make it again") from error
    return validate_settings(settings)


def validate_settings(settings: typing.Any) -> Settings:
    """Return the settings with `weights` and `inputs` filled in.

    Raises ValueError that names the key, what was expected and what came.
    """
    _expect(isinstance(settings, dict), "settings", "an object", settings)
    unknown = set(settings) - _KEYS - _OPTIONAL
    _expect(not unknown, "settings", "no unknown key", sorted(unknown))
    missing = _KEYS - set(settings)
    _expect(not missing, "settings", f"the keys {sorted(missing)}", sorted(settings))
    settings = dict({"weights": UNIFORM_WEIGHTS, "inputs": UNIFORM_INPUTS}, **settings)

    device = settings["device"]
    _expect(isinstance(device, dict), "device", "an object", device)
    for key in ("name", "kind"):
        _expect(isinstance(device.get(key), str), "device." + key, "a string", device.get(key))
    _expect(isinstance(settings["run"], str) and settings["run"], "run", "a name", settings["run"])
    _expect(_is_int(settings["seed"]), "seed", "an integer", settings["seed"])
    threads = settings["threads"]
    _expect(
        threads is None or (_is_int(threads) and threads >= 1),
        "threads",
        "null or an integer of at least 1",
        threads,
    )

    # Of a GPU only: without the key a file is what it was before there was a choice.
    contenders = contenders_of(settings)
    _expect(
        contenders in CONTENDERS and (device["kind"] != "cpu" or contenders == "all"),
        "contenders",
        "all" if device["kind"] == "cpu" else "one of " + ", ".join(CONTENDERS),
        contenders,
    )

    sparsities = settings["sparsities"]
    _expect(isinstance(sparsities, list) and sparsities, "sparsities", "a list", sparsities)
    for sparsity in sparsities:
        sound = _is_number(sparsity) and 0 <= sparsity < 1
        _expect(sound, "sparsities", "numbers from 0 to 0.999", sparsity)
    keys = [sparsity_key(sparsity) for sparsity in sparsities]
    _expect(len(set(keys)) == len(keys), "sparsities", "no value twice", sparsities)

    protocol_of(settings["protocol"])
    layers = settings["layers"]
    _expect(isinstance(layers, list) and layers, "layers", "a list", layers)
    names = [layer_of(record).name for record in layers]
    _expect(len(set(names)) == len(names), "layers", "unique names", names)
    for record in layers:
        layer = layer_of(record)
        for sparsity in sparsities:
            _expect(
                nonzero_count(layer.weight_count, sparsity) > 0,
                f"layer {layer.name}",
                f"at least one nonzero at sparsity {sparsity}",
                layer.weight_count,
            )
    return settings


def protocol_of(protocol: typing.Any) -> typing.Dict[str, int]:
    """The protocol that a record of settings states. Raises ValueError that names the key."""
    _expect(
        isinstance(protocol, dict) and set(protocol) == set(_PROTOCOL),
        "protocol",
        f"the keys {sorted(_PROTOCOL)}",
        protocol,
    )
    for key, least in _PROTOCOL.items():
        _expect(
            _is_int(protocol[key]) and protocol[key] >= least,
            "protocol." + key,
            f"an integer of at least {least}",
            protocol[key],
        )
    return protocol


def contenders_of(settings: Settings) -> str:
    """What a run times, one of CONTENDERS."""
    return settings.get("contenders", "all")


def layers_of(settings: Settings) -> typing.List[Layer]:
    """The layers of a run."""
    return [layer_of(record) for record in settings["layers"]]


def find_layer(settings: Settings, name: str) -> Layer:
    """The layer of that name. Raises ValueError when there is none."""
    for layer in layers_of(settings):
        if layer.name == name:
            return layer
    names = ", ".join(layer.name for layer in layers_of(settings))
    raise ValueError(f"layer: expected one of {names}, got {name!r}")


def settings_hash(settings: Settings) -> str:
    """SHA-256 of the settings, whatever the order of their keys."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def layer_of(record: typing.Any) -> Layer:
    """The layer that a record of settings describes; dilation and groups are 1 without their keys.

    Raises ValueError that names the key at fault.
    """
    _expect(isinstance(record, dict), "layers", "objects", record)
    record = dict({"dilation": 1, "groups": 1}, **record)
    unknown = set(record) ^ set(Layer._fields)
    _expect(not unknown, "layers", f"the keys {list(Layer._fields)}", sorted(record))
    name = record["name"]
    _expect(
        isinstance(name, str) and name.replace("-", "").replace("_", "").isalnum(),
        "layers.name",
        "letters, digits, - and _",
        name,
    )
    for key in Layer._fields[1:]:
        least = 0 if key == "padding" else 1
        _expect(
            _is_int(record[key]) and record[key] >= least,
            f"layer {name}.{key}",
            f"an integer of at least {least}",
            record[key],
        )
    layer = Layer(**record)
    _expect(
        layer.in_channels % layer.groups == 0 and layer.out_channels % layer.groups == 0,
        f"layer {name}.groups",
        f"a divisor of {layer.in_channels} and {layer.out_channels}",
        layer.groups,
    )
    _expect(
        layer.out_height >= 1 and layer.out_width >= 1,
        f"layer {name}",
        "an output of at least one pixel",
        f"{layer.out_height} x {layer.out_width}",
    )
    return layer


def _is_int(value: typing.Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: typing.Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _expect(holds: typing.Any, name: str, expected: str, found: typing.Any) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {found!r}")
