"""Plans of the paper's and the general kernel, and weights changed after packing."""

import itertools

import emulation
import numpy as np
import pytest
import torch

from packedconv import pack

DEFAULT = (32, 4, 2, 1)
IMPLEMENTATIONS = ["auto", "column", "paper", "general"]


def make_call(weight_shape, density=1.0, groups=1, height=8, width=70, **options):
    generator = torch.Generator().manual_seed(5)
    weight = torch.rand(weight_shape, generator=generator) + 0.5
    weight[torch.rand(weight_shape, generator=generator) >= density] = 0
    image = torch.rand((1, weight_shape[1] * groups, height, width), generator=generator)
    return emulation.make_call(image, pack(weight), groups=groups, **options)


def paper_facts(call, config=DEFAULT, limits=emulation.A100):
    return emulation.make_plan(call, limits, "paper", config).facts


def test_every_combination_of_the_ablation_is_compiled_once():
    compiled = emulation.emulated_core().cuda_kernels()["paper"]
    assert sorted(compiled) == sorted(
        itertools.product((4, 8, 16, 32), (1, 2, 4, 8), (2, 4, 8), [1])
    )


def test_the_default_leaves_three_blocks_on_an_a100_multiprocessor():
    call = make_call((64, 32, 3, 3), 0.1, padding=1)
    facts = emulation.make_plan(call, emulation.A100, "paper").facts
    assert facts["config"] == DEFAULT
    assert facts["shared_bytes"] == 6 * 66 * 32 * 4
    # The system keeps 1 KiB of every block.
    assert emulation.A100[3] // (facts["shared_bytes"] + 1024) == 3


def test_grid_is_column_tiles_row_tiles_and_slices_of_groups_of_images():
    call = make_call((12, 2, 3, 3), groups=3, height=9, padding=1)
    assert paper_facts(call, (32, 4, 2, 2))["grid"] == (2, 3, 6)


def test_only_the_papers_shape_has_a_tile_known_to_the_compiler():
    assert paper_facts(make_call((2, 2, 3, 3), padding=1))["paper_shape"]
    for other in ({"stride": 2}, {"dilation": (1, 2)}):
        assert not paper_facts(make_call((2, 2, 3, 3), **other))["paper_shape"]
    assert not paper_facts(make_call((2, 2, 3, 2)))["paper_shape"]


@pytest.mark.parametrize(
    ("in_channels", "shared_per_block", "blocks", "channels_per_block"),
    [
        (32, 32 * 1584, 1, 32),
        (32, 32 * 1584 - 4, 2, 16),
        (33, 11 * 1584, 3, 11),
        (256, 256 * 1584, 1, 256),
        (300, 256 * 1584, 2, 256),
        (300, 255 * 1584, 3, 128),
        (5, 1584, 5, 1),
    ],
)
def test_input_channels_pass_in_blocks_that_fit(
    in_channels, shared_per_block, blocks, channels_per_block
):
    # 6 x 66 floats per channel: 1584 bytes.
    call = make_call((2, in_channels, 3, 3), 0.1, padding=1)
    facts = paper_facts(call, limits=(80, 108, shared_per_block, shared_per_block))
    assert facts["in_channel_blocks"] == blocks
    assert facts["channels_per_block"] == channels_per_block
    assert facts["shared_bytes"] == channels_per_block * 1584


def test_begins_and_ends_hold_every_word_of_a_block_and_no_other():
    call = make_call((3, 7, 3, 3), 0.4, padding=1)
    plan = emulation.make_plan(call, (80, 108, 3 * 1584, 3 * 1584), "paper", DEFAULT)
    words = plan.table[: len(call.words)]
    begins, ends = plan.table[len(call.words) :].reshape(2, 3, 3).astype(int)
    np.testing.assert_array_equal(words, call.words)
    for block, oc in itertools.product(range(3), range(3)):
        of_channel = words[call.offsets[0, oc] : call.offsets[0, oc + 1]]
        np.testing.assert_array_equal(
            words[begins[block, oc] : ends[block, oc]],
            of_channel[(of_channel >> 8 & 0xFF) // 3 == block],
        )


def test_a_tile_that_does_not_fit_says_what_it_needs():
    call = make_call((2, 2, 3, 3), padding=1)
    with pytest.raises(ValueError, match=r"6 x 66 floats for one input channel.* 1583 bytes"):
        paper_facts(call, limits=(80, 108, 1583, 1583))


@pytest.mark.parametrize(
    "config", [(5, 4, 2, 1), (32, 3, 2, 1), (32, 4, 1, 1), (32, 4, 16, 1), (32, 4, 2, 0)]
)
def test_a_mapping_without_a_kernel_is_refused(config):
    call = make_call((2, 2, 3, 3))
    with pytest.raises(ValueError, match=r"mapping: expected col_per_warp 4, 8, 16 or 32"):
        paper_facts(call, config)


def test_more_images_than_can_be_counted_are_refused():
    call = make_call((2, 2, 3, 3), padding=1)
    image = call.input.expand(1 << 30, -1, -1, -1)
    # Of the output only the shape is read.
    output = call.output.expand(1 << 30, -1, -1, -1)
    with pytest.raises(ValueError, match="fewer than 2\\^31 image x group x slice"):
        paper_facts(call._replace(input=image, output=output), (32, 4, 2, 2))


def change_word(field, value):
    shift, bits = {"px": (4, 0xF), "py": (0, 0xF), "channel": (8, 0xFF), "value": (16, 0xFFFF)}[
        field
    ]

    def change(words, offsets):
        words[7] = (int(words[7]) & ~(bits << shift)) | value << shift

    return change


def swap_words(words, offsets):
    words[[2, 3]] = words[[3, 2]]


def repeat_word(words, offsets):
    words[3] = words[2]


def change_offset(index, value):
    def change(words, offsets):
        offsets.reshape(-1)[index] = value

    return change


CHANGES = {
    "channel past the last": (change_word("channel", 5), "word 7 with an input channel below 5"),
    "channel of another block": (change_word("channel", 200), "input channel below 5, got 200"),
    "px": (change_word("px", 2), "word 7 with a kernel column px below 2, got 2"),
    "py": (change_word("py", 3), "word 7 with a kernel row py below 3, got 3"),
    "zero": (change_word("value", 0x8000), "word 7 with a finite value"),
    "infinity": (change_word("value", 0x7C00), "word 7 with a finite value"),
    "order": (swap_words, "word 3 out of it"),
    "twice": (repeat_word, "word 3 out of it"),
    "first offset": (change_offset(0, 1), "offset 0 to be 0, got 1"),
    "falling offset": (change_offset(2, 29), "never fall, got 29 after 30"),
    "offset past the end": (change_offset(1, 2**32 - 1), "never fall, got 60 after 4294967295"),
    "last offset": (change_offset(4, 121), "number of words, 120, got 121"),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_changed_after_packing_is_refused(implementation, change):
    call = make_call((4, 5, 3, 2))
    apply, message = CHANGES[change]
    words, offsets = np.array(call.words), np.array(call.offsets)
    apply(words, offsets)
    with pytest.raises(ValueError, match=message + ".*changed after packing.*pack it again"):
        emulation.make_plan(
            call._replace(words=words, offsets=offsets), implementation=implementation
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_and_words_of_another_length_are_refused(implementation):
    call = make_call((4, 5, 3, 2))
    for changed in (
        call._replace(offsets=call.offsets[:, :-1].copy()),
        call._replace(offsets=np.vstack([call.offsets, call.offsets])),
        call._replace(words=call.words[:-1].copy()),
    ):
        with pytest.raises(ValueError, match=r"weight: expected .* pack it again"):
            emulation.make_plan(changed, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_next_block_begins_where_the_one_before_ends(implementation):
    call = make_call((2, 257, 1, 1), height=1)
    offsets = np.array(call.offsets)
    offsets[1, 0] -= 1
    with pytest.raises(ValueError, match="next block to begin with the last offset 512, got 511"):
        emulation.make_plan(call._replace(offsets=offsets), implementation=implementation)
