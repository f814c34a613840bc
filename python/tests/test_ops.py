"""The custom op: what torch.compile, torch.export and other tracers see of conv2d."""

import contextlib
import gc
import io
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

import packedconv.packed
from packedconv import ops
from packedconv.conv import conv2d
from packedconv.module import SparseConv2d
from packedconv.packed import PackedWeight, pack

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not ops.SUPPORTED, reason="custom ops need torch 2.4"),
    # By torch itself, while it traces.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

BACKENDS = ["eager", "aot_eager", "inductor"]


def random_tensor(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def sparse_weight(*shape, seed=0):
    weight = random_tensor(*shape, seed=seed).clamp(min=1e-3)
    return pack(weight * (random_tensor(*shape, seed=seed + 1) > 0.2))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def packed():
    """3 x 4, 4 channels to 6."""
    return sparse_weight(6, 4, 3, 4)


@pytest.fixture
def image():
    return random_tensor(2, 4, 9, 11)


@pytest.fixture
def network():
    """Two layers, the first with all options, the second with none."""
    return torch.nn.Sequential(
        SparseConv2d(
            sparse_weight(6, 4, 3, 4),
            random_tensor(6),
            stride=(2, 1),
            padding=(1, 3),
            dilation=(1, 2),
            activation="relu",
        ),
        torch.nn.Softplus(),
        SparseConv2d(sparse_weight(8, 3, 2, 2), groups=2, padding="same"),
    ).eval()


def op_arguments(packed, image, bias=None, relu=False):
    words, offsets = ops._tensors(packed, image.device)
    one = (1, 1)
    return image, words, offsets, packed.shape, bias, one, one, (1, 0), one, 1, relu


def graph_calls(graph):
    """The functions that a graph calls, by name."""
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def recorded(calls):
    """A backend that computes the graph as it is and notes what it calls."""

    def backend(module, inputs):
        calls.append([name.split(".")[-1] for name in graph_calls(module.graph)])
        return module.forward

    return backend


@pytest.fixture
def packed_weights_made(monkeypatch):
    """How many packed weights are checked from now on."""
    made = []
    check = packedconv.packed._check_words
    monkeypatch.setattr(
        packedconv.packed, "_check_words", lambda *arguments: (made.append(1), check(*arguments))
    )
    return made


# The op.


@pytest.mark.parametrize("bias", [None, random_tensor(6)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_op_is_registered_as_torch_wants_it(packed, image, bias, relu, batched):
    arguments = op_arguments(packed, image if batched else image[0], bias, relu)
    torch.library.opcheck(torch.ops.packedconv.conv2d.default, arguments)


def test_op_computes_what_conv2d_does(packed, image):
    bias = random_tensor(6)
    result = torch.ops.packedconv.conv2d(*op_arguments(packed, image, bias, True))
    padded = torch.nn.functional.pad(image, (1, 0, 1, 1))
    assert torch.equal(result, conv2d(padded, packed, bias, activation="relu"))


def test_tensors_of_a_packed_weight_are_made_once(packed):
    words, offsets = ops._tensors(packed, torch.device("cpu"))
    assert np.array_equal(words.numpy().view(np.uint32), packed.words)
    assert np.array_equal(offsets.numpy().view(np.uint32), packed.offsets)
    assert ops._tensors(packed, torch.device("cpu"))[0] is words


def test_packed_weight_is_found_again(packed, image, packed_weights_made):
    arguments = op_arguments(packed, image)
    assert ops._packed_weight(arguments[1], arguments[2], packed.shape) is packed
    torch.ops.packedconv.conv2d(*arguments)
    assert not packed_weights_made


def test_tensors_of_a_file_are_checked_once(packed, image, packed_weights_made):
    arguments = list(op_arguments(packed, image))
    expected = torch.ops.packedconv.conv2d(*arguments)
    arguments[1], arguments[2] = arguments[1].clone(), arguments[2].clone()
    for _ in range(3):
        assert torch.equal(torch.ops.packedconv.conv2d(*arguments), expected)
    assert len(packed_weights_made) == 1
    arguments[1] = arguments[1].clone()
    assert torch.equal(torch.ops.packedconv.conv2d(*arguments), expected)
    assert len(packed_weights_made) == 2


def test_a_change_of_the_tensors_is_noticed(packed, image):
    arguments = op_arguments(packed, image)
    words = arguments[1]
    before = torch.ops.packedconv.conv2d(*arguments)
    words[0] ^= 1 << 31  # the sign of the first weight
    changed = torch.ops.packedconv.conv2d(*arguments)
    assert not torch.equal(changed, before)
    # The packed weight itself has not changed.
    assert torch.equal(conv2d(torch.nn.functional.pad(image, (1, 0, 1, 1)), packed), before)
    words[0] = 0x3C000000 | 200 << 8
    with pytest.raises(ValueError, match="words: expected a input channel below 4, got 200"):
        torch.ops.packedconv.conv2d(*arguments)
    with pytest.raises(ValueError, match="words: expected a input channel below 4, got 200"):
        torch.ops.packedconv.conv2d(*arguments)
    words[0] = 0
    with pytest.raises(ValueError, match="words: expected finite nonzero FP16 values"):
        torch.ops.packedconv.conv2d(*arguments)


def test_tampered_offsets(packed, image):
    arguments = op_arguments(packed, image)
    arguments[2][0, 1] = 100000
    with pytest.raises(ValueError, match="offsets: expected"):
        torch.ops.packedconv.conv2d(*arguments)


def test_changes_that_are_not_counted_are_noticed(packed, image):
    with torch.inference_mode():
        arguments = list(op_arguments(packed, image))
        arguments[1], arguments[2] = arguments[1].clone(), arguments[2].clone()
        before = torch.ops.packedconv.conv2d(*arguments)
        assert torch.equal(torch.ops.packedconv.conv2d(*arguments), before)
        arguments[1][0] ^= 1 << 31
        assert not torch.equal(torch.ops.packedconv.conv2d(*arguments), before)


def test_words_of_another_type(packed, image):
    arguments = list(op_arguments(packed, image))
    arguments[1] = arguments[1].float()
    with pytest.raises(TypeError, match=r"words: expected int32, .* got torch.float32"):
        torch.ops.packedconv.conv2d(*arguments)


def test_memory_that_another_weight_takes_over(image):
    """Tensors made one after the other may get the same address."""
    for seed in range(20):
        packed = sparse_weight(6, 4, 3, 4, seed=seed)
        arguments = list(op_arguments(packed, image))
        expected = torch.ops.packedconv.conv2d(*arguments)
        arguments[1], arguments[2] = arguments[1].clone(), arguments[2].clone()
        assert torch.equal(torch.ops.packedconv.conv2d(*arguments), expected)


def test_packed_weights_are_not_kept_alive(image):
    packed = sparse_weight(6, 4, 3, 4, seed=99)
    torch.ops.packedconv.conv2d(*op_arguments(packed, image))
    gone = weakref.ref(packed)
    del packed
    gc.collect()
    assert gone() is None


def test_packed_weight_made_of_tensors_goes_with_them(packed, image, monkeypatch):
    """And with it what devices hold of it."""
    gc.collect()
    made, others = [], len(ops._known)
    monkeypatch.setattr(
        ops, "PackedWeight", lambda *parts: made.append(PackedWeight(*parts)) or made[-1]
    )
    arguments = list(op_arguments(packed, image))
    arguments[1], arguments[2] = arguments[1].clone(), arguments[2].clone()
    torch.ops.packedconv.conv2d(*arguments)
    gone = weakref.ref(made.pop())
    gc.collect()
    assert gone() is not None
    # A view holds the memory, and the weight is found again by it.
    arguments[1] = arguments[1][:]
    torch.ops.packedconv.conv2d(*arguments)
    assert not made
    assert len(ops._known) == others + 1
    del arguments
    gc.collect()
    assert gone() is None
    assert len(ops._known) == others


@pytest.mark.parametrize("part", [1, 2])
def test_entry_goes_with_either_tensor(packed, image, part):
    gc.collect()
    others = len(ops._known)
    arguments = list(op_arguments(packed, image))
    arguments[1], arguments[2] = arguments[1].clone(), arguments[2].clone()
    torch.ops.packedconv.conv2d(*arguments)
    assert len(ops._known) == others + 1
    arguments[part] = None
    gc.collect()
    assert len(ops._known) == others


def test_what_graphs_captured_lives_as_long_as_the_tensors(packed, image):
    arguments = list(op_arguments(packed, image))
    words, offsets = arguments[1].clone(), arguments[2].clone()
    torch.ops.packedconv.conv2d(image, words, offsets, *arguments[3:])
    made = ops._packed_weight(words, offsets, packed.shape)
    for _ in range(2):
        ops._keep_captured(made, words, offsets)
    [known] = [known for known in ops._known.values() if known.captured]
    assert known.captured == [made]
    gone = weakref.ref(made)
    del made, known
    # The graph goes on with the weight that it captured.
    words[0] ^= 1 << 31
    torch.ops.packedconv.conv2d(image, words, offsets, *arguments[3:])
    gc.collect()
    assert gone() is not None
    del words
    gc.collect()
    assert gone() is None


def test_changes_leave_no_entries_behind(packed, image):
    arguments = list(op_arguments(packed, image))
    with torch.inference_mode():
        arguments[1], arguments[2] = arguments[1].clone(), arguments[2].clone()
        torch.ops.packedconv.conv2d(*arguments)
        entries, ends = len(ops._known), len(weakref.finalize._registry)
        for _ in range(5):
            torch.ops.packedconv.conv2d(*arguments)
    assert (len(ops._known), len(weakref.finalize._registry)) == (entries, ends)


def test_every_layer_of_a_deep_network_is_checked_once(packed, image, packed_weights_made):
    gc.collect()
    others = len(ops._known)
    arguments = list(op_arguments(packed, image))
    copies = [(arguments[1].clone(), arguments[2].clone()) for _ in range(150)]
    for _ in range(3):
        for arguments[1], arguments[2] in copies:
            torch.ops.packedconv.conv2d(*arguments)
    assert len(packed_weights_made) == 150
    assert len(ops._known) == others + 150
    del arguments, copies
    gc.collect()
    assert len(ops._known) == others


def test_loaded_deep_network_checks_its_weights_once(packed_weights_made):
    layers = [SparseConv2d(sparse_weight(2, 2, 3, 3, seed=seed), padding=1) for seed in range(66)]
    network, image = torch.nn.Sequential(*layers).eval(), random_tensor(1, 2, 3, 3)
    _, loaded = exported_and_loaded(network, (image,))
    packed_weights_made.clear()
    for _ in range(3):
        assert torch.equal(loaded(image), network(image))
    assert len(packed_weights_made) == 66


# Arguments of the op that conv2d would not have passed.

REFUSED = [
    ({"input": random_tensor(2, 4, 9, 11).half()}, TypeError, "input: expected float32, got .*16"),
    ({"input": random_tensor(2, 4, 9, 11).double()}, TypeError, "input: expected float32"),
    ({"input": torch.zeros(2, 4, 9, 11, dtype=torch.int8)}, TypeError, "input: expected float32"),
    ({"input": random_tensor(9, 11)}, ValueError, r"input: expected \(N, IC, H, W\) or"),
    ({"input": random_tensor(1, 2, 4, 9, 11)}, ValueError, r"input: expected \(N, IC, H, W\) or"),
    ({"input": random_tensor(2, 5, 9, 11)}, ValueError, "input: expected 4 channels .* got 5"),
    ({"input": random_tensor(4, 9, 1)}, ValueError, "input: expected a padded width"),
    ({"stride": [0, 1]}, ValueError, "stride: expected at least 1"),
    ({"stride": [1, 1, 1]}, TypeError, "stride: expected an int or a pair"),
    ({"dilation": [1, 0]}, ValueError, "dilation: expected at least 1"),
    ({"dilation": []}, TypeError, "dilation: expected an int or a pair"),
    ({"before": [-1, 0]}, ValueError, "padding before: expected at least 0"),
    ({"after": [0, -1]}, ValueError, "padding after: expected at least 0"),
    ({"groups": 0}, ValueError, "groups: expected a divisor"),
    ({"groups": 2}, ValueError, "input: expected 8 channels"),
    ({"weight_shape": [6, 4, 3]}, ValueError, "weight: expected 4 axes"),
    ({"weight_shape": [6, 0, 3, 4]}, ValueError, "weight: expected every axis at least 1"),
    ({"bias": random_tensor(6).half()}, TypeError, "bias: expected float32"),
    ({"bias": random_tensor(5)}, ValueError, r"bias: expected shape \(6,\), got \(5,\)"),
    ({"bias": random_tensor(1, 6)}, ValueError, r"bias: expected shape \(6,\), got \(1, 6\)"),
    ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias: expected a tensor on cpu, .*meta"),
    ({"words": torch.zeros(9)}, TypeError, "words: expected int32"),
    ({"offsets": torch.zeros(9, dtype=torch.int64)}, TypeError, "offsets: expected int32"),
]
OP_ARGUMENTS = [
    *("input", "words", "offsets", "weight_shape", "bias", "stride", "before", "after"),
    *("dilation", "groups", "relu"),
]


@pytest.mark.parametrize("fake", [False, True], ids=["computed", "described"])
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused_by_the_op(packed, image, changes, error, message, fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = {**dict(zip(OP_ARGUMENTS, op_arguments(packed, image))), **changes}
    # The computation itself, since the dispatcher has its own words for tensors on two devices.
    function = ops._describe if fake else ops._compute
    with pytest.raises(error, match=message):
        function(**arguments)
    if changes.get("bias") is not None and changes["bias"].device.type == "meta":
        return
    with FakeTensorMode() if fake else contextlib.nullcontext() as mode:
        if fake:
            arguments = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            }
        with pytest.raises(error, match=message):
            torch.ops.packedconv.conv2d(**arguments)


@pytest.mark.parametrize("name", ["input", "bias"])
def test_op_refuses_tensors_that_need_a_gradient(packed, image, name):
    arguments = dict(zip(OP_ARGUMENTS, op_arguments(packed, image, random_tensor(6))))
    expected = torch.ops.packedconv.conv2d(**arguments)
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: expected no gradient, .* {name}.detach"):
        torch.ops.packedconv.conv2d(**arguments)
    for no_gradient in (torch.no_grad, torch.inference_mode):
        with no_gradient():
            assert torch.equal(torch.ops.packedconv.conv2d(**arguments), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_exported_program_refuses_other_types(image, dtype):
    _, loaded = exported_and_loaded(SparseConv2d(sparse_weight(6, 4, 3, 4)), (image,))
    with torch.no_grad(), pytest.raises(TypeError, match="input: expected float32"):
        loaded(image.to(dtype))


def test_exported_program_refuses_an_input_that_needs_a_gradient(image):
    _, loaded = exported_and_loaded(SparseConv2d(sparse_weight(6, 4, 3, 4)), (image,))
    with pytest.raises(ValueError, match="input: expected no gradient"):
        loaded(image.clone().requires_grad_())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (random_tensor(2, 4, 9, 11).half(), "input: expected float32"),
        (random_tensor(2, 4, 9, 11).double(), "input: expected float32"),
        (random_tensor(9, 11), r"input: expected \(N, IC, H, W\)"),
        (random_tensor(2, 3, 9, 11), "input: expected 4 channels"),
    ],
)
def test_jit_trace_refuses_other_inputs(packed, image, other, message):
    traced = torch.jit.trace(lambda x: conv2d(x, packed), (image,))
    # TorchScript wraps the errors of what it calls.
    with pytest.raises(RuntimeError, match=message):
        traced(other)


# torch.compile


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_function(backend, packed, image):
    bias = random_tensor(6)

    def layer(x):
        return conv2d(x, packed, bias, padding=(1, 2), activation="relu") * 2

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(image), layer(image))
        assert torch.equal(compiled(image[0]), layer(image[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_network(backend, network, image):
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    with torch.inference_mode():
        # Inductor's own Softplus differs from PyTorch's in the last bit.
        tolerance = {"rtol": 0, "atol": 0 if backend != "inductor" else 1e-5}
        torch.testing.assert_close(compiled(image), network(image), **tolerance)


def test_compiled_graph_has_one_node_per_layer(network, image):
    calls = []
    compiled = torch.compile(network, fullgraph=True, backend=recorded(calls))
    with torch.no_grad():
        compiled(image)
    assert len(calls) == 1
    assert len(calls[0]) == 3
    assert calls[0][0] == calls[0][2]


def test_compiled_with_a_batch_that_changes(packed, image):
    calls = []
    compiled = torch.compile(
        lambda x: conv2d(x, packed, padding=1),
        fullgraph=True,
        dynamic=True,
        backend=recorded(calls),
    )
    for batch in (2, 3, 5, 7):
        images = random_tensor(batch, 4, 20 + batch, 11, seed=batch)
        assert torch.equal(compiled(images), conv2d(images, packed, padding=1))
    assert len(calls) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_out(backend, packed, image):
    def layer(x, out):
        return conv2d(x, packed, out=out)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    out = torch.full((2, 6, 7, 8), float("nan"))
    with torch.no_grad():
        result = compiled(image, out)
    assert torch.equal(out, conv2d(image, packed))
    assert torch.equal(result, out)


def test_compiled_calls_check_the_weight_never(packed, image, packed_weights_made):
    compiled = torch.compile(lambda x: conv2d(x, packed), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        compiled(image)
    assert not packed_weights_made


def test_layer_that_changes_after_compilation(image):
    layer = SparseConv2d(sparse_weight(6, 4, 3, 4))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(image)
    layer.load_state_dict(SparseConv2d(sparse_weight(6, 4, 3, 4, seed=5)).state_dict())
    assert torch.equal(compiled(image), layer(image))
    assert torch.equal(layer(image), conv2d(image, sparse_weight(6, 4, 3, 4, seed=5)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": random_tensor(2, 3, 9, 11)}, "input: expected 4 channels"),
        ({"input": random_tensor(2, 4, 2, 11)}, "input: expected a padded height"),
        ({"input": random_tensor(9, 11)}, "input: expected"),
        ({"input": random_tensor(2, 4, 9, 11).double()}, "input: expected float32"),
        ({"bias": random_tensor(5)}, r"bias: expected shape \(6,\), got \(5,\)"),
        ({"out": random_tensor(5)}, r"out: expected shape \(2, 6, 7, 8\), got \(5,\)"),
        ({"activation": "gelu"}, "activation: expected None"),
        ({"stride": 0}, "stride: expected at least 1"),
    ],
)
def test_refused_while_tracing(packed, image, changes, message):
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = {"input": image, "packed": packed, **changes}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        with pytest.raises((TypeError, ValueError), match=message):
            conv2d(**fake)


# torch.export


def exported_and_loaded(module, arguments, **options):
    with torch.no_grad():
        program = torch.export.export(module, arguments, **options)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return program, torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("run_before", [False, True])
def test_exported_network(strict, run_before, network, image):
    if run_before:
        network(image)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program, loaded = exported_and_loaded(network, (image,), strict=strict, dynamic_shapes=shapes)
    calls = graph_calls(program.graph)
    # The weights are constants of the program, and not copied in its graph.
    assert calls == ["packedconv.conv2d.default", calls[1], "packedconv.conv2d.default"]
    assert len(program.constants) == 4
    with torch.no_grad():
        for batch in (2, 1, 5):
            images = random_tensor(batch, 4, 9, 11, seed=batch)
            assert torch.equal(loaded(images), network(images))


def test_exported_program_checks_the_weight_once(image, packed_weights_made):
    layer = SparseConv2d(sparse_weight(6, 4, 3, 4))
    _, loaded = exported_and_loaded(layer, (image,))
    packed_weights_made.clear()
    for _ in range(3):
        loaded(image)
    assert len(packed_weights_made) == 1


def test_exported_program_with_a_damaged_weight(image):
    program, _ = exported_and_loaded(SparseConv2d(sparse_weight(6, 4, 3, 4)), (image,))
    words = next(value for value in program.constants.values() if value.dim() == 1)
    words[3] = -1
    with pytest.raises(ValueError, match="words: expected"):
        program.module()(image)


# Other tracers.


def test_description_of_the_result(packed):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for device in ("cpu", "cuda:0"):
            image = torch.empty(2, 4, 9, 11, device=device)
            result = conv2d(image, packed, stride=2, padding=1)
            assert (result.shape, str(result.device)) == ((2, 6, 5, 5), device)
        assert conv2d(torch.empty(4, 9, 11), packed).shape == (6, 7, 8)
    image = FakeTensorMode().from_tensor(torch.zeros(2, 4, 9, 11))
    assert conv2d(image, packed).shape == (2, 6, 7, 8)


def test_other_recorders_keep_the_call(packed, image):
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: conv2d(x, packed))(image)
    other = random_tensor(2, 4, 9, 11, seed=3)
    assert torch.equal(traced(other), conv2d(other, packed))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_keeps_the_call(packed, image):
    traced = torch.jit.trace(lambda x: conv2d(x, packed), (image,))
    other = random_tensor(2, 4, 9, 11, seed=3)
    assert torch.equal(traced(other), conv2d(other, packed))


def test_without_custom_ops(packed, image, monkeypatch):
    """On torch before 2.4 nothing is registered, and calls go straight to the kernel."""
    monkeypatch.setattr(ops, "SUPPORTED", False)
    assert not ops.is_traced(image)
    assert conv2d(image, packed).shape == (2, 6, 7, 8)


def test_calls_that_nothing_traces_go_straight_to_the_kernel(packed, image, monkeypatch):
    monkeypatch.setattr(ops, "conv2d", None)
    assert conv2d(image, packed).shape == (2, 6, 7, 8)


def test_importing_stays_quick():
    """The tracer is loaded by those who trace."""
    script = "import sys, packedconv.conv; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_equality_and_copies_ignore_the_tensors(packed):
    other = PackedWeight(packed.words, packed.offsets, packed.shape)
    ops._tensors(packed, torch.device("cpu"))
    assert other == packed
    copied = pickle.loads(pickle.dumps(packed))
    assert copied == packed
    assert not copied._derived
