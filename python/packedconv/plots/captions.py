"""The small lines under a figure: what was measured, and how."""

import pandas as pd

from packedconv.evidence.samples import Results
from packedconv.layer import Layer
from packedconv.plots.source import Source, device_title
from packedconv.plots.style import PRINTED


def measurement(results: Results) -> str:
    """Device, threads, layers, protocol, distributions and dense layouts of a measurement."""
    samples, protocol = results.samples, results.settings["protocol"]
    threads = sorted(samples["threads"].unique())
    return (
        f"{device_title(results)} (device {results.device}, run {results.run}), "
        f"{_list(threads)} thread{'s' if threads != [1] else ''}. "
        f"{shapes(list(results.layers.values()))}. "
        f"{protocol['rounds']} rounds of {protocol['executions']} executions. "
        f"Weights {distribution(results.settings.get('weights', {}))}, "
        f"inputs {distribution(results.settings.get('inputs', {}))}. "
        f"Dense layout: {dense_layouts(samples)}."
    )


def dense_layouts(samples: pd.DataFrame) -> str:
    """The layouts of the dense side, with their numbers of output channels where they differ."""
    dense = samples[samples["implementation"] == "dense"]
    channels = dense.groupby("layout")["out_channels"].unique()
    if len(channels) == 1:
        return str(channels.index[0])
    return ", ".join(
        f"{layout} (OC {_list(sorted(values))})" for layout, values in channels.items()
    )


def shapes(layers: list[Layer]) -> str:
    """N, IC and H × W of layers that differ in OC: `N = 1, IC = 32, 256×256, K = 3`."""
    texts = []
    for layer in layers:
        text = f"N = {layer.batch}, IC = {layer.in_channels}, {layer.height}×{layer.width}"
        text += f", K = {layer.kernel_size}"
        if layer.stride != 1:
            text += f", stride {layer.stride}"
        if text not in texts:
            texts.append(text)
    return "; ".join(texts)


def distribution(spec: dict) -> str:
    """A distribution of settings.json in words: `uniform on [0, 1)`."""
    name = spec.get("distribution", "not stated")
    if "low" in spec:
        return f"{name} on [{spec['low']:g}, {spec['high']:g})"
    if "bound" in spec:
        bound = str(spec["bound"]).replace("^2", "²").replace("*", "·")
        return f"{name} on ±{bound}"
    return name


def printed(source: Source) -> list[str]:
    """Where the printed values of a panel stand in the paper; nothing without any."""
    places = []
    for point in source.printed():
        for place in str(point["where"]).split(", "):
            if place not in places:
                places.append(place)
    if not places:
        return []
    where = ", ".join(place if place[:1].isalpha() else f"section {place}" for place in places)
    return [f"Hollow: {PRINTED} ({where})."]


def caption(source: Source, error_bars: bool = True) -> list[str]:
    """All lines under a figure of measurements."""
    lines = [measurement(results) for results in source.results]
    if error_bars and source.results:
        lines.append("Error bars: standard error of the mean over rounds.")
    if not source.results:
        layer = source.published.layer(source.family, out_channels=1)
        lines.append(f"Layers of the paper: {shapes([layer])}.")
    return lines + printed(source)


def _list(values: list) -> str:
    return ", ".join(str(value) for value in values)
