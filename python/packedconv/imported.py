"""Runs of a checkout: those that it measures, and those that were imported and are only read."""

import json
import pathlib
import re
from typing import Any, NamedTuple

from packedconv import config as configuration
from packedconv.bundle import load_origin
from packedconv.run_folder import load_object
from packedconv.settings import validate_settings

# In a results folder: the layers beside the paper's that were measured, by table or experiment,
# each with the title of its part, in the order in which they are shown.
LISTING = "listed.json"

# What a configuration and settings.json both hold.
_SHARED = ("seed", "sparsities", "protocol", "contenders", "layers", "weights", "inputs")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Run(NamedTuple):
    """A run of a checkout.

    settings: as in settings.json. name: that of its folder here, results/<device>/<name>/, which
    an imported run has from `--as`, while its settings keep the name it was measured under.
    origin: origin.json of an imported run, else None.
    """

    settings: dict[str, Any]
    name: str
    origin: dict[str, Any] | None


def find_run(config: dict[str, Any], root: pathlib.Path) -> Run:
    """The run that a configuration names.

    An imported run has the settings that it was measured with. Raises ValueError where they are
    not whole, where the configuration asks for others, and as `config.resolve`.
    """
    name = configuration.run_name(config, root)
    folder = root / "results" / config["device"] / name
    origin = load_origin(str(folder))
    if origin is None:
        settings = configuration.resolve(config, root)
        configuration.check_stored_settings(settings, folder / "settings.json")
        return Run(settings, name, None)
    settings = validate_settings(load_object(str(folder / "settings.json")))
    device = configuration.load_device(root, config["device"])
    for key in ("name", "kind", "family"):
        if settings["device"].get(key) != device[key]:
            raise ValueError(
                f"{folder}/settings.json: device.{key}: expected {device[key]!r} as in "
                f"config/devices/{device['name']}.yaml, got {settings['device'].get(key)!r}; it "
                "is of another device: move that folder away"
            )
    _require_same(config, root, settings, name)
    return Run(settings, name, origin)


def listing(
    folder: pathlib.Path, configured: dict[str, dict[str, dict[str, Any]]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The layers beside the paper's that an imported run has, by table or experiment, as
    `config.resolve_layer_tables` but without what to measure.

    By listed.json, which the workflow puts into a bundle; without it, those configured layers
    that `folder` holds. Raises ValueError for a file of another form.
    """
    path = folder / LISTING
    titles = load_object(str(path)) if path.exists() else measured_titles(configured, folder)
    for table, layers in titles.items():
        whole = isinstance(layers, dict) and all(
            _NAME.fullmatch(name) and isinstance(title, str) for name, title in layers.items()
        )
        if not whole:
            raise ValueError(f"{path}: {table}: expected titles by layer, got {layers!r}")
    return {
        table: {name: {"title": title} for name, title in layers.items()}
        for table, layers in titles.items()
    }


def listing_text(listed: dict[str, dict[str, dict[str, Any]]], folder: pathlib.Path) -> str:
    """The text of listed.json, with what is measured in `folder`."""
    return json.dumps(measured_titles(listed, folder), indent=1) + "\n"


def measured_titles(
    listed: dict[str, dict[str, dict[str, Any]]], folder: pathlib.Path
) -> dict[str, dict[str, str]]:
    """Titles by layer of the tables and experiments whose every layer is measured in `folder`."""
    return {
        table: {name: layer["title"] for name, layer in layers.items()}
        for table, layers in listed.items()
        if layers and all((folder / table / f"{name}.csv").exists() for name in layers)
    }


def _require_same(
    config: dict[str, Any], root: pathlib.Path, settings: dict[str, Any], name: str
) -> None:
    """Raise ValueError where a configuration asks for what an imported run was not."""
    defaults = configuration.load_yaml(root / "config" / "config.yaml")
    for key in _SHARED:
        asked = config[key]
        if asked == defaults[key]:
            continue
        if key == "layers":
            configuration.validate_layers(root, asked, "config")
            asked = [layer._asdict() for layer in configuration.expand_layers(asked)]
        if asked != settings.get(key):
            raise ValueError(
                f"run: {name} was imported, and measured with another {key} than asked for; leave "
                f"{key} out, or name another run, which is measured here"
            )
