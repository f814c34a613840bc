"""SparseConv2d as a drop-in for torch.nn.Conv2d at inference."""

import copy
import io
import pickle

import pytest
import torch
from drawn_layers import reference_and_bound
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.utils import prune

from packedconv.module import SparseConv2d
from packedconv.packed import pack

pytestmark = pytest.mark.usefixtures("one_thread")


def dense_conv(*arguments, seed=0, **options):
    """torch.nn.Conv2d whose weight is sparse and fits FP16."""
    conv = torch.nn.Conv2d(*arguments, **options).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-512, 513, conv.weight.shape, generator=generator) / 512.0
    conv.weight.copy_(weight * (torch.rand(weight.shape, generator=generator) < 0.3))
    if conv.bias is not None:
        conv.bias.copy_(torch.rand(conv.bias.shape, generator=generator) * 2 - 1)
    return conv


def image_of(*shape, seed=7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def assert_same(sparse, conv, image, activation=None):
    options = {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
    }
    expected, bound = reference_and_bound(image, pack(conv.weight), conv.bias, activation, options)
    result = sparse(image)
    assert result.shape == expected.shape
    assert bool(((result - expected).abs() <= bound).all())


@given(
    groups=st.sampled_from([1, 2, 4]),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.one_of(
        st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["same", "valid"])
    ),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bias=st.booleans(),
    activation=st.sampled_from([None, "relu"]),
)
def test_from_dense(groups, channels, kernel, stride, padding, dilation, bias, activation):
    assume(padding != "same" or stride == (1, 1))
    conv = dense_conv(
        groups * channels[0],
        groups * channels[1],
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
    )
    sparse = SparseConv2d.from_dense(conv, activation=activation)
    assert_same(sparse, conv, image_of(2, conv.in_channels, 9, 10), activation)
    assert_same(sparse, conv, image_of(conv.in_channels, 9, 10), activation)


def test_weight_is_rounded_to_fp16():
    conv = dense_conv(1, 1, 1, bias=False)
    conv.weight.fill_(0.1)
    sparse = SparseConv2d.from_dense(conv)
    assert sparse.packed.unpack().item() == torch.tensor(0.1).half().item()


def test_dense_layer_is_not_shared():
    conv = dense_conv(2, 3, 3)
    sparse = SparseConv2d.from_dense(conv)
    expected = sparse(image_of(1, 2, 5, 5))
    conv.weight.fill_(9.0)
    conv.bias.fill_(9.0)
    assert torch.equal(sparse(image_of(1, 2, 5, 5)), expected)


def test_trainable_layer():
    conv = torch.nn.Conv2d(2, 3, 3)
    sparse = SparseConv2d.from_dense(conv)
    assert not list(sparse.parameters())
    assert not sparse(image_of(1, 2, 5, 5)).requires_grad


def test_pruned_layer():
    conv = dense_conv(4, 6, 3, padding=1)
    conv.weight.copy_(torch.arange(1, 217).view(6, 4, 3, 3) / 256.0)
    conv = prune.l1_unstructured(conv.requires_grad_(True), "weight", amount=0.75)
    sparse = SparseConv2d.from_dense(conv)
    assert sparse.packed.nnz == 54
    with torch.no_grad():
        assert_same(sparse, conv.requires_grad_(False), image_of(1, 4, 8, 8))


def test_within_a_network():
    network = torch.nn.Sequential(dense_conv(3, 8, 3, padding=1), torch.nn.ReLU())
    network.append(dense_conv(8, 4, 3, seed=1, padding="same", bias=False))
    sparse = torch.nn.Sequential(
        SparseConv2d.from_dense(network[0], activation="relu"), SparseConv2d.from_dense(network[2])
    )
    image = image_of(2, 3, 12, 12)
    torch.testing.assert_close(sparse.eval()(image), network(image), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: saved_and_loaded(module),
        lambda module: module.to("cpu").eval(),
        lambda module: module.float(),
    ],
)
def test_copies_compute_the_same(copied):
    sparse = SparseConv2d.from_dense(dense_conv(4, 6, 3, padding=1, groups=2), activation="relu")
    image = image_of(1, 4, 7, 7)
    expected = sparse(image)
    other = copied(sparse)
    assert torch.equal(other(image), expected)
    assert other.packed == sparse.packed
    assert repr(other) == repr(sparse)


def saved_and_loaded(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **{"weights_only": False, **options})


def test_state_holds_weight_and_bias():
    sparse = SparseConv2d.from_dense(dense_conv(4, 6, 3))
    other = SparseConv2d.from_dense(dense_conv(4, 6, 3, seed=1))
    image = image_of(1, 4, 7, 7)
    assert not torch.equal(other(image), sparse(image))
    other.load_state_dict(saved_and_loaded(sparse.state_dict(), weights_only=True))
    assert other.packed == sparse.packed
    assert torch.equal(other(image), sparse(image))


def test_state_of_another_shape():
    state = SparseConv2d.from_dense(dense_conv(4, 6, 3, bias=False)).state_dict()
    other = SparseConv2d.from_dense(dense_conv(4, 6, 5, bias=False))
    with pytest.raises(ValueError, match=r"packed: expected shape \(6, 4, 5, 5\), got"):
        other.load_state_dict(state)


def test_damaged_state():
    sparse = SparseConv2d.from_dense(dense_conv(4, 6, 3, bias=False))
    state = {name: value.clone() for name, value in sparse.state_dict().items()}
    next(iter(state.values()))[60] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        sparse.load_state_dict(state)


def test_bias_of_another_type():
    sparse = SparseConv2d.from_dense(dense_conv(2, 3, 3)).double()
    with pytest.raises(TypeError, match=r"bias: expected float32, got torch.float64"):
        sparse(image_of(1, 2, 5, 5))


def test_double_input():
    sparse = SparseConv2d.from_dense(dense_conv(2, 3, 3))
    with pytest.raises(TypeError, match="input: expected float32"):
        sparse(image_of(1, 2, 5, 5).double())


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes(mode):
    with pytest.raises(ValueError, match=f"conv: expected padding_mode \"zeros\", got '{mode}'"):
        SparseConv2d.from_dense(dense_conv(2, 3, 3, padding=1, padding_mode=mode))


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.ConvTranspose2d(2, 3, 3),
        torch.nn.Conv1d(2, 3, 3),
        torch.nn.Conv3d(2, 3, 3),
        torch.nn.Linear(2, 3),
        torch.zeros(3, 2, 3, 3),
        None,
    ],
)
def test_other_layers(layer):
    with pytest.raises(TypeError, match=r"conv: expected a torch.nn.Conv2d, got"):
        SparseConv2d.from_dense(layer)


def test_layer_without_weights_yet():
    with pytest.raises(ValueError, match="conv: expected an initialized layer"):
        SparseConv2d.from_dense(torch.nn.LazyConv2d(3, 3))


def test_kernel_that_does_not_fit():
    with pytest.raises(ValueError, match="weight: expected a kernel of at most 16 x 16"):
        SparseConv2d.from_dense(dense_conv(1, 1, 17))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"packed": torch.zeros(3, 2, 3, 3)}, TypeError, r"packed: expected a PackedWeight"),
        ({"bias": [1.0, 2.0, 3.0]}, TypeError, r"bias: expected a torch.Tensor, got list"),
        ({"bias": torch.zeros(2)}, ValueError, r"bias: expected shape \(3,\), got \(2,\)"),
        ({"stride": 0}, ValueError, r"stride: expected at least 1"),
        ({"padding": -1}, ValueError, r"padding: expected at least 0"),
        ({"padding": "full"}, ValueError, r"padding: expected"),
        ({"padding": "same", "stride": 2}, ValueError, r'padding: "same" needs stride 1'),
        ({"dilation": 1.5}, TypeError, r"dilation: expected an int or a pair"),
        ({"groups": 2}, ValueError, r"groups: expected a divisor of the 3 output channels"),
        ({"groups": "1"}, TypeError, r"groups: expected an int"),
        ({"activation": "tanh"}, ValueError, r"activation: expected None or"),
    ],
)
def test_arguments_that_are_refused(changes, error, message):
    arguments = {"packed": pack(torch.ones(3, 2, 3, 3)), **changes}
    with pytest.raises(error, match=message):
        SparseConv2d(**arguments)


def test_representation():
    sparse = SparseConv2d.from_dense(dense_conv(2, 3, 3, padding="same"), activation="relu")
    text = repr(sparse)
    assert "PackedWeight(shape=(3, 2, 3, 3)" in text
    assert "padding='same'" in text
    assert "activation='relu'" in text
