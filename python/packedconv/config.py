"""Configuration: what a run of the workflow measures, validated and resolved."""

import functools
import json
import pathlib
from typing import Any

import jsonschema
import yaml

from packedconv.layer import Layer, sparsity_key
from packedconv.run_names import DEFAULT_RUN, RESERVED
from packedconv.settings import layer_of

PAPER_PROTOCOL = "paper-protocol"
# Keys that name stored results, and change nothing that is measured.
COMPARED = ("left", "right")
# Threads and bias are compared with warm caches only.
COLD_CONTENDERS = ("sparse", "dense")


def load_yaml(path: pathlib.Path | str) -> Any:
    """The content of a YAML file. Raises ValueError when it is not YAML."""
    with open(path, encoding="utf-8") as file:
        try:
            return yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: expected YAML, got {error}") from error


@functools.cache
def _validator(schema_path: pathlib.Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(load_yaml(schema_path))


def validate(value: Any, schema_path: pathlib.Path, source: str) -> None:
    """Raise ValueError naming `source`, the key and the fault when `value` breaks the schema."""
    errors = sorted(_validator(schema_path).iter_errors(value), key=lambda e: list(e.path))
    if errors:
        error = errors[0]
        key = ".".join(str(part) for part in error.path) or "top level"
        raise ValueError(f"{source}: {key}: {error.message}; see {schema_path}")


def device_names(root: pathlib.Path) -> list[str]:
    """Names of the device files."""
    return sorted(path.stem for path in (root / "config" / "devices").glob("*.yaml"))


def load_device(root: pathlib.Path, name: str) -> dict:
    """The device file config/devices/<name>.yaml. Raises ValueError when unknown or wrong."""
    if name not in device_names(root):
        raise ValueError(
            f"device: expected one of {', '.join(device_names(root))}, got {name!r}; "
            f"add config/devices/{name}.yaml for another device"
        )
    path = root / "config" / "devices" / f"{name}.yaml"
    device = load_yaml(path)
    validate(device, root / "config" / "schema" / "device.schema.yaml", str(path))
    validate_layers(root, device["layers"], str(path))
    if device["name"] != name:
        raise ValueError(f"{path}: name: expected {name!r}, as the file, got {device['name']!r}")
    return device


def validate_layers(root: pathlib.Path, layers: Any, source: str) -> None:
    """Raise ValueError when `layers` breaks config/schema/layers.schema.yaml."""
    validate(layers, root / "config" / "schema" / "layers.schema.yaml", f"{source}: layers")


def resolve(config: dict, root: pathlib.Path) -> dict:
    """The settings of a run: the merged configuration with its device file and layers.

    Raises ValueError for an unknown key or device, a value outside the schema, or a run
    that would need a name of its own.
    """
    validate(config, root / "config" / "schema" / "config.schema.yaml", "config")
    for sparsity in config["sparsities"]:
        if abs(100 * sparsity - round(100 * sparsity)) > 1e-9:
            raise ValueError(f"config: sparsities: expected whole hundredths, got {sparsity}")
    device = load_device(root, config["device"])
    layers = device["layers"]
    if config["layers"] is not None:
        validate_layers(root, config["layers"], "config")
        layers = config["layers"]
    settings = {
        "device": device,
        "run": run_name(config, root),
        "seed": config["seed"],
        "sparsities": [round(float(sparsity), 2) for sparsity in config["sparsities"]],
        "threads": device["threads"],
        "protocol": dict(config["protocol"]),
        "layers": [layer._asdict() for layer in expand_layers(layers)],
        "weights": dict(config["weights"]),
        "inputs": dict(config["inputs"]),
    }
    if device["kind"] == "cuda":
        settings["contenders"] = config["contenders"]
    elif config["contenders"] != "all":
        raise ValueError(
            f"contenders: expected all for device {device['name']}, where the sparse and the dense "
            f"convolution are all there is, got {config['contenders']}; name a GPU: "
            "--config device=h200"
        )
    return settings


def run_name(config: dict, root: pathlib.Path) -> str:
    """Name of the run that a merged configuration asks for.

    Raises ValueError for an unknown key or a value outside the schema, where the run needs a name
    of its own, for a device's name and for a reserved one.
    """
    validate(config, root / "config" / "schema" / "config.schema.yaml", "config")
    run = config["run"] or _derived_run(config, root)
    if run in device_names(root):
        raise ValueError(f"run: expected a name that is no device's, got {run!r}")
    if run in RESERVED:
        raise ValueError(
            f"run: expected a name other than {' and '.join(RESERVED)}, whose folders in figures/ "
            f"hold no run, got {run!r}; name another (--config run=NAME)"
        )
    return run


def expand_layers(layers: dict) -> list[Layer]:
    """One Layer per output channel count, named oc<count>."""
    shape = {key: value for key, value in layers.items() if key != "out_channels"}
    return [
        Layer(name=f"oc{count}", out_channels=count, **shape) for count in layers["out_channels"]
    ]


def resolve_layer_tables(config: dict, root: pathlib.Path) -> dict[str, dict[str, dict]]:
    """What is measured on a CPU beside the paper's layers, by name of the layer, for each of the
    tables "layers", "layers_cold" and "peers", and for "ladder": an `experiment` (see
    bench.experiment), and the `title` of the part of the table that it is in.

    Raises ValueError for a file that is not there or wrong.
    """
    source = config["layer_tables"]
    tables = load_yaml(located(root, source, "layer_tables"))
    validate(tables, root / "config" / "schema" / "layer_tables.schema.yaml", source)
    cold = dict(tables["cold"])
    set_bytes = cold.pop("set_bytes")
    warm_parts = tables["parts"]
    cold_parts = [
        {**part, "contenders": [name for name in part["contenders"] if name in COLD_CONTENDERS]}
        for part in warm_parts
        if part.get("cold", True)
    ]
    two_sides = {"title": "", "contenders": ["sparse", "dense"]}
    rungs = [{**two_sides, **part} for part in tables["rungs"]]
    peers = dict(tables["peers"])
    beside = [{**two_sides, **part} for part in peers.pop("parts")]
    wanted = {
        "layers": (warm_parts, tables["warm"], None),
        "layers_cold": (cold_parts, cold, set_bytes),
        "ladder": (rungs, tables["ladder"], None),
        "peers": (beside, peers, None),
    }
    return {
        name: _experiments(parts, tables, protocol, set_bytes, source)
        for name, (parts, protocol, set_bytes) in wanted.items()
    }


def located(root: pathlib.Path, name: str, key: str) -> pathlib.Path:
    """The file that a key of the configuration names. Raises ValueError where there is none."""
    path = root / name
    if not path.is_file():
        raise ValueError(f"{key}: expected a YAML file, got {name!r}")
    return path


def plain_experiments(
    parts: list[dict], tables: dict, protocol: dict, source: str
) -> dict[str, dict]:
    """Experiments with warm caches that decide by themselves what contends, by layer.

    tables: has `repeats` and `widest_spread`. Raises ValueError for wrong layers or sparsities.
    """
    plain = [{"title": "", "contenders": [], **part} for part in parts]
    return _experiments(plain, tables, protocol, None, source)


def _experiments(
    parts: list[dict], tables: dict, protocol: dict, set_bytes: int | None, source: str
) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for part in parts:
        for sparsity in part["sparsities"]:
            try:
                sparsity_key(sparsity)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None
        for layer in (layer for record in part["layers"] for layer in _listed_layers(record)):
            if layer.name in found:
                raise ValueError(f"{source}: expected each layer once, got {layer.name} twice")
            try:
                layer_of(layer._asdict())
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None
            experiment = {
                "layer": layer._asdict(),
                "skewed": part.get("skewed", False),
                "sparsities": part["sparsities"],
                "contenders": part["contenders"],
                "environment": part.get("environment", {}),
                "protocol": protocol,
                "repeats": tables["repeats"],
                "widest_spread": tables["widest_spread"],
                "set_bytes": set_bytes,
            }
            found[layer.name] = {"title": part["title"], "experiment": experiment}
    return found


def _listed_layers(record: dict) -> list[Layer]:
    """A Layer for each batch and number of output channels, named <name>_oc<count>_n<batch>."""
    shape = {key: record[key] for key in record if key not in ("name", "batch", "out_channels")}
    return [
        Layer(f"{record['name']}_oc{count}_n{batch}", batch, out_channels=count, **shape)
        for batch in record["batch"]
        for count in record["out_channels"]
    ]


def _derived_run(config: dict, root: pathlib.Path) -> str:
    defaults = load_yaml(root / "config" / "config.yaml")
    changed = sorted(
        key
        for key in config
        if key not in ("device", "run", *COMPARED) and config[key] != defaults[key]
    )
    if not changed:
        return DEFAULT_RUN
    if changed == ["seed"]:
        return f"seed{config['seed']}"
    if changed == ["contenders"]:
        return PAPER_PROTOCOL
    raise ValueError(
        f"run: expected a name, since {', '.join(changed)} differ from config/config.yaml; "
        "add run=NAME, so that the results get a folder of their own"
    )


def settings_text(settings: dict) -> str:
    """The canonical JSON text of settings: same settings, same bytes."""
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def check_stored_settings(settings: dict, path: pathlib.Path) -> None:
    """Raise ValueError when `path` holds other settings for the same run.

    A run's results belong to one set of settings; measuring others under its name would
    overwrite them.
    """
    if not path.exists() or path.read_bytes() == settings_text(settings).encode("utf-8"):
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in settings if stored.get(key) != settings[key])
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected the settings of a run as JSON, got {error}; delete this file and "
            "run again: it is written anew, and what was measured is kept"
        ) from error
    raise ValueError(
        f"run: {path.parent} was measured with another {', '.join(changed) or 'format'}; "
        "name another run (--config run=NAME) or move that folder away"
    )
