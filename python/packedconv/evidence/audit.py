"""What in the paper does not add up, recomputed from its printed numbers.

Each entry says what is printed, what follows from the paper's own formulas, and what would
reconcile the two. `holds` tells whether the discrepancy stands for the numbers given, so that
a corrected number makes an entry disappear.
"""

import fractions
from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from packedconv.evidence import numerics, tables
from packedconv.evidence.published import Published
from packedconv.evidence.tables import bandwidth_text, flops_text
from packedconv.layer import Layer
from packedconv.roofline import (
    dense_arithmetic_intensity,
    exact,
    exact_device,
    sparse_arithmetic_intensity,
    sparse_bytes,
    sparse_flops,
    winograd_reduction,
    winograd_speedup,
)

CONTRADICTION = "contradiction"
DESCRIPTION = "description"
ERRATUM = "erratum"

# One stack of first-generation HBM: 1024 pins at 1 Gbit/s (JEDEC JESD235), bytes/s.
HBM_STACK_BANDWIDTH = 128e9
# A warp's load is one transaction when its lanes read one aligned line.
WARP = 32
LINE_BYTES = 128
WORD_BYTES = 4
# Quantisation has to exceed the largest printed tick by this factor to be told from it.
CLEARLY = 10

PREAMBLE = (
    'Numbers under "What follows" and "What would reconcile" are computed: from the printed '
    "ones (config/paper.yaml) by the roofline model, or, for rounding errors, on a small layer. "
    "From elsewhere come the A100-40GB's bandwidth "
    f"({bandwidth_text(tables.A100_40GB_BANDWIDTH)}, NVIDIA's data sheet), a stack of "
    f"first-generation HBM ({bandwidth_text(HBM_STACK_BANDWIDTH)}, JEDEC JESD235), the "
    "Jetson Nano's kind of memory (NVIDIA's data sheet), Winograd's transforms (Lavin and Gray "
    "2016) and PyTorch's default for TF32 (its documentation). What is tried as a reconciliation "
    f"(a reduction by {tables.decimals(tables.TRIED_REDUCTION, 1)}, a ridge point of "
    f"{tables.TRIED_RIDGE_POINT}, {float(100 * tables.TRIED_SHARE):g} % of the bandwidth) was "
    "chosen for the cells that it brings out. An entry says that two printed things do not fit "
    "together, not which of them is off; the authors' code was not available."
)


class Finding(NamedTuple):
    """One entry. kind: contradiction, description or erratum; holds: it stands as printed."""

    number: int
    title: str
    printed: str
    follows: str
    reconciled_by: str
    holds: bool
    kind: str


def table2(published: Published) -> Finding:
    """1: Table 2 against section 4.2."""
    device = exact_device(published.device(published.tables["table2"]["device"]))
    slower = bandwidth_text(device.peak_flops / tables.TRIED_RIDGE_POINT)
    faster = flops_text(device.bandwidth * tables.TRIED_RIDGE_POINT)
    return _winograd(
        published,
        1,
        "table2",
        f"only the ratio of the roofs counts: a bandwidth of {slower}, or a peak of {faster}, "
        "gives the same",
    )


def table3(published: Published) -> Finding:
    """2: Table 3 against section 4.2."""
    clashes = conflicts(published, "table3")
    if clashes:
        reason = "; no parameters give " + " or ".join(
            f"both {_cell_name(one)} = {_times(first)} and {_cell_name(other)} = {_times(second)}, "
            f"since the formula depends on IC·OC/(IC+OC) = {float(_combined(one)):g} in both"
            for (one, first), (other, second) in clashes
        )
    else:
        reason = ""
    return _winograd(published, 2, "table3", _missed(published, "table3") + reason)


def throughput_intensity(published: Published) -> Finding:
    """3: arithmetic intensities in the text on Fig. 7."""
    printed, follows, belongs = [], [], []
    holds = False
    for point in published.points("a", 7):
        if "arithmetic_intensity" not in point:
            continue
        layer = published.layer("a100", point["out_channels"])
        value, text = _intensity(layer, point["sparsity"]), point["arithmetic_intensity"]
        printed.append(f"OC {point['out_channels']}, S {point['sparsity']:.2f}: {text}")
        follows.append(f"S {point['sparsity']:.2f}: {tables.decimals(value, 1)}")
        holds |= tables.round_half_up(value, 1) != exact(text)
        belongs.append(
            {
                count
                for count in published.workloads["a100"]["out_channels"]
                if tables.round_half_up(
                    _intensity(published.layer("a100", count), point["sparsity"]), 1
                )
                == exact(text)
            }
        )
    shared = sorted(set.intersection(*belongs)) if belongs else []
    nano = [
        f"S {sparsity:.2f}: "
        + tables.decimals(_intensity(published.layer("tegra-x1", out_channels), sparsity), 1)
        for out_channels, sparsity in _sparse_points(published, "b")
    ]
    return Finding(
        3,
        "Arithmetic intensity in the text on Fig. 7a",
        "; ".join(printed),
        f"Equations 7 and 8 give {', '.join(follows)}. For Fig. 7b: {', '.join(nano)}",
        f"The printed values are those of OC {_listed(shared)}, the layer of Table 1"
        if shared
        else "No plotted OC gives the printed values",
        holds,
        CONTRADICTION,
    )


def memory_bound(published: Published) -> Finding:
    """4: memory-bound at every sparsity, and at or below the ridge point on both devices."""
    said = published.text["memory_bound_at_every_sparsity"]["devices"]
    below = published.text["at_or_below_ridge_point"]["devices"]
    follows, reconciled = [], []
    holds = False
    for name in said:
        workload, ridge = (
            published.workloads[name],
            exact_device(published.device(name)).ridge_point,
        )
        lowest = min(published.sparsities(name, figures=[7]))
        channels = [*workload["out_channels"], *workload["out_channels_text"]]
        values = {oc: _intensity(published.layer(name, oc), lowest) for oc in channels}
        above = {oc: value for oc, value in values.items() if value >= ridge}
        holds |= bool(above)
        if above:
            follows.append(
                f"{_title(published, name)}, S {lowest:.2f}: "
                + ", ".join(f"OC {oc} {tables.decimals(above[oc], 1)}" for oc in above)
                + f" lie above the ridge point {tables.decimals(ridge, 2)}"
            )
        rest = [oc for oc in channels if oc not in above]
        reconciled.append(
            f"true at every S for OC {_listed(rest)} on the {_title(published, name)}"
        )
    layer = published.table1_layer()
    lowest = min(published.tables["table1"]["sparsities"])
    value = _intensity(layer, lowest)
    for name in below:
        ridge = exact_device(published.device(name)).ridge_point
        if value <= ridge:
            continue
        holds = True
        follows.append(
            f"{tables.decimals(value, 1)} (Table 1, S {lowest:.2f}) lies above the ridge point "
            f"{tables.decimals(ridge, 2)} of the {_title(published, name)}"
        )
        own = published.layer(name, max(published.workloads[name]["out_channels"]))
        reached = tables.decimals(_intensity(own, lowest), 1)
        reconciled.append(
            f"the {_title(published, name)}'s own layers reach {reached} at S {lowest:.2f} "
            f"(OC {own.out_channels})"
        )
    return Finding(
        4,
        "Memory-bound at every sparsity",
        "The artifact description: sparse convolution is bound by memory bandwidth (on the "
        f"{_titles(published, said)}). Section 5: it lies at or below the ridge point of the "
        f"{_titles(published, below)}. Neither names a layer; section 4.1 says it of OC "
        f'{layer.out_channels} (Table 1), section 1 has "at or near"',
        "; ".join(follows) or "Every layer lies at or below the ridge point",
        "; ".join(reconciled),
        holds,
        CONTRADICTION,
    )


def dense_baseline(published: Published) -> Finding:
    """5: dense work per second against the FP32 peak."""
    printed, follows = [], []
    holds = False
    for panel in ("a", "b"):
        peak = published.device(published.device_of_panel(panel)).peak_flops
        for point in published.points(panel, 7):
            if point.get("implementation") != "dense":
                continue
            work = exact(point["value"]) / (1 - exact(point["sparsity"]))
            if work <= exact(peak):
                continue
            holds = True
            printed.append(
                f"Fig. 7{panel}: dense at {flops_text(point['value'])} on the nonzeros, "
                f"S {point['sparsity']:.2f}"
            )
            follows.append(
                f"{flops_text(work)} of dense work at S {point['sparsity']:.2f} "
                f"against an FP32 peak of {flops_text(peak)}"
            )
    found = numerics.errors(0.90)
    tick = max(published.ticks("a", 8))
    entry = published.model["winograd_multiplications"]
    reduction = winograd_reduction(entry["output_tile"], entry["kernel_size"])
    excluded = found.tf32 > CLEARLY * tick
    return Finding(
        5,
        "The dense baseline is not specified",
        "; ".join(printed) or "Dense throughputs below the FP32 peak",
        "; ".join(follows) or "The printed throughputs fit into the FP32 peak",
        f"Winograd (F(2×2, 3×3) saves {float(reduction):g}× the multiplications) or TF32, which "
        "PyTorch lets cuDNN convolutions use by default. A small layer with each emulated has "
        f"maximum errors of {found.tf32:.0e} (TF32), {found.winograd4:.0e} (F(4×4)) and "
        f"{found.winograd2:.0e} (F(2×2)); the largest tick of Fig. 8a is {tick:.0e}"
        + ("; if figures 5 and 8 share their baseline, it was not TF32" if excluded else ""),
        holds,
        CONTRADICTION,
    )


def error_sources(published: Published) -> Finding:
    """6: maximum absolute errors, quantisation and order of summation apart."""
    ticks = published.ticks("a", 8)
    low, high = numerics.errors(0.90), numerics.errors(0.98)
    size = numerics.SMALL_LAYER
    return Finding(
        6,
        "Size of the maximum absolute errors",
        f"Ticks of Fig. 8a: {ticks[0]:.0e} to {ticks[-1]:.0e}; the appendix names fewer terms and "
        "the FP16 quantisation of the weights as causes",
        f"IC {size.in_channels}, OC {size.out_channels}, {size.height}×{size.width}, weights "
        "uniform on ± sqrt(6/(K²·IC)), inputs uniform on [0, 1), S 0.90 and 0.98: against the "
        f"original weights {low.quantised:.1e} and {high.quantised:.1e}; against the same FP16 "
        f"weights, other order of summation, {low.summation:.1e} and {high.summation:.1e}",
        "A dense side with the weights as packed (order of summation alone), weights that FP16 "
        f"represents, or values about {low.quantised / ticks[-1]:.0f} times smaller; the "
        "distributions of weights and inputs are not stated",
        low.quantised > CLEARLY * ticks[-1],
        CONTRADICTION,
    )


def consistent_speedups(published: Published) -> Finding:
    """7: consistent speedups against configurations below 1."""
    said = published.text["consistent_speedups"]["panels"]
    slower = []
    for panel in said:
        at = {}
        for entry in published.text["below_one"]:
            if entry["panel"] == panel:
                for oc in entry["out_channels"]:
                    at.setdefault(oc, set()).update(entry["sparsities"])
        for point in published.points(panel, 5):
            if point["value"] < 1:
                at.setdefault(point["out_channels"], set()).add(point["sparsity"])
        title = _title(published, published.device_of_panel(panel))
        slower += [f"{title}, OC {oc} at S {_span(values)}" for oc, values in sorted(at.items())]
    return Finding(
        7,
        "Consistent speedups on both devices",
        "The introduction: consistent speedups over dense PyTorch on "
        + " and ".join(_title(published, published.device_of_panel(panel)) for panel in said),
        "Below 1× in section 6: " + "; ".join(slower) if slower else "No configuration below 1×",
        "Consistent growth with sparsity, which section 6 does describe, instead of speedup"
        if slower
        else "",
        bool(slower),
        CONTRADICTION,
    )


def more_out_channels(published: Published) -> Finding:
    """8: what more output channels do to the speedup."""
    said = published.text["more_out_channels"]
    follows = []
    for entry in said:
        if entry["of"] != "speedup":
            continue
        panel, larger = entry["panel"], entry["gain"] == "larger"
        follows += [
            _compare_points(one, other, panel)
            for one, other in _neighbours(published, panel)
            if (other["value"] > one["value"]) != larger
        ]
        if not larger:
            follows += _above_crossover(published, panel)
    # A time saved may grow with OC while the ratio falls, and Fig. 6 has no printed times.
    times = [entry for entry in said if entry["of"] == "time"]
    return Finding(
        8,
        "More output channels, more or less speedup",
        "; ".join(
            f"{entry['where']} (Fig. {entry['figure']}{entry['panel']}): more output channels, "
            + (
                f"{entry['gain']} speedup"
                if entry["of"] == "speedup"
                else f"{entry['gain']} improvement of the execution time"
            )
            for entry in said
        ),
        "; ".join(follows) or "The printed speedups are ordered as the text says",
        "An effect of how the channels divide among lanes and blocks, which need not be monotone"
        + "".join(
            f". The sentence on Fig. {entry['figure']}{entry['panel']} contradicts neither: the "
            "time saved may grow with OC while the speedup falls; its times are not printed"
            for entry in times
        )
        if follows
        else "",
        bool(follows),
        CONTRADICTION,
    )


def gap_to_the_roof(published: Published) -> Finding:
    """9: how much of the sparse time does not depend on the nonzeros."""
    printed, follows = [], []
    above = False
    for panel in ("a", "b"):
        name = published.device_of_panel(panel)
        split = fixed_time(published, panel)
        above |= split.fixed > split.floor
        printed.append(
            f"{_title(published, name)}, OC {split.out_channels}: "
            f"{flops_text(split.throughputs[0])} to {flops_text(split.throughputs[1])}"
        )
        follows.append(
            f"{_title(published, name)}: {_ms(split.times[0])} at S {split.sparsities[0]:.2f} and "
            f"{_ms(split.times[1])} at {split.sparsities[1]:.2f}, so that {_ms(split.fixed)} of "
            f"{_ms(split.times[0])} do not depend on the nonzeros, where moving input and output "
            f"takes {_ms(split.floor)}"
        )
    claimed = published.text["gap_inherent"]["claimed"]
    return Finding(
        9,
        "The gap to the roof is inherent to sparse computation",
        "Section 7 calls the gap inherent; throughputs on the nonzeros: " + "; ".join(printed),
        "On a line through the two points: " + "; ".join(follows),
        "A part that is the same at every S is overhead of the implementation as much as of "
        "sparsity; a kernel without it would tell"
        if claimed and above
        else "",
        claimed and above,
        CONTRADICTION,
    )


def grid_axes(published: Published) -> Finding:
    """10: grid axes of Algorithm 1 against the split of the output channels."""
    indices = published.text["algorithm_block_indices"]["indices"]
    axis = published.text["out_channels_split"]["axis"]
    batch = published.workloads["a100"]["layer"]["batch"]
    slices = 2
    covered = {divmod(z, slices) for z in range(batch * slices)}
    once = covered == {(image, part) for image in range(batch) for part in range(slices)}
    holds = axis != "none" and len(indices) == 3
    return Finding(
        10,
        "Blocks of Algorithm 1 and the split of the output channels",
        f"Algorithm 1 has blocks ({', '.join(indices)}) and loops over all OC; the text splits OC "
        f"along grid {axis}",
        f"A grid has 3 axes and Algorithm 1 uses {len(indices)}: no axis is left for the split"
        if holds
        else "Algorithm 1 and the text agree",
        "z = n · slices + slice with the number of slices a parameter"
        + (
            f"; checked for N = {batch} and {slices} slices: every pair (n, slice) occurs once"
            if once
            else ""
        ),
        holds,
        DESCRIPTION,
    )


def warp_mapping(published: Published) -> Finding:
    """11: rows per warp, and transactions of a warp's weight load."""
    rows = published.text["rows_per_warp"]
    lanes = WARP // published.text["columns_per_warp"]["value"]
    claimed = published.text["single_transaction_loads"]["claimed"]
    workload = published.workloads["a100"]
    layer = published.layer("a100", workload["out_channels"][0])
    lines = {}
    for sparsity in (min(workload["sparsities"]), max(workload["sparsities"])):
        lines[sparsity] = weight_lines(layer, sparsity, lanes)
    scattered = claimed and max(lines.values()) > 1
    differ = rows["text"] != rows["figure"]
    listed = ", ".join(f"{count} at S {sparsity:.2f}" for sparsity, count in lines.items())
    return Finding(
        11,
        "Rows per warp and single-transaction weight loads",
        f"Section 5.2: {rows['text']} rows per warp; Fig. 3: {rows['figure']}"
        + ("; packed weights are loaded in single, coalesced transactions" if claimed else ""),
        (f"{rows['text']} and {rows['figure']} differ; " if differ else "")
        + f"the {lanes} channel lanes of a warp read {lanes} lists: {listed} aligned lines of "
        f"{LINE_BYTES} bytes per load (IC {layer.in_channels}, equal lists)",
        "Rows per thread as a parameter; read per thread, one 32-bit load for each nonzero, the "
        "sentence holds",
        differ or scattered,
        DESCRIPTION,
    )


def table1(published: Published) -> Finding:
    """12: cells of Table 1."""
    frame = tables.table1(published)
    wrong = frame[~frame["agrees"]]
    return Finding(
        12,
        "Table 1",
        "; ".join(f"S {row.sparsity}: {row.printed}" for row in wrong.itertuples())
        or "All cells as computed",
        "; ".join(
            f"S {row.sparsity}: {float(row.computed):.2f}, which rounds to {row.rounded}"
            for row in wrong.itertuples()
        )
        or f"{len(frame)} of {len(frame)} cells agree",
        f"{len(frame) - len(wrong)} of {len(frame)} cells agree by rounding; cutting off instead "
        f"brings out {_cut_off(published)}"
        if len(wrong)
        else "",
        bool(len(wrong)),
        ERRATUM,
    )


def table5(published: Published) -> Finding:
    """13: sum of the steps of Table 5."""
    entry = published.times_table
    low, high = (sum(step["minutes"][end] for step in entry["steps"]) for end in (0, 1))
    holds = [low, high] != entry["total"]
    return Finding(
        13,
        "Total of Table 5",
        f"Total {entry['total'][0]:g} to {entry['total'][1]:g} minutes",
        f"The steps add up to {low:g} to {high:g} minutes",
        "Steps that the table does not list" if holds else "",
        holds,
        ERRATUM,
    )


def table4(published: Published) -> Finding:
    """14: measured figures filed under the roofline scripts."""
    measured = {figure["figure"]: figure for figure in published.figures if figure["measured"]}
    filed = [
        (row["artifact"], number)
        for row in published.tables["table4"]["rows"]
        for number in row["figures"]
        if "roofline" in row["artifact"].lower() and number in measured
    ]
    return Finding(
        14,
        "Table 4 and the figures",
        "; ".join(f"{artifact}: Figure {number}" for artifact, number in filed)
        or "No measured figure under the roofline scripts",
        "; ".join(
            f"Figure {number} shows {measured[number]['title'].lower()}, which are measured"
            for _, number in filed
        )
        or "Measured figures are filed under the benchmark scripts",
        "Figure 7, the measured roofline, may have been meant" if filed else "",
        bool(filed),
        ERRATUM,
    )


def unplotted_channels(published: Published) -> Finding:
    """15: channel counts that are discussed and not plotted."""
    missing = {
        name: sorted(set(workload["out_channels_text"]) - set(workload["out_channels"]))
        for name, workload in published.workloads.items()
    }
    named = [f"OC {_listed(v)} on the {_title(published, k)}" for k, v in missing.items() if v]
    plotted = _listed(published.workloads["a100"]["out_channels"])
    return Finding(
        15,
        "Channel counts discussed and plotted",
        f"Discussed: {'; '.join(named)}" if named else "All discussed channel counts are plotted",
        f"The legends of figures 5, 6 and 8 (A100) have OC {plotted}",
        "A curve that was left out of the plots" if named else "",
        bool(named),
        ERRATUM,
    )


def value_sizes(published: Published) -> Finding:
    """16: P in equations 5 and 7."""
    model = published.model
    activation, weight, index = (
        model[key]["value"] for key in ("activation_bytes", "weight_bytes", "index_bytes")
    )
    cells = len(published.tables["table1"]["cells"])
    counts = {
        sizes: _table1_agreeing(published, *sizes, index)
        for sizes in ((activation, weight), (weight, weight), (activation, activation))
    }
    holds = activation != weight
    return Finding(
        16,
        "P means two sizes in equation 7",
        f"P for an activation (FP32, {activation:g} bytes) and for a packed value; "
        f"P = {weight:g} bytes is given",
        f"Table 1 comes out in {counts[weight, weight]} of {cells} cells with P = {weight:g} for "
        f"both, in {counts[activation, weight]} with {activation:g} and {weight:g}"
        + (
            f", in {counts[activation, activation]} with {activation:g} for both, since the "
            "weights are a small part of the bytes"
            if holds
            else ""
        ),
        "A symbol of its own for the packed value" if holds else "",
        holds,
        ERRATUM,
    )


def roof_names(published: Published) -> Finding:
    """17: what the bandwidth roof is called."""
    named = {
        name: entry
        for name, entry in published.devices.items()
        if entry.get("roof_name", {}).get("name") == "HBM"
    }
    slow = {name: e for name, e in named.items() if e["bandwidth"] < HBM_STACK_BANDWIDTH}
    return Finding(
        17,
        "HBM roof",
        "; ".join(
            f"{entry['roof_name']['where']}: the {entry['title']} has an HBM roof"
            for entry in (slow or named).values()
        ),
        "; ".join(
            f"{entry['bandwidth'] / 1e9:g} GB/s, where one stack of the first HBM generation has "
            f"{HBM_STACK_BANDWIDTH / 1e9:g}"
            for entry in slow.values()
        )
        or "The bandwidths are those of HBM",
        "The Jetson Nano has LPDDR4: DRAM roof" if slow else "",
        bool(slow),
        ERRATUM,
    )


ENTRIES: tuple[Callable[[Published], Finding], ...] = (
    table2,
    table3,
    throughput_intensity,
    memory_bound,
    dense_baseline,
    error_sources,
    consistent_speedups,
    more_out_channels,
    gap_to_the_roof,
    grid_axes,
    warp_mapping,
    table1,
    table5,
    table4,
    unplotted_channels,
    value_sizes,
    roof_names,
)


def audit(published: Published) -> list[Finding]:
    """All entries in their order."""
    return [entry(published) for entry in ENTRIES]


def audit_table(findings: list[Finding]) -> pd.DataFrame:
    """One row per finding."""
    return pd.DataFrame(findings, columns=Finding._fields)


def shown_audit(findings: list[Finding]) -> pd.DataFrame:
    """The findings as a reader sees them."""
    return pd.DataFrame(
        {
            "No.": [finding.number for finding in findings],
            "Entry": [f"{finding.title} ({finding.kind})" for finding in findings],
            "Printed": [finding.printed for finding in findings],
            "What follows": [finding.follows for finding in findings],
            "What would reconcile": [finding.reconciled_by for finding in findings],
            "Stands": [finding.holds for finding in findings],
        }
    )


class FixedTime(NamedTuple):
    """Sparse time of a panel of Fig. 7 split by a line in the number of nonzeros; seconds."""

    out_channels: int
    sparsities: tuple[float, float]
    throughputs: tuple[float, float]
    times: tuple[float, float]
    fixed: float
    floor: float


def fixed_time(published: Published, panel: str) -> FixedTime:
    """The part of the sparse time that a line through the two printed throughputs of Fig. 7
    puts at zero nonzeros, and the time that input and output take at the stated bandwidth."""
    name = published.device_of_panel(panel)
    points = sorted(
        (p for p in published.points(panel, 7) if p.get("implementation") == "sparse"),
        key=lambda p: p["sparsity"],
    )
    first, last = points[0], points[-1]
    layer = published.layer(name, first["out_channels"])
    shares = [1 - exact(p["sparsity"]) for p in (first, last)]
    times = [sparse_flops(layer, exact(p["sparsity"])) / exact(p["value"]) for p in (first, last)]
    slope = (times[0] - times[1]) / (shares[0] - shares[1])
    floor = sparse_bytes(layer, 1) / exact(published.device(name).bandwidth)
    return FixedTime(
        first["out_channels"],
        (first["sparsity"], last["sparsity"]),
        (first["value"], last["value"]),
        (float(times[0]), float(times[1])),
        float(times[1] - slope * shares[1]),
        float(floor),
    )


def conflicts(published: Published, table: str) -> list:
    """Pairs of cells (layer, printed) of Table 2 or 3 that the model makes equal and the paper
    prints apart: the model depends on IC·OC/(IC+OC) alone (stride 1, same padding)."""
    cells = list(tables.winograd_cells(published, table))
    return [
        (one, other)
        for index, one in enumerate(cells)
        for other in cells[index + 1 :]
        if _combined(one[0]) == _combined(other[0]) and one[1] != other[1]
    ]


def weight_lines(layer: Layer, sparsity: float, lanes: int) -> int:
    """Aligned lines of memory that one load of a warp touches when lane i reads the first
    packed word of output channel i and every channel has equally many nonzeros."""
    nonzeros = (1 - exact(sparsity)) * layer.in_channels * layer.kernel_size**2
    return len({int(lane * nonzeros) * WORD_BYTES // LINE_BYTES for lane in range(lanes)})


def _winograd(published: Published, number: int, table: str, remark: str) -> Finding:
    entry = published.tables[table]
    device = published.device(entry["device"])
    stated = tables.agreement(published, table)
    frame = tables.winograd_table(published, table)
    frame = frame[(frame["assumption"] == tables.AS_STATED) & ~frame["agrees"]]
    holds = stated.agreeing < stated.cells
    follows = f"{stated.agreeing} of {stated.cells} cells come out"
    if holds:
        off = (frame["computed"].astype(float) - frame["printed"].astype(float)).abs()
        worst = frame.loc[off.idxmax()]
        follows += (
            f"; the farthest, IC {worst['in_channels']}, OC {worst['out_channels']}, is "
            f"{float(worst['computed']):.2f} where {worst['printed']} is printed"
        )
        if _both_compute_bound(published, table):
            limit = 1 / exact(entry["reduction"]) / (1 - exact(entry["sparsity"]))
            highest = max(max(row) for row in entry["cells"])
            follows += (
                f"; where both sides are compute-bound it is {tables.decimals(limit, 2)}, "
                f"and the highest cell is {highest:.1f}"
            )
    return Finding(
        number,
        f"{entry['where']} and section 4.2",
        f"{stated.cells} speedups, with operations reduced by {entry['reduction']:g}× and roofs of "
        f"{flops_text(device.peak_flops)} and {bandwidth_text(device.bandwidth)} (ridge point "
        f"{device.ridge_point:.2f})",
        follows,
        f"{stated.note}; {remark}" if holds else "",
        holds,
        CONTRADICTION,
    )


def _both_compute_bound(published: Published, table: str) -> bool:
    entry = published.tables[table]
    ridge = exact_device(published.device(entry["device"])).ridge_point
    reduction = exact(entry["reduction"])
    return any(
        dense_arithmetic_intensity(layer) / reduction >= ridge
        and _intensity(layer, entry["sparsity"]) >= ridge
        for layer, _ in tables.winograd_cells(published, table)
    )


def _missed(published: Published, table: str) -> str:
    """Cells that no assumption brings out, with what the closest one gives."""
    entry = published.tables[table]
    best = max(
        tables.assumptions(published, table)[1:],
        key=lambda a: tables.agreement(published, table, a.name).agreeing,
    )
    missed = []
    for layer, printed in tables.winograd_cells(published, table):
        value = winograd_speedup(layer, exact(entry["sparsity"]), best.device, best.reduction)
        if tables.round_half_up(value, entry["digits"]) != exact(printed):
            missed.append(
                f"{_cell_name(layer)} comes out {tables.decimals(value, 2)} for {_times(printed)}"
            )
    return ", ".join(missed) if missed else "none is left"


def _table1_agreeing(published: Published, activation: int, weight: int, index: int) -> int:
    entry, layer = published.tables["table1"], published.table1_layer()
    return sum(
        tables.round_half_up(
            sparse_arithmetic_intensity(layer, exact(sparsity), activation, weight, index),
            entry["digits"],
        )
        == exact(printed)
        for sparsity, printed in zip(entry["sparsities"], entry["cells"], strict=True)
    )


def _cut_off(published: Published) -> str:
    entry, layer = published.tables["table1"], published.table1_layer()
    scale = 10 ** entry["digits"]
    agreeing = sum(
        fractions.Fraction(_intensity(layer, sparsity) * scale // 1, scale) == exact(printed)
        for sparsity, printed in zip(entry["sparsities"], entry["cells"], strict=True)
    )
    return str(agreeing)


def _sparse_points(published: Published, panel: str) -> list[tuple[int, float]]:
    return [
        (point["out_channels"], point["sparsity"])
        for point in published.points(panel, 7)
        if point.get("implementation") == "sparse"
    ]


def _neighbours(published: Published, panel: str) -> list:
    """Pairs of printed speedups at one sparsity, next to one another in output channels."""
    points = sorted(published.points(panel, 5), key=lambda p: (p["sparsity"], p["out_channels"]))
    return [
        (one, other)
        for one, other in zip(points, points[1:], strict=False)
        if one["sparsity"] == other["sparsity"]
    ]


def _above_crossover(published: Published, panel: str) -> list[str]:
    """Printed speedups above those of fewer channels that cross 1 at a higher sparsity."""
    return [
        f"Fig. 5{panel}, S {point['sparsity']:.2f}: OC {point['out_channels']} has "
        f"{point['value']:g}× where OC {oc} is below 1× (it crosses 1 near "
        f"{entry['sparsity']:.2f})"
        for entry in published.text["crossover"]
        if entry["panel"] == panel
        for oc in entry["out_channels"]
        for point in published.points(panel, 5)
        if point["value"] > 1
        and point["out_channels"] > oc
        and point["sparsity"] < entry["sparsity"]
    ]


def _compare_points(one: dict, other: dict, panel: str) -> str:
    relation = "above" if other["value"] > one["value"] else "below"
    return (
        f"Fig. 5{panel}, S {one['sparsity']:.2f}: OC {other['out_channels']} ({other['value']:g}×) "
        f"lies {relation} OC {one['out_channels']} ({one['value']:g}×)"
    )


def _intensity(layer: Layer, sparsity: float) -> fractions.Fraction:
    return sparse_arithmetic_intensity(layer, exact(sparsity))


def _combined(layer: Layer) -> fractions.Fraction:
    ic, oc = layer.in_channels, layer.out_channels
    return fractions.Fraction(ic * oc, ic + oc)


def _cell_name(layer: Layer) -> str:
    return f"(IC {layer.in_channels}, OC {layer.out_channels})"


def _title(published: Published, name: str) -> str:
    return published.devices[name]["title"].replace("NVIDIA ", "")


def _titles(published: Published, names: list[str]) -> str:
    return " and the ".join(_title(published, name) for name in names)


def _listed(values: list) -> str:
    return ", ".join(str(value) for value in values)


def _span(values: set) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"


def _times(value: float) -> str:
    return f"{value:.1f}"
