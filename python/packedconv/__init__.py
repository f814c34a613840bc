"""Direct convolution with packed sparse weights.

An independent implementation, from the paper's text, of "Theoretical and Empirical Analysis
of Sparse Convolution" (Tuteja et al., 2026); the authors' own code was not available to it.

    packed = packedconv.pack(weight)          # float32 (OC, IC/groups, Kh, Kw), mostly zeros
    y = packedconv.conv2d(x, packed, padding=1)
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from packedconv.advice import Advice, advise
    from packedconv.calibration import Calibration
    from packedconv.conv import conv2d
    from packedconv.device import devices
    from packedconv.module import SparseConv2d
    from packedconv.packed import PackedWeight, PackWarning, pack
    from packedconv.plan import CpuPlan
    from packedconv.probes import calibrate

__version__ = "0.1.0"

# Where each public name lives. Resolved on first use, so that rendering a figure, which
# needs the package but no kernel, does not import torch.
_HOMES = {
    "PackedWeight": "packedconv.packed",
    "PackWarning": "packedconv.packed",
    "pack": "packedconv.packed",
    "conv2d": "packedconv.conv",
    "SparseConv2d": "packedconv.module",
    "devices": "packedconv.device",
    "CpuPlan": "packedconv.plan",
    "Advice": "packedconv.advice",
    "advise": "packedconv.advice",
    "Calibration": "packedconv.calibration",
    "calibrate": "packedconv.probes",
}

__all__ = [
    "Advice",
    "Calibration",
    "CpuPlan",
    "PackWarning",
    "PackedWeight",
    "SparseConv2d",
    "advise",
    "calibrate",
    "conv2d",
    "devices",
    "pack",
]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'packedconv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(list(globals()) + list(_HOMES))


if sys.version_info < (3, 7):  # which has no module-level __getattr__
    for _name in _HOMES:
        __getattr__(_name)
