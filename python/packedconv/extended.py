"""The experiments beyond the paper, and which layers each of them measures."""

import pathlib
import random
from typing import Any

from packedconv import roofline
from packedconv.config import load_yaml, located, plain_experiments, validate
from packedconv.layer import Layer

# Each has a module of that name in bench/extended, evidence/extended and plots/extended, a part
# of config/extended.yaml, and scripts/figure_<name>.py. What it measures lies in
# results/<device>/<run>/<name>/, one file per layer.
EXPERIMENTS = (
    "baselines",
    "crossover",
    "held_out",
    "gap",
    "masks",
    "formats",
    "schedules",
    "utilisation",
)

# Draws of a layer before it is clear that there is none to draw.
_MOST_DRAWS = 10_000


def resolve_extended(config: dict, root: pathlib.Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What is measured, by experiment and name of the layer: an `experiment` (bench.experiment)
    and the `title` of the part that it is in, as `config.resolve_layer_tables`.

    Raises ValueError for a file that is not there or wrong.
    """
    source = config["extended"]
    found = load_yaml(located(root, source, "extended"))
    validate(found, root / "config" / "schema" / "extended.schema.yaml", source)

    def listed(parts: list[dict]) -> dict[str, dict[str, Any]]:
        return plain_experiments(parts, found, found["protocol"], source)

    experiments = {name: listed(found[name]) for name in EXPERIMENTS if name != "held_out"}
    taken = [Layer(**entry["experiment"]["layer"]) for entry in experiments["crossover"].values()]
    try:
        experiments["held_out"] = listed(draw_parts(found["held_out"], taken))
    except ValueError as error:
        raise ValueError(f"{source}: held_out: {error}") from None
    return {name: experiments[name] for name in EXPERIMENTS}


def draw_parts(spec: dict[str, Any], taken: list[Layer]) -> list[dict[str, Any]]:
    """Parts as config/extended.yaml lists them, of one layer at one sparsity each.

    spec: the part `held_out` of that file. taken: layers whose shapes are not drawn. The same
    for the same seed, on every version of Python. Raises ValueError where none are left to draw.
    """
    draw = random.Random(spec["seed"]).random

    def pick(values: list[int]) -> int:
        return values[int(draw() * len(values))]

    shapes = {_shape(layer) for layer in taken}
    parts: list[dict[str, Any]] = []
    for _ in range(_MOST_DRAWS):
        if len(parts) == spec["count"]:
            return parts
        size, kernel_size = pick(spec["sizes"]), pick(spec["kernel_sizes"])
        layer = Layer(
            f"held_{len(parts):02d}",
            pick(spec["batch"]),
            pick(spec["channels"]),
            pick(spec["channels"]),
            size,
            size,
            kernel_size,
            pick(spec["strides"]),
            kernel_size // 2,
        )
        ends = spec["sparsities"][len(parts) % len(spec["sparsities"])]
        sparsity = round(ends["least"] + (ends["most"] - ends["least"]) * draw(), 2)
        within = spec["flops"]["least"] <= roofline.dense_flops(layer) <= spec["flops"]["most"]
        few = layer.weight_count <= spec["most_weights"]
        if not (within and few) or _shape(layer) in shapes:
            continue
        shapes.add(_shape(layer))
        record = dict(layer._asdict(), batch=[layer.batch], out_channels=[layer.out_channels])
        parts.append({"sparsities": [sparsity], "layers": [record]})
    raise ValueError(
        f"expected {spec['count']} layers within the limits on operations and weights, got "
        f"{len(parts)} in {_MOST_DRAWS} draws; widen the limits or the choices"
    )


def _shape(layer: Layer) -> tuple:
    return tuple(layer)[1:]
