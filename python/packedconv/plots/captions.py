"""The small lines under a figure: what was measured, and how."""

from packedconv.evidence.samples import (
    Results,
    clock_notes,
    dense_layouts,
    distribution,
    listed,
    shapes,
)
from packedconv.plots.source import Source, device_title
from packedconv.plots.style import PRINTED


def measurement(results: Results, timed: bool = True) -> str:
    """Device, threads of a CPU, layers and distributions; of times, protocol, dense layouts and
    what the two sides are on a GPU too."""
    samples, protocol = results.samples, results.settings["protocol"]
    on_gpu = results.settings["device"].get("kind") == "cuda"
    threads = sorted(samples["threads"].unique())
    used = "" if on_gpu else f", {listed(threads)} thread{'s' if threads != [1] else ''}"
    parts = [
        f"{device_title(results)} (device {results.device}, run {results.run}){used}",
        shapes(list(results.layers.values())),
        f"Weights {distribution(results.settings.get('weights', {}))}, "
        f"inputs {distribution(results.settings.get('inputs', {}))}",
    ]
    if timed:
        rounds = f"{protocol['rounds']} rounds of {protocol['executions']} executions"
        parts.insert(2, ", ".join(filter(None, [rounds, results.execution()])))
        parts.append(f"Dense layout: {dense_layouts(samples)}")
        if on_gpu:
            parts.append(
                "Sparse: the paper's kernel in its best mapping at each sparsity; dense: PyTorch's "
                "default, which allows TF32"
            )
            parts += [note.rstrip(".") for note in clock_notes(results.facts)]
    return ". ".join(parts) + "."


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


def caption(source: Source, timed: bool = True) -> list[str]:
    """All lines under a figure of measurements, with error bars where they are `timed`."""
    lines = [measurement(results, timed) for results in source.results]
    if timed and source.results:
        lines.append(
            "Error bars: standard error of the mean over rounds; "
            "none shows where it is smaller than the marker."
        )
    if not source.results:
        layer = source.published.layer(source.family, out_channels=1)
        lines.append(f"Layers of the paper: {shapes([layer])}.")
    return lines + printed(source)
