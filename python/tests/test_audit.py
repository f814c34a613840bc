import pathlib

import numpy as np
import pytest

from packedconv.evidence import audit, numerics, published, tables
from packedconv.layer import Layer
from packedconv.roofline import exact

PAPER = str(pathlib.Path(__file__).resolve().parents[2] / "config" / "paper.yaml")


@pytest.fixture(scope="module")
def paper():
    return published.load(PAPER)


@pytest.fixture(scope="module")
def findings(paper):
    return {finding.number: finding for finding in audit.audit(paper)}


def test_seventeen_entries_all_stand(findings):
    assert list(findings) == list(range(1, 18))
    assert all(finding.holds for finding in findings.values())
    kinds = [finding.kind for finding in findings.values()]
    assert kinds == ["contradiction"] * 9 + ["description"] * 2 + ["erratum"] * 6
    for finding in findings.values():
        assert finding.title
        assert finding.printed
        assert finding.follows
        assert finding.reconciled_by


@pytest.mark.parametrize(
    ("number", "follows", "reconciled_by"),
    [
        (1, ["5 of 25", "6.67", "5.0"], ["25 of 25", "13", "14 of 25", "1.555", "26 TFLOP/s"]),
        (2, ["5 of 25"], ["22 of 25", "19.2 GB/s", "2.93", "3.90", "= 12 in both"]),
        (3, ["S 0.90: 11.5", "S 0.98: 2.3", "S 0.90: 5.4", "S 0.98: 1.1"], ["OC 64"]),
        (
            4,
            ["OC 80 10.3", "OC 256 12.8", "9.75", "9.6 (Table 1", "9.22"],
            ["OC 48, 64 on the A100", "every S for OC 32, 40, 48 on the Jetson Nano", "5.4"],
        ),
        (5, ["25 TFLOP/s of dense work", "19.5 TFLOP/s"], ["2.25×", "it was not TF32"]),
        (6, ["2.3e-04 and 1.1e-04", "3.0e-07 and 8.9e-08"], ["not stated"]),
        (7, ["A100, OC 256 at S 0.90", "OC 32 at S 0.91 to 0.98"], ["growth"]),
        (
            8,
            [
                "S 0.91: OC 48 (1.11×) lies below OC 40 (1.19×)",
                "S 0.98: OC 48 (1.42×) lies below OC 40 (1.52×)",
                "OC 80 has 1.03× where OC 64 is below 1×",
                "S 0.98: OC 80 (1.65×) lies above OC 48 (1.63×)",
            ],
            ["lanes", "Fig. 6a contradicts neither: the time saved may grow"],
        ),
        (
            9,
            ["3.2 ms of 6.4 ms", "0.67 ms", "10.1 ms of 14.5 ms", "1.3 ms"],
            ["overhead"],
        ),
        (10, ["3 axes"], ["every pair (n, slice) occurs once"]),
        (11, ["4 and 2 differ", "7 at S 0.90, 2 at S 0.98"], ["parameter"]),
        (12, ["5.76, which rounds to 5.8"], ["8 of 9"]),
        (13, ["22 to 43"], ["does not list"]),
        (14, ["Figure 6 shows execution times"], ["Figure 7"]),
        (15, ["48, 64, 80, 96, 112, 128"], ["left out"]),
        (16, ["0 of 9 cells with P = 2", "8 with 4 and 2"], ["symbol"]),
        (17, ["25.6 GB/s", "128"], ["DRAM"]),
    ],
)
def test_what_each_entry_says(findings, number, follows, reconciled_by):
    for text in follows:
        assert text in findings[number].follows
    for text in reconciled_by:
        assert text in findings[number].reconciled_by


def set_cells_to_computed(copy, table):
    frame = tables.winograd_table(copy, table)
    stated = frame[frame["assumption"] == tables.AS_STATED]
    rows = stated.groupby("in_channels", sort=False)["rounded"]
    copy.tables[table]["cells"] = [[float(text) for text in row] for _, row in rows]


def stated_as_reconciled(copy):
    copy.tables["table2"]["reduction"] = 2.0
    copy.devices["a100"]["bandwidth"] = 1.5e12


def flip_3(copy):
    for point in copy.panels:
        if "arithmetic_intensity" in point:
            point["arithmetic_intensity"] = 11.5 if point["sparsity"] == 0.90 else 2.3


def flip_4(copy):
    copy.devices["a100"]["peak_flops"] = 26e12
    copy.devices["tegra-x1"]["bandwidth"] = 20e9


def flip_5(copy):
    for point in copy.panels:
        if point.get("implementation") == "dense" and point["panel"] == "a":
            point["value"] = 1.9 if point["sparsity"] == 0.90 else 0.3


def flip_6(copy):
    copy.axis_ticks[0]["ticks"] = [1e-4, 3e-4]


def flip_7(copy):
    copy.text["below_one"] = []
    for point in copy.panels:
        if point["figure"] == 5:
            point["value"] = max(point["value"], 1.01)


def flip_8(copy):
    copy.text["more_out_channels"] = copy.text["more_out_channels"][1:]
    for point in copy.panels:
        if (point["panel"], point["figure"], point["out_channels"]) == ("b", 5, 48):
            point["value"] += 0.2


def flip_9(copy):
    for point in copy.panels:
        if point["figure"] == 7 and point["sparsity"] == 0.98:
            # The same throughput at every S: time proportional to the nonzeros.
            point["value"] = 2.4 if point["panel"] == "a" else 12.5


def flip_11(copy):
    copy.text["rows_per_warp"]["text"] = 2
    copy.text["columns_per_warp"]["value"] = 32


def flip_12(copy):
    copy.tables["table1"]["cells"][4] = 5.8


def flip_15(copy):
    copy.workloads["a100"]["out_channels"].append(256)


FLIPS = [
    (1, lambda copy: set_cells_to_computed(copy, "table2")),
    (1, stated_as_reconciled),
    (2, lambda copy: set_cells_to_computed(copy, "table3")),
    (3, flip_3),
    (4, flip_4),
    (5, flip_5),
    (5, lambda copy: copy.devices["a100"].update(peak_flops=26e12)),
    (6, flip_6),
    (7, flip_7),
    (7, lambda copy: copy.text["consistent_speedups"].update(panels=[])),
    (8, flip_8),
    (9, flip_9),
    (9, lambda copy: copy.text["gap_inherent"].update(claimed=False)),
    (10, lambda copy: copy.text["out_channels_split"].update(axis="none")),
    (10, lambda copy: copy.text["algorithm_block_indices"].update(indices=["bx", "by"])),
    (11, flip_11),
    (12, flip_12),
    (13, lambda copy: copy.times_table.update(total=[22, 43])),
    (14, lambda copy: copy.tables["table4"]["rows"][1].update(figures=[2])),
    (15, flip_15),
    (15, lambda copy: copy.workloads["a100"].update(out_channels_text=[])),
    (16, lambda copy: copy.model["weight_bytes"].update(value=4)),
    (17, lambda copy: copy.devices["tegra-x1"]["roof_name"].update(name="DRAM")),
    (17, lambda copy: copy.devices["tegra-x1"].update(bandwidth=256e9)),
]


@pytest.mark.parametrize(("number", "change"), FLIPS)
def test_a_changed_input_flips_the_entry(paper, number, change):
    copy = paper.copy()
    change(copy)
    finding = audit.ENTRIES[number - 1](copy)
    assert finding.number == number
    assert not finding.holds
    assert finding.printed
    assert finding.follows


def test_every_entry_is_flipped():
    assert {number for number, _ in FLIPS} == set(range(1, 18))


@pytest.mark.parametrize(
    ("number", "change"),
    [
        # Half of a mended entry still stands.
        (4, lambda copy: copy.devices["a100"].update(peak_flops=26e12)),
        (8, lambda copy: copy.text["more_out_channels"].pop(0)),
        (11, lambda copy: copy.text["rows_per_warp"].update(text=2)),
        (11, lambda copy: copy.text["columns_per_warp"].update(value=32)),
        (1, lambda copy: copy.tables["table2"].update(reduction=2.0)),
    ],
)
def test_half_a_correction_is_not_enough(paper, number, change):
    copy = paper.copy()
    change(copy)
    assert audit.ENTRIES[number - 1](copy).holds


def test_who_says_memory_bound(findings):
    printed = findings[4].printed
    assert "Neither names a layer; section 4.1 says it of OC 64" in printed
    assert 'section 1 has "at or near"' in printed


def test_the_execution_time_is_not_held_against_the_speedup(paper):
    """6.1 on Fig. 6a speaks of the time saved, which may grow while the ratio falls."""
    copy = paper.copy()
    (time,) = (entry for entry in copy.text["more_out_channels"] if entry["of"] == "time")
    before = audit.more_out_channels(copy)
    copy.text["more_out_channels"].remove(time)
    after = audit.more_out_channels(copy)
    assert before.follows == after.follows
    assert "Fig. 6a" in before.printed
    assert "Fig. 6a" not in after.printed + after.reconciled_by
    copy.text["more_out_channels"] = [time]
    assert not audit.more_out_channels(copy).holds


def test_outside_sources_are_named():
    for text in ("1.555 TB/s, NVIDIA's data sheet", "128 GB/s, JEDEC", "a ridge point of 13"):
        assert text in audit.PREAMBLE


def test_what_is_tried_is_one_number(paper, monkeypatch):
    monkeypatch.setattr(tables, "TRIED_RIDGE_POINT", exact(15))
    found = audit.table2(paper).reconciled_by
    assert "ridge point 15 (1.3 TB/s)" in found
    assert "a bandwidth of 1.3 TB/s, or a peak of 30 TFLOP/s" in found


def test_cells_that_clash(paper):
    clashes = audit.conflicts(paper, "table3")
    cells = [
        (
            (one.in_channels, one.out_channels),
            first,
            (other.in_channels, other.out_channels),
            second,
        )
        for (one, first), (other, second) in clashes
    ]
    assert cells == [((16, 48), 2.9, (24, 24), 3.0)]
    assert audit.conflicts(paper, "table2") == []


def test_fixed_time(paper):
    a100, nano = audit.fixed_time(paper, "a"), audit.fixed_time(paper, "b")
    assert [round(value * 1e3, 1) for value in a100.times] == [6.4, 3.9]
    assert round(a100.fixed * 1e3, 1) == 3.2
    assert round(a100.floor * 1e3, 2) == 0.67
    assert [round(value * 1e3, 1) for value in nano.times] == [14.5, 11.0]
    assert round(nano.fixed * 1e3) == 10
    assert round(nano.floor * 1e3, 1) == 1.3


def test_weight_lines_by_hand():
    # 2 · 9 · 0.5 = 9 words per channel: lists start at bytes 0, 36, 72, 108, 144.
    layer = Layer("hand", batch=1, in_channels=2, out_channels=8, height=8, width=8)
    assert audit.weight_lines(layer, 0.5, 4) == 1
    assert audit.weight_lines(layer, 0.5, 5) == 2
    assert audit.weight_lines(layer, 0.5, 1) == 1


def test_written_table_has_every_finding(findings):
    frame = audit.audit_table(list(findings.values()))
    assert frame["number"].tolist() == list(range(1, 18))
    assert list(audit.shown_audit(list(findings.values()))["Stands"]) == [True] * 17


SMALL = Layer("small", batch=1, in_channels=3, out_channels=4, height=8, width=8)


@pytest.fixture(scope="module")
def small():
    generator = np.random.RandomState(0)
    image = generator.random_sample(SMALL.input_shape[1:]).astype(np.float32)
    weight = (generator.random_sample(SMALL.weight_shape) - 0.5).astype(np.float32)
    return image, weight


def test_emulations_compute_a_convolution(small):
    from packedconv.reference import dense_reference

    image, weight = small
    expected = dense_reference(image[None], weight, padding=1)[0]
    assert np.abs(numerics.convolve(image, weight, np.float64) - expected).max() < 1e-13
    results = [
        numerics.convolve(image, weight),
        numerics.convolve(image, weight, position_first=True),
        numerics.winograd(image, weight, 2),
        numerics.winograd(image, weight, 4),
    ]
    for result in results:
        assert result.dtype == np.float32
        assert 0 < np.abs(result - expected).max() < 1e-5


def test_tf32_keeps_ten_bits_and_rounds_ties_to_even():
    ulp = 2.0**-10
    values = np.array([1, 1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.6 * ulp, -1 - 0.4 * ulp], np.float32)
    expected = np.array([1, 1, 1 + 2 * ulp, 1 + ulp, -1], np.float32)
    assert numerics.to_tf32(values).tolist() == expected.tolist()


def test_quantisation_stands_apart_from_summation():
    low, high = numerics.errors(0.90), numerics.errors(0.98)
    assert low.quantised > 100 * low.summation
    assert high.quantised > 100 * high.summation
    assert low.summation > high.summation
    assert low.winograd2 < low.winograd4 < low.tf32
