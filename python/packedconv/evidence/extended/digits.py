"""The digits network: its accuracy dense, pruned, and through packedconv."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from packedconv.evidence.samples import file_error, load_json
from packedconv.evidence.statistics import RESAMPLES, SEED, interval
from packedconv.settings import load_settings, settings_hash

COLUMNS = [
    *("sparsity", "computed_by", "nonzeros", "weights", "dense_bytes", "packed_bytes"),
    *("images", "right", "accuracy", "loss", "loss_low", "loss_high", "within"),
    *("other_classes", "largest_difference", "largest_output", "error_of_packed"),
]
COMPUTED_BY = {"dense": "PyTorch", "packed": "packedconv"}
# Points of accuracy that pruning may cost.
THRESHOLD = 1.0

Facts = dict[str, Any]


def load_digits_facts(folder: str | Path, path: str | Path) -> Facts:
    """The facts of the network, which belong to the settings of results/<device>/<run>/.

    Raises FileNotFoundError or ValueError when a file is missing, cut or of other settings.
    """
    settings = load_settings(str(Path(folder) / "settings.json"))
    facts = load_json(Path(path), ("settings_hash", "labels", "stages", "training"))
    if facts["settings_hash"] != settings_hash(settings):
        raise file_error(
            Path(path),
            "settings_hash",
            "that of settings.json",
            json.dumps(facts["settings_hash"]),
            f"delete {path} and train again",
        )
    return facts


def digits(facts: Facts) -> pd.DataFrame:
    """One row per sparsity and what computes the convolutions, with `COLUMNS`.

    nonzeros, weights, dense_bytes (FP32), packed_bytes: of all convolutions. accuracy: share of
    held-out images whose class is right. loss: points of accuracy below the unpruned network in
    PyTorch, with its 95 % interval from resampling the images, the same ones for both. within:
    whether that is at most `THRESHOLD`; "inconclusive" where the interval holds it.
    other_classes: images with another class than the same network has in PyTorch.
    largest_difference, largest_output: of all outputs, to PyTorch's; error_of_packed: largest
    difference to float64 with the packed weights, relative to the largest output.
    """
    labels = np.array(facts["labels"])
    shapes = {name: found["shape"] for name, found in facts["convolutions"].items()}
    weights = sum(int(np.prod(shape)) for shape in shapes.values())
    stages = sorted(facts["stages"].values(), key=lambda stage: stage["sparsity"])
    unpruned = np.array(stages[0]["classes"]["dense"]) == labels
    rows = []
    for stage in stages:
        for way, title in COMPUTED_BY.items():
            classes = np.array(stage["classes"][way])
            right = classes == labels
            loss = resampled_loss(unpruned, right)
            low, high = interval(loss)
            row = {
                "sparsity": stage["sparsity"],
                "computed_by": title,
                "nonzeros": sum(stage["nonzeros"].values()),
                "weights": weights,
                "dense_bytes": 4 * weights,
                "images": len(labels),
                "right": int(right.sum()),
                "accuracy": right.mean(),
                "loss": loss[0],
                "loss_low": low,
                "loss_high": high,
                "within": verdict(low, high),
            }
            if way == "packed":
                row |= {
                    "packed_bytes": sum(stage["packed_bytes"].values()),
                    "other_classes": int((classes != np.array(stage["classes"]["dense"])).sum()),
                    "largest_difference": stage["largest_difference"],
                    "largest_output": stage["largest_output"],
                    "error_of_packed": stage["error_of_packed"],
                }
            rows.append(row)
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype(dict.fromkeys(("packed_bytes", "other_classes"), "Int64"))


def resampled_loss(unpruned: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Points of accuracy lost, then those of RESAMPLES resamples of the images.

    unpruned, right: whether an image is classified right, shape (n,). Shape (1 + RESAMPLES,).
    """
    lost = 100 * (unpruned.astype(float) - right)
    chosen = np.random.default_rng(SEED).integers(len(lost), size=(RESAMPLES, len(lost)))
    return np.concatenate([[lost.mean()], lost[chosen].mean(axis=1)])


def verdict(low: float, high: float) -> str:
    """Whether an interval of the loss lies within `THRESHOLD`."""
    if high <= THRESHOLD:
        return "yes"
    return "no" if low > THRESHOLD else "inconclusive"


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """What a reader sees."""
    return pd.DataFrame(
        {
            "S": [f"{value:.2f}" for value in table["sparsity"]],
            "Convolutions by": table["computed_by"],
            "Nonzeros": [f"{row.nonzeros} of {row.weights}" for row in table.itertuples()],
            "kB": [
                f"{value / 1e3:.0f}" for value in table["packed_bytes"].fillna(table["dense_bytes"])
            ],
            "Right": [f"{row.right} of {row.images}" for row in table.itertuples()],
            "Accuracy (%)": [f"{100 * value:.2f}" for value in table["accuracy"]],
            "Loss (points)": [
                f"{row.loss:.2f} [{row.loss_low:.2f}, {row.loss_high:.2f}]"
                for row in table.itertuples()
            ],
            f"Within {THRESHOLD:g} point": table["within"],
            "Other classes": [
                "" if pd.isna(value) else str(value) for value in table["other_classes"]
            ],
        }
    )


def preamble(facts: Facts) -> str:
    """What the network is, and how it was trained and pruned."""
    training, epochs = facts["training"], facts["training"]["epochs"]
    convolutions = facts["convolutions"]
    shapes = [f"{found['shape'][1]} to {found['shape'][0]}" for found in convolutions.values()]
    size = training["image_size"]
    counts = {name: int(np.prod(found["shape"])) for name, found in convolutions.items()}
    pruned = [name for name, found in convolutions.items() if found["pruned"]]
    first, total = sum(counts[name] for name in counts if name not in pruned), sum(counts.values())
    return (
        f"{facts['machine']['cpu']} (device {facts['device']}, run {facts['run']}), one thread, "
        f"PyTorch {facts['machine']['torch']}, seed {facts['seed']}. scikit-learn's digits, "
        f"enlarged from 8 × 8 to {size} × {size}: {facts['images']['training']} images for "
        f"training, {facts['images']['held_out']} held out, the same ones in every run. 3 × 3 "
        f"convolutions of {', '.join(shapes)} channels, each with batch normalisation and ReLU, "
        "the mean of each channel, and a linear layer.\n\n"
        f"Trained for {epochs['dense']} epochs; then for each sparsity in turn {', '.join(pruned)} "
        "are pruned to exactly that, each by itself, the weights of smallest magnitude, along the "
        f"cubic schedule of Zhu and Gupta (2017) over {epochs['pruning']} epochs, and trained for "
        f"{epochs['fine_tuning']} more. The first convolution, {first} of {total} weights, is not "
        "pruned, nor is the linear layer; packedconv computes all convolutions. "
        "Training never sees the held-out images."
    )


def notes(table: pd.DataFrame) -> list[str]:
    """What the columns are, and how far packedconv is from PyTorch."""
    packed = table[table["computed_by"] == COMPUTED_BY["packed"]]
    differences = [
        f"{row.largest_difference:.2g} at S {row.sparsity:.2f} (largest output "
        f"{row.largest_output:.3g})"
        for row in packed.itertuples()
    ]
    return [
        "loss: points of accuracy below the unpruned network in PyTorch; in brackets its 95 % "
        "interval from resampling the held-out images, the same for both; within: inconclusive "
        f"where that holds {THRESHOLD:g}",
        "packedconv: every convolution is SparseConv2d.from_dense of PyTorch's, which rounds "
        "weights to FP16; other classes: images with another class than the same network has in "
        "PyTorch; kB: the weights of all convolutions, in FP32 or packed",
        f"largest difference of an output to PyTorch's: {'; '.join(differences)}; to float64 with "
        f"the packed weights at most {packed['error_of_packed'].max():.1g} of the largest output",
    ]
