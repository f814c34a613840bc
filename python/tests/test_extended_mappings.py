"""Mappings of the paper's kernel by counts: by hand, by brute force, and the page."""

import itertools
import pathlib
import runpy
import sys

import numpy as np
import pandas as pd
import pytest
from synthetic import read_csv

from packedconv import _core
from packedconv.evidence import bounds, instructions
from packedconv.evidence.extended import mappings
from packedconv.layer import Layer
from packedconv.packed import pack_array
from packedconv.plots.extended.mappings import PANELS, TITLE, mappings_figure

ROOT = pathlib.Path(__file__).resolve().parents[2]
LANES = np.arange(32)
REASON = "no CUDA compiler"


# Transactions of shared memory


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (0 * LANES, 1),  # one word for all: a broadcast
        (LANES, 1),
        (LANES + 5, 1),
        (2 * LANES, 2),
        (4 * LANES, 4),
        (32 * LANES, 32),  # one bank
        (33 * LANES, 1),
        (LANES // 2, 1),
        (LANES % 8, 1),  # eight words, each for four lanes
        (64 * (LANES % 8), 8),  # the same in one bank
        (np.where(LANES == 0, 33, LANES), 2),  # words 1 and 33
    ],
)
def test_transactions_by_hand(words, expected):
    everyone = np.ones((1, 32), dtype=bool)
    assert mappings.transactions(words[None], everyone).tolist() == [expected]


def test_lanes_that_read_nothing_conflict_with_nobody():
    words = np.broadcast_to(32 * LANES, (4, 32))
    active = np.stack([LANES < 32, LANES < 3, LANES == 31, LANES < 0])
    assert mappings.transactions(words, active).tolist() == [32, 3, 1, 0]


# The steps of a warp


def test_lists_are_walked_four_words_at_a_time():
    words, active = mappings.walk([5, 3, 0])
    # Four words of the first lane, then what is left over of both.
    assert active.T.astype(int).tolist() == [
        *([1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0])
    ]
    assert words[active[:, 0], 0].tolist() == [0, 1, 2, 3, 4]
    assert words[active[:, 1], 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [([4, 4], 4), ([8, 8], 8), ([7, 4], 7), ([8, 3], 11), ([0, 0], 0), ([9], 9), ([9, 6], 10)],
)
def test_how_many_steps(lengths, steps):
    words, active = mappings.walk(lengths)
    assert words.shape == active.shape == (steps, len(lengths))
    assert active.sum(axis=0).tolist() == lengths
    for lane, length in enumerate(lengths):
        assert words[active[:, lane], lane].tolist() == list(range(length))


def test_a_word_reads_its_channel_row_and_column():
    weight = np.zeros((1, 4, 3, 3), dtype=np.float32)
    weight[0, 3, 1, 2] = 1  # ic, py, px
    words = pack_array(weight).words
    assert mappings.tap(words, 0, tile_rows=6, pitch=66).tolist() == [(3 * 6 + 1) * 66 + 2]
    assert mappings.tap(words, 2, tile_rows=6, pitch=66).tolist() == [(1 * 6 + 1) * 66 + 2]


def test_lanes_are_those_of_the_kernel():
    config = _core.mapping_config()
    taps = 1000 * np.arange(8)[None]
    expected = 1000 * np.array(config["channel_lane_of_lane"]) + np.array(config["column_of_lane"])
    assert mappings.lane_words(taps, config["col_per_warp"]).tolist() == [expected.tolist()]
    assert mappings.lane_words(np.array([[7]]), 32).tolist() == [(7 + LANES).tolist()]


# Against the kernel, lane by lane


def kernel_loads(packed, begins, ends, per_block, mapping, slice_begin, slice_end):
    """Words that each lane of a warp reads for row 0, load by load: paper_kernel.cuh as it is
    written, in which lanes wait for each other after every loop."""
    columns, rows, warps, _ = mapping
    channel_lanes = 32 // columns
    tile_rows, pitch = rows + 2, columns * warps + 2
    loads = []
    for block in range(len(begins)):
        for oc in range(slice_begin, slice_end, channel_lanes):
            left, at = {}, {}
            for lane in range(32):
                channel = oc + lane % channel_lanes
                if channel < slice_end:
                    at[lane] = begins[block][channel]
                    left[lane] = ends[block][channel] - begins[block][channel]

            def load(lanes, offset, at=at, block=block):
                read = {}
                for lane in lanes:
                    word = int(packed.words[at[lane] + offset])
                    channel = (word >> 8 & 255) - block * per_block
                    row, column = word & 15, (word >> 4 & 15) + lane // channel_lanes
                    read[lane] = (channel * tile_rows + row) * pitch + column
                loads.append(read)

            while any(count >= 4 for count in left.values()):
                lanes = [lane for lane, count in left.items() if count >= 4]
                for offset in range(4):
                    load(lanes, offset)
                for lane in lanes:
                    left[lane] -= 4
                    at[lane] += 4
            for offset in range(3):
                lanes = [lane for lane, count in left.items() if offset < count]
                if lanes:
                    load(lanes, offset)
    return loads


@pytest.mark.parametrize(
    ("mapping", "shared_bytes"),
    [
        ((4, 2, 2, 1), 1 << 16),
        ((8, 4, 2, 3), 1 << 16),
        ((16, 1, 4, 2), 1 << 16),
        ((32, 4, 2, 1), 1 << 16),
        ((4, 8, 4, 2), 10 * 18 * 4 * 5),  # five input channels at a time
    ],
)
def test_counts_by_brute_force(mapping, shared_bytes):
    layer = Layer("oc20", 1, 12, 20, 16, 40)
    draw = np.random.default_rng(1).random(layer.weight_shape)
    packed = pack_array((draw < 0.2).astype(np.float32))
    gpu = {
        **{"compute_capability": "5.3", "multiprocessors": 1},
        "shared_memory_per_block_bytes": shared_bytes,
        "shared_memory_per_multiprocessor_bytes": shared_bytes,
    }
    plan = mappings._Planner(_core, layer, packed, gpu)(mapping)
    lists = mappings.read_lists(plan, packed)
    per_block, slices = plan.facts["channels_per_block"], mapping[3]
    assert len(lists.begins) == -(-12 // per_block)
    # Every word in the list of its block and output channel.
    for block, oc in itertools.product(range(len(lists.begins)), range(20)):
        words = packed.words[lists.begins[block, oc] : lists.ends[block, oc]]
        assert set(words >> 8 & 255) <= set(range(block * per_block, (block + 1) * per_block))
    assert (lists.ends - lists.begins).sum() == packed.nnz
    per_slice = -(-20 // slices)
    expected = [
        kernel_loads(
            *(packed, lists.begins, lists.ends, per_block, mapping),
            *(begin, min(begin + per_slice, 20)),
        )
        for begin in range(0, 20, per_slice)
    ]
    served = [
        max(np.bincount([word % 32 for word in set(load.values())]))
        for loads in expected
        for load in loads
    ]
    walks = mappings.slice_walks(lists, 32 // mapping[0], slices)
    assert [len(one.words) for one in walks] == list(map(len, expected))
    named = dict(zip(mappings.MAPPING, mapping, strict=True))
    found = mappings._counted(plan.facts, layer, named, walks)
    assert found["transactions_per_load"] == pytest.approx(np.mean(served))
    steps, lanes = list(map(len, expected)), 32 // mapping[0]
    assert found["warp_imbalance"] == pytest.approx(sum(steps) * lanes / packed.nnz)
    assert found["slice_imbalance"] == pytest.approx(max(steps) / np.mean(steps))


def test_imbalance_by_hand():
    """Eight channel lanes, of which one has eight words and the others four each; and in two
    slices."""
    lengths = np.array([8, 4, 4, 4, 4, 4, 4, 4])
    ends = lengths.cumsum()
    words = np.zeros(lengths.sum(), dtype=np.uint32)
    lists = mappings.Lists(words, (ends - lengths)[None], ends[None])
    layer = Layer("hand", 1, 1, 8, 8, 8)
    facts = {"grid": (1, 4, 1), "shared_bytes": 1, "in_channel_blocks": 1, "channels_per_block": 1}
    named = dict(zip(mappings.MAPPING, (4, 2, 2, 1), strict=True))
    found = mappings._counted(facts, layer, named, mappings.slice_walks(lists, 8, 1))
    # 8 steps where 36 words in 8 lanes make 4.5.
    assert found["warp_imbalance"] == pytest.approx(8 / 4.5)
    assert found["slice_imbalance"] == 1
    # All words are the same, so the four columns read four neighbouring ones.
    assert found["transactions_per_load"] == 1
    # One block of 8 columns and 2 rows at a time, with a halo.
    assert found["computed_per_pixel"] == 1
    assert found["filled_per_input"] == 4 * 4 * 10 / 64
    found = mappings._counted(facts, layer, named, mappings.slice_walks(lists, 8, 2))
    # Half of the lanes are idle; 8 steps and 4.
    assert found["warp_imbalance"] == pytest.approx(12 * 8 / 36)
    assert found["slice_imbalance"] == pytest.approx(8 / 6)
    assert found["filled_per_input"] == 2 * 4 * 4 * 10 / 64


def test_as_the_bounds_have_it():
    """The bounds let the lanes go step by step, not four words at a time: much the same."""
    layer = Layer("oc128", 32, 32, 128, 256, 256)
    table = one_layer_table(layer, ((8, 8, 4, 1),))
    factors = bounds.mapping_factors(layer, 0.9, 8, 10, 34, draws=1)
    assert table["transactions_per_load"].iloc[0] == pytest.approx(factors.wavefronts, rel=0.03)
    assert table["warp_imbalance"].iloc[0] == pytest.approx(factors.imbalance, rel=0.05)


def one_layer_table(layer, configs):
    device = instructions.gpu_devices(ROOT)["a100"]
    fields = {key: value for key, value in layer._asdict().items() if key != "name"}
    device = {**device, "layers": {**fields, "out_channels": [layer.out_channels]}}
    rows = list(mappings._device_rows(device, no_counts(), [0.9], [1]))
    table = pd.DataFrame(rows)
    keys = table[list(mappings.MAPPING)].apply(tuple, axis=1)
    return table[keys.isin(configs)]


# Occupancy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The system keeps 1 KiB of every block of an A100: 49.5 + 1 KiB three times in 164.
        ((80, 167936, 50688, 2), (3, "shared memory")),
        ((53, 65536, 25344, 2), (2, "shared memory")),
        ((80, 167936, 1024, 1), (32, "blocks")),
        ((80, 167936, 1024, 8), (8, "warps")),
        # 8192 registers a warp, 8 warps, 4 blocks of two.
        ((80, 167936, 1024, 2, 255), (4, "registers")),
        # 33 registers take 1280 a warp, not 1056.
        ((80, 167936, 1024, 4, 33), (12, "registers")),
        ((53, 65536, 49153, 8, 32), (1, "shared memory")),
    ],
)
def test_resident_blocks(arguments, expected):
    assert mappings.resident(*arguments) == expected


# The table and the page


def no_counts():
    rows = [
        {"architecture": architecture, "missing": REASON, "picked": "", "kernel": ""}
        for architecture in instructions.ARCHITECTURES
    ]
    return pd.DataFrame(rows, columns=instructions.COLUMNS)


def made_up_counts():
    """Of sm_53: fewer instructions with more rows; none of the others."""
    kernels = _core.cuda_kernels()["paper"]
    rows = [
        {
            **dict(zip(mappings.MAPPING, mapping[:3], strict=False)),
            **{"architecture": 53, "kernel": "paper", "picked": "", "missing": ""},
            **{"instructions_per_fma": 2 + 8 / mapping[1], "registers": 40},
        }
        for mapping in kernels
    ]
    counted = pd.DataFrame(rows, columns=instructions.COLUMNS)
    missing = no_counts()
    return pd.concat(
        [part.astype(object) for part in (missing[missing["architecture"] != 53], counted)],
        ignore_index=True,
    )


@pytest.fixture(scope="module")
def table():
    return mappings.mapping_table(ROOT, made_up_counts(), sparsities=(0.9, 0.98), slices=(1, 4))


def test_every_compiled_mapping_is_counted(table):
    assert list(table.columns) == mappings.COLUMNS
    assert len(table) == (6 + 3) * 2 * 2 * 48
    assert table["left_out"].isna().all()
    default = table[table["default"]]
    assert len(default) == (6 + 3) * 2
    assert set(default[list(mappings.MAPPING)].apply(tuple, axis=1)) == {(32, 4, 2, 1)}
    assert set(default["transactions_per_load"]) == set(default["warp_imbalance"]) == {1.0}
    # 66 x 6 elements for 64 x 4 pixels.
    assert set(default["filled_per_input"]) == {66 * 6 / (64 * 4)}
    assert (table["transactions_per_load"] >= 1).all()
    assert (table["transactions_per_load"] <= 32 / table["col_per_warp"]).all()
    assert (table["warp_imbalance"] >= 1).all()


def test_wide_blocks_compute_pixels_outside_of_the_nanos_output(table):
    nano = table[table["device"] == "tegra-x1"]
    wide = (nano["col_per_warp"] == 32) & (nano["warps_per_block"] == 8)
    assert set(nano.loc[wide, "computed_per_pixel"]) == {2.0}
    assert set(nano.loc[~wide, "computed_per_pixel"]) == {1.0}


def test_what_the_table_of_instructions_adds(table):
    nano, a100 = (table[table["device"] == family] for family in ("tegra-x1", "a100"))
    np.testing.assert_allclose(
        nano["instructions_per_fma"].astype(float), 2 + 8 / nano["rows_per_thread"]
    )
    np.testing.assert_allclose(
        nano["issued_per_fma"].astype(float),
        nano["instructions_per_fma"].astype(float)
        * nano["warp_imbalance"]
        * nano["computed_per_pixel"],
    )
    assert a100[["instructions_per_fma", "issued_per_fma", "registers"]].isna().all(axis=None)
    assert a100["transactions_per_fma"].notna().all()


def test_a_mapping_without_a_plan_has_its_reason():
    device = instructions.gpu_devices(ROOT)["tegra-x1"]
    # Less than the widest tile of one channel: 10 x 258 floats.
    small = {**device["gpu"], "shared_memory_per_block_bytes": 4 * 10 * 258 - 1}
    rows = pd.DataFrame(
        mappings._device_rows({**device, "gpu": small}, no_counts(), [0.9], [1]),
        columns=mappings.COLUMNS,
    )
    left_out = rows[rows["left_out"].notna()]
    assert set(left_out[list(mappings.MAPPING)].apply(tuple, axis=1)) == {(32, 8, 8, 1)}
    assert left_out["left_out"].str.contains("a tile that fits shared memory").all()


def caption(figure):
    (text,) = (text for text in figure.texts if text.get_gid() == "caption")
    return text.get_text().replace("\n", " ")


def test_the_figure_draws_its_table(table):
    figure = mappings_figure(table, made_up_counts(), mappings.devices(ROOT))
    assert len(figure.axes) == 2 * (len(PANELS) + 1)
    assert figure._suptitle.get_text() == TITLE
    assert "nothing here is a time" in TITLE
    drawn = table[(table["device"] == "tegra-x1") & (table["out_channels"] == 48)]
    one = drawn[(drawn["slices"] == 1) & (drawn["sparsity"] == 0.98)]
    axes = figure.axes[len(PANELS) + 1 + 2]
    assert axes.get_title(loc="left") == "transactions\nper load, S 0.98"
    ordered = one.sort_values(["rows_per_thread", "warps_per_block", "col_per_warp"])
    texts = [text.get_text() for text in axes.texts]
    assert texts == [f"{value:.2f}" for value in ordered["transactions_per_load"]]
    # The default is framed: the last column, R 4 and 2 warps.
    (frame,) = axes.patches
    assert frame.get_xy() == (3, 6)
    text = caption(figure)
    assert "no GPU ran" in text
    assert f"A100: no instructions or registers counted: {REASON}." in text
    assert "Jetson Nano: no instructions" not in text
    nano = next(part for part in text.split("Jetson Nano, OC 48, ") if part.startswith("S 0.9:"))
    assert "COL_PER_WARP 32, R 4, 2 warps takes" in nano
    # Ahead: R 8 with 32 columns and 2 or 4 warps, 3, and with 16 columns, 3 x 1.19.
    assert "4.00 instructions, rank 6 of 48 (fewest 3.00: COL_PER_WARP 32, R 8, 2 warps)" in nano
    assert "1.00 transactions, rank 1 of 48" in nano
    assert "Jetson Nano: 4 of 48 mappings compute pixels outside of the output" in text


def test_the_figure_script(table, tmp_path, monkeypatch):
    asked = []

    def made(root, counts):
        asked.append((root, counts["missing"].tolist()))
        return table

    monkeypatch.setattr(mappings, "mapping_table", made)
    no_counts().to_csv(tmp_path / "instructions.csv", index=False)
    out = tmp_path / "mappings.pdf"
    script = str(ROOT / "scripts" / "figure_mappings.py")
    arguments = ["--root", ROOT, "--instructions", tmp_path / "instructions.csv", "--out", out]
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(script, run_name="__main__")
    assert asked == [(ROOT, [REASON] * 3)]
    rows = read_csv(tmp_path / "mappings.csv")
    assert len(rows) == len(table)
    assert list(rows[0]) == mappings.COLUMNS
    assert (tmp_path / "mappings.png").stat().st_size > 10_000
