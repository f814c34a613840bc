"""The small sparse weight and image of the drawings (figures 1 and 4), made with a fixed seed."""

import numpy as np

from packedconv.layer import Layer
from packedconv.weights import make_input, make_weight

EXAMPLE = Layer(
    name="example", batch=1, in_channels=3, out_channels=2, height=5, width=5, kernel_size=3
)
SPARSITY = 0.72
SEED = 6


def example_weight(seed: int = SEED) -> np.ndarray:
    """The weight of EXAMPLE, float32 (OC, IC, K, K), made as the workflow makes weights."""
    return make_weight(EXAMPLE, SPARSITY, seed)


def example_image(seed: int = SEED) -> np.ndarray:
    """An image for EXAMPLE, float32 (IC, H, W), of the whole numbers 0 to 4."""
    return np.floor(5 * make_input(EXAMPLE, seed)[0])


def convolve(image: np.ndarray, weight: np.ndarray, padding: int) -> np.ndarray:
    """Equation 3 at stride 1: the output (OC, H_out, W_out), nonzero weights only, float64."""
    out_channels, _, kernel_height, kernel_width = weight.shape
    padded = np.pad(image.astype(np.float64), ((0, 0), (padding, padding), (padding, padding)))
    height = padded.shape[1] - kernel_height + 1
    width = padded.shape[2] - kernel_width + 1
    output = np.zeros((out_channels, height, width))
    for oc, ic, py, px in zip(*np.nonzero(weight)):
        value = float(weight[oc, ic, py, px])
        output[oc] += value * padded[ic, py : py + height, px : px + width]
    return output
