"""The rows of numerics.csv: their columns, and the names in them.

A row compares what an `implementation` computes from weights as they are `stored` with a
`reference`, which has the weights of `reference_weights`: the same ones ("stored"), or those
before rounding ("original"). largest_output is the largest |y| in float64 with these.
"""

COLUMNS = (
    *("device", "run", "layer", "in_channels", "out_channels", "height", "width"),
    *("sparsity", "nonzeros", "input_distribution", "weight_distribution"),
    *("implementation", "stored", "reference", "reference_weights"),
    *("max_abs_error", "largest_output"),
)
TEXT = (
    *("device", "run", "layer", "input_distribution", "weight_distribution"),
    *("implementation", "stored", "reference", "reference_weights"),
)

# What a dense baseline may have been: PyTorch's own, and three that are emulated.
BASELINES = ("dense", "winograd2", "winograd4", "tf32")
# How a weight may be stored.
STORED = ("fp16", "bf16", "fp32")

Comparison = tuple[str, str, str, str]

# implementation, stored, reference, reference_weights. word_order sums one product after the
# other in FP32, in the order of the packed words.
QUANTISATION = [("float64", stored, "float64", "original") for stored in ("fp16", "bf16")]
SUMMATION = [(name, "fp16", "float64", "stored") for name in ("sparse", "dense")]
DENSE = [(name, "fp32", "float64", "original") for name in BASELINES]
WHOLE = [
    ("sparse", "fp16", "float64", "original"),
    *(("word_order", stored, "float64", "original") for stored in STORED),
]
# Figure 8 with each baseline, in both readings.
FIGURE_8 = [
    ("sparse", "fp16", name, weights) for name in BASELINES for weights in ("stored", "original")
]
COMPARISONS: list[Comparison] = [*QUANTISATION, *SUMMATION, *DENSE, *WHOLE, *FIGURE_8]
