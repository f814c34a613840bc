"""What a comparison says in words, for figures and the table."""

from packedconv.evidence.compare.ratios import Comparison, Overall
from packedconv.evidence.compare.side import HARDWARE, Side, differing
from packedconv.evidence.samples import listed, shapes
from packedconv.evidence.statistics import CONFIDENCE
from packedconv.layer import Layer

SUBJECTS = {
    "speedup": "speedup over PyTorch",
    "sparse": "sparse convolution",
    "dense": "dense convolution",
}


def answer(quantity: str, overall: Overall) -> str:
    """Whether the sides differ on the whole, by the interval of the mean over points."""
    value = f"{ratio_text(overall.ratio)} times [{interval_text(overall.low, overall.high)}]"
    subject = SUBJECTS[quantity]
    if overall.low <= 1 <= overall.high:
        return f"no overall difference in the {subject}: {value}"
    ahead = "larger" if quantity == "speedup" else "faster"
    side = "right" if overall.ratio > 1 else "left"
    if side == "left":
        ends = interval_text(1 / overall.high, 1 / overall.low)
        value = f"{ratio_text(1 / overall.ratio)} times [{ends}]"
    return f"{subject} {ahead} on the {side}: {value}"


def counts(overall: Overall) -> str:
    """How many points differ, and how far the ratios reach."""
    points = f"{overall.points} point{'s' * (overall.points != 1)}"
    reach = f"{points} in both, {ratio_text(overall.smallest)} to {ratio_text(overall.largest)}"
    differing_points = overall.above + overall.below
    if not differing_points:
        return f"{reach}; none differs"
    if not overall.above or not overall.below:
        ahead = "above" if overall.above else "below"
        return f"{reach}; {differing_points} differ, all {ahead} 1"
    return f"{reach}; {differing_points} differ: {overall.above} above 1, {overall.below} below"


def ratio_text(value: float) -> str:
    """A ratio with about three digits: `0.97`, `13.1`, `240`."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def interval_text(low: float, high: float) -> str:
    return f"{ratio_text(low)}, {ratio_text(high)}"


def warnings(comparison: Comparison) -> list[str]:
    """Sentences on what keeps the sides from being compared like for like; a calm one where
    nothing does."""
    left, right = comparison.left, comparison.right
    return [
        *_only(comparison),
        *_batches(comparison),
        *(
            f"{name.capitalize()}, {side.name}: {sentence}"
            for name, side in (("left", left), ("right", right))
            for sentence in side.disturbances
        ),
        _differences(left, right),
        *(
            f"{side.name} was brought here; where it was measured, its run is {side.measured_as}."
            for side in (left, right)
            if side.name.partition(".")[2] != side.measured_as
        ),
    ]


def chance(comparison: Comparison, points: int) -> str:
    """What an interval covers, and how many miss 1 without cause."""
    spreads = [f"{100 * spread:g} %" for spread in comparison.between_runs]
    both = spreads[0] if spreads[0] == spreads[1] else f"{spreads[0]} | {spreads[1]}"
    runs = (
        f"; thin: and that all times of a layer differ from run to run by {both} (standard "
        "deviation)"
        if any(comparison.between_runs)
        else ""
    )
    return (
        f"Ratios of medians over rounds. Bars: {100 * CONFIDENCE:g} % intervals; thick: rounds "
        f"resampled{runs}. Filled: the interval leaves out 1, which of {points} about "
        f"{max(1, round((1 - CONFIDENCE) * points))} would by chance. Band and dashed line: "
        "geometric mean over all points in both, and its interval."
    )


def nothing_in_both(comparison: Comparison) -> str:
    """Why there is no ratio, for the middle of empty axes."""
    why = (
        "no layer has the same shape on both sides"
        if not comparison.pairs
        else "no sparsity was measured on both sides"
    )
    return f"no ratio: {why}"


def _only(comparison: Comparison) -> list[str]:
    sentences = []
    for name, side, layers, sparsities in (
        ("left", comparison.left, comparison.only_left, comparison.sparsities_left),
        ("right", comparison.right, comparison.only_right, comparison.sparsities_right),
    ):
        found = []
        if layers:
            channels = listed(layer.out_channels for layer in layers)
            found.append(f"OC {channels} ({shapes(list(layers))})")
        if sparsities:
            found.append(f"S {listed(f'{value:.2f}' for value in sparsities)}")
        if found:
            sentences.append(
                f"Only in {name}, {side.name}, so without a ratio: {'; '.join(found)}."
            )
    return sentences


def _batches(comparison: Comparison) -> list[str]:
    batches: dict[tuple[int, int], list[Layer]] = {}
    for pair in comparison.pairs:
        if pair.left.batch != pair.right.batch:
            batches.setdefault((pair.left.batch, pair.right.batch), []).append(pair.left)
    return [
        f"The batch differs, N = {left} | {right} (OC "
        f"{listed(layer.out_channels for layer in layers)}): times are compared per image."
        for (left, right), layers in batches.items()
    ]


def _differences(left: Side, right: Side) -> str:
    found = differing(left, right)
    texts = [f"{name} {ours} | {theirs}" for name, (ours, theirs) in found.items()]
    if not texts:
        return "Of the conditions that both recorded, nothing differs."
    if HARDWARE in found and left.results.device == right.results.device:
        texts[0] = f"another machine under the same device name: {texts[0]}"
    return f"Differs (left | right): {'; '.join(texts)}."
