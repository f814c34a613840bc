"""A small network on scikit-learn's digits: trained, pruned, and run through packedconv."""

import contextlib
import copy
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from packedconv import PackWarning
from packedconv.bench.extended.pruning import Pruner, scheduled_sparsity
from packedconv.layer import nonzero_count, sparsity_key
from packedconv.module import SparseConv2d
from packedconv.script import CheckError

# The split of the images, whatever the run's seed is.
SPLIT_SEED = 0
# Of the outputs through packedconv, relative to the largest, against float64.
TOLERANCE = 1e-5
_WEIGHT_DECAY = 1e-2

Facts = dict[str, Any]


class Images(NamedTuple):
    """Images (n, 1, H, W), float32 on [0, 1], and their classes (n,), int64."""

    images: torch.Tensor
    labels: torch.Tensor


class Phase(NamedTuple):
    """A part of the training: from one sparsity to another, and on at that one."""

    begin: float
    end: float
    pruning_epochs: int
    epochs: int


def load_images(size: int, held_out_share: float) -> tuple[Images, Images]:
    """The digits, enlarged from 8 x 8 to `size` (bilinear): for training, and held out.

    Raises ValueError without scikit-learn, which brings them.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ValueError(
            "digits: expected scikit-learn, which brings the images, got none; install it: "
            "pip install -r envs/requirements.lock"
        ) from error
    found = load_digits()
    images = torch.from_numpy((found.images / 16).astype(np.float32)).unsqueeze(1)
    images = torch.nn.functional.interpolate(
        images, size=size, mode="bilinear", align_corners=False
    )
    labels = torch.from_numpy(found.target.astype(np.int64))
    chosen = train_test_split(
        np.arange(len(labels)),
        test_size=held_out_share,
        stratify=found.target,
        random_state=SPLIT_SEED,
    )
    training, held_out = (Images(images[part], labels[part]) for part in chosen)
    return training, held_out


def make_network(channels: list[int]) -> torch.nn.Sequential:
    """3 x 3 convolutions of so many output channels, conv1 and on, each with batch normalisation
    and ReLU, the first two with a maximum over 2 x 2; the mean of each channel, a linear layer."""
    modules: OrderedDict[str, torch.nn.Module] = OrderedDict()
    before = 1
    for number, count in enumerate(channels, 1):
        convolution = torch.nn.Conv2d(before, count, 3, padding=1)
        torch.nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        torch.nn.init.zeros_(convolution.bias)
        modules[f"conv{number}"] = convolution
        modules[f"norm{number}"] = torch.nn.BatchNorm2d(count)
        modules[f"relu{number}"] = torch.nn.ReLU()
        if number <= 2:
            modules[f"pool{number}"] = torch.nn.MaxPool2d(2)
        before = count
    modules["mean"] = torch.nn.AdaptiveAvgPool2d(1)
    modules["flatten"] = torch.nn.Flatten()
    modules["linear"] = torch.nn.Linear(before, 10)
    return torch.nn.Sequential(modules)


def convolutions(network: torch.nn.Sequential) -> dict[str, torch.nn.Conv2d]:
    """The convolutions of a network by name."""
    return {
        name: module
        for name, module in network.named_children()
        if isinstance(module, torch.nn.Conv2d)
    }


def prunable(network: torch.nn.Sequential) -> dict[str, torch.nn.Conv2d]:
    """The convolutions that are pruned: all but the first, which has few weights."""
    return dict(list(convolutions(network).items())[1:])


def train(
    network: torch.nn.Sequential,
    training: Images,
    phase: Phase,
    batch: int,
    learning_rate: float,
    pruner: Pruner,
) -> None:
    """One phase: AdamW, a learning rate that falls along a cosine, batches in a drawn order."""
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=learning_rate, weight_decay=_WEIGHT_DECAY
    )
    batches = len(training.labels) // batch
    network.train()
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, phase.epochs * batches)
    for step in range(phase.epochs * batches):
        if step % batches == 0:
            order = torch.randperm(len(training.labels))
        place = step % batches * batch
        chosen = order[place : place + batch]
        loss = torch.nn.functional.cross_entropy(
            network(training.images[chosen]), training.labels[chosen]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falling.step()
        # Past the end of the schedule nothing is pruned anew.
        if phase.end > 0 and step < phase.pruning_epochs * batches:
            progress = (step + 1) / (phase.pruning_epochs * batches)
            pruner.prune(scheduled_sparsity(phase.begin, phase.end, progress))
        else:
            pruner.apply()


def packed_network(network: torch.nn.Sequential) -> torch.nn.Sequential:
    """The same network with its convolutions computed by packedconv."""
    packed = copy.deepcopy(network)
    with warnings.catch_warnings():
        # Of weights that FP16 makes subnormal or zero: they are counted in the facts.
        warnings.simplefilter("ignore", PackWarning)
        for name, convolution in convolutions(packed).items():
            setattr(packed, name, SparseConv2d.from_dense(convolution))
    return packed


def measure(training_settings: dict[str, Any], seed: int) -> tuple[dict[str, np.ndarray], Facts]:
    """Train, prune to each sparsity in turn, and run all through PyTorch and packedconv.

    training_settings: section `digits` of config/extended.yaml. Returns the pruned weights by
    "<convolution>_<sparsity key>", float32 (OC, IC, K, K), and the facts.
    On one thread, and the same on every call on one machine.
    Raises CheckError where packedconv computes wrongly, or a number of nonzeros is not exact.
    """
    begin = time.perf_counter()
    epochs, sparsities = training_settings["epochs"], training_settings["sparsities"]
    with _deterministic(seed):
        training, held_out = load_images(
            training_settings["image_size"], training_settings["held_out_share"]
        )
        network = make_network(training_settings["channels"])
        pruner = Pruner(prunable(network))
        weights: dict[str, np.ndarray] = {}
        stages, before = {}, 0.0
        for sparsity in [0.0, *sparsities]:
            phase = Phase(before, sparsity, 0, epochs["dense"])
            if sparsity > 0:
                phase = Phase(
                    before, sparsity, epochs["pruning"], epochs["pruning"] + epochs["fine_tuning"]
                )
            rate = training_settings["learning_rate"]
            train(network, training, phase, training_settings["batch"], rate, pruner)
            key, before = sparsity_key(sparsity), sparsity
            found = dict.fromkeys(prunable(network), sparsity) if sparsity > 0 else {}
            stages[key] = {"sparsity": sparsity, **evaluate(network, found, held_out.images)}
            for name in found:
                weight = convolutions(network)[name].weight
                weights[f"{name}_{key}"] = weight.detach().numpy().copy()
    facts = {
        "training": training_settings,
        "seed": seed,
        "images": {"training": len(training.labels), "held_out": len(held_out.labels)},
        "labels": held_out.labels.tolist(),
        "convolutions": {
            name: {"shape": list(convolution.weight.shape), "pruned": name in prunable(network)}
            for name, convolution in convolutions(network).items()
        },
        "stages": stages,
        "training_seconds": time.perf_counter() - begin,
    }
    return weights, facts


@torch.inference_mode()
def evaluate(
    network: torch.nn.Sequential, sparsities: dict[str, float], images: torch.Tensor
) -> Facts:
    """Classes of images by PyTorch and through packedconv, and what the packed weights are.

    sparsities: of the convolutions that were pruned. Raises as `measure`.
    """
    network.eval()
    packed = packed_network(network)
    exact = copy.deepcopy(network).double()
    nonzeros, packed_bytes, subnormals = {}, {}, {}
    for name, convolution in convolutions(network).items():
        weight = getattr(packed, name).packed
        nonzeros[name], packed_bytes[name] = weight.nnz, weight.nbytes
        subnormals[name] = weight.subnormals
        # Of an unpruned layer's many weights one may be so small that FP16 makes it zero.
        if name in sparsities:
            expected = nonzero_count(convolution.weight.numel(), sparsities[name])
            if weight.nnz != expected:
                raise CheckError(
                    f"digits: {name} at sparsity {sparsities[name]:g}: expected {expected} "
                    f"nonzeros, got {weight.nnz}; a weight rounds to zero in FP16: change the "
                    "training"
                )
        getattr(exact, name).weight.copy_(weight.unpack())
    outputs, through = network(images), packed(images)
    reference = exact(images.double())
    error = float((through.double() - reference).abs().max() / reference.abs().max())
    if not error <= TOLERANCE:
        raise CheckError(
            f"digits: pruned to {sparsities or 'nothing'}: expected outputs through packedconv "
            f"within {TOLERANCE:g} of float64's, relative to the largest, got {error:.3g}; the "
            "kernel is wrong on this machine: build again, and report this message if it stays"
        )
    return {
        "classes": {
            "dense": outputs.argmax(1).tolist(),
            "packed": through.argmax(1).tolist(),
        },
        "error_of_packed": error,
        "largest_difference": float((through - outputs).abs().max()),
        "largest_output": float(outputs.abs().max()),
        "nonzeros": nonzeros,
        "packed_bytes": packed_bytes,
        "subnormal_weights": subnormals,
    }


@contextlib.contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """The same numbers on every call while the block runs, on one thread, since how sums are
    shared out depends on the number; what is global is as before after it."""
    asked, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(asked)
            torch.set_num_threads(threads)
