"""Words and offsets that were changed after packing, and what the error about each says."""

import typing

import numpy as np

TAMPERED = {
    "channel": "an input channel below",
    "px": "a kernel column px below",
    "py": "a kernel row py below",
    "zero": "finite value other than zero",
    "infinity": "finite value other than zero",
    "order": "in the order of",
    "twice": "in the order of",
    "offsets fall": "never fall",
    "offsets beyond the words": "number of words",
    "huge offset": "never fall",
    "first offset": "offset 0",
    "too few offsets": "expected offsets",
    "too few words": "number of words",
    "another block": "blocks of 256 input channels",
}


def tampered(
    words: np.ndarray, offsets: np.ndarray, name: str
) -> typing.Tuple[np.ndarray, np.ndarray]:
    """Copies with the fault `name` of TAMPERED; offsets (blocks, OC + 1), OC at least 2."""
    words, offsets = words.copy(), offsets.copy()
    middle = len(words) // 2
    if name == "channel":
        words[-1] |= 0xFF00
    elif name == "px":
        words[middle] |= 0xF0
    elif name == "py":
        words[middle] |= 0xF
    elif name == "zero":
        words[0] &= 0xFFFF
    elif name == "infinity":
        words[0] = words[0] & 0xFFFF | 0x7C000000
    elif name == "order":
        words[:2] = words[1::-1]
    elif name == "twice":
        words[1] = words[0]
    elif name == "offsets fall":
        offsets[0, 1] = offsets[0, 2] + 1
    elif name == "offsets beyond the words":
        offsets[-1, -1] += 1
    elif name == "huge offset":
        offsets[0, 1] = 0xFFFFFFFF
    elif name == "first offset":
        offsets[0, 0] = 1
    elif name == "too few offsets":
        offsets = offsets[:, :-1]
    elif name == "too few words":
        words = words[:middle]
    elif name == "another block":
        offsets = np.concatenate([offsets, offsets])
    else:
        raise ValueError(f"expected one of {', '.join(TAMPERED)}, got {name}")
    return words, np.ascontiguousarray(offsets)
