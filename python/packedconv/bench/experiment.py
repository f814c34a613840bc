"""What is measured of one layer beside the paper's: contenders, protocol, environment."""

import json
import typing

from packedconv.layer import Layer, sparsity_key
from packedconv.settings import layer_of, protocol_of

# What a table of layers may time: the sparse convolution on all threads, the fastest of
# PyTorch's dense layouts, the sparse one on one thread, with bias and ReLU, and of an input
# scaled by SUBNORMAL_SCALE.
CONTENDERS = ("sparse", "dense", "sparse_one_thread", "sparse_bias_relu", "sparse_subnormal")
# Makes any input below 100 subnormal.
SUBNORMAL_SCALE = 1e-40

_KEYS = {
    *("layer", "skewed", "sparsities", "contenders", "environment", "protocol", "repeats"),
    *("widest_spread", "set_bytes"),
}


class Experiment(typing.NamedTuple):
    """One layer, measured in a process of its own.

    contenders: of CONTENDERS; none where what measures it has its own.
    skewed: its weights are those of `weights.make_skewed_weight`. environment: variables that the
    process needs. protocol: as in the settings. A point whose rounds spread by more than
    `widest_spread` is repeated `repeats` times at most. set_bytes: the most that inputs and
    outputs take, which are rotated; None for warm caches.
    """

    layer: Layer
    skewed: bool
    sparsities: typing.List[float]
    contenders: typing.List[str]
    environment: typing.Dict[str, str]
    protocol: typing.Dict[str, int]
    repeats: int
    widest_spread: float
    set_bytes: typing.Optional[int]

    def record(self) -> typing.Dict[str, typing.Any]:
        """As JSON keeps it."""
        return dict(self._asdict(), layer=dict(self.layer._asdict()))


def load_experiment(text: str) -> Experiment:
    """The experiment that JSON text describes. Raises ValueError that names what is wrong."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"experiment: expected JSON, got {text!r}: {error}") from error
    if not isinstance(record, dict) or set(record) != _KEYS:
        found = sorted(record) if isinstance(record, dict) else record
        raise ValueError(f"experiment: expected the keys {sorted(_KEYS)}, got {found}")
    for sparsity in record["sparsities"]:
        sparsity_key(sparsity)
    unknown = set(record["contenders"]) - set(CONTENDERS)
    if unknown or (record["contenders"] and "sparse" not in record["contenders"]):
        raise ValueError(
            f"experiment: contenders: expected sparse and others of {', '.join(CONTENDERS)}, or "
            f"none, got {record['contenders']}"
        )
    if not isinstance(record["skewed"], bool):
        raise ValueError(f"experiment: skewed: expected true or false, got {record['skewed']!r}")
    return Experiment(
        **dict(record, layer=layer_of(record["layer"]), protocol=protocol_of(record["protocol"]))
    )
