from typing import Any, Dict, List, Sequence

import numpy as np

def conv2d(
    input: int,
    input_shape: Sequence[int],
    input_strides: Sequence[int],
    words: np.ndarray,
    offsets: np.ndarray,
    kernel: Sequence[int],
    bias: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    relu: bool,
    output: int,
    output_shape: Sequence[int],
    output_strides: Sequence[int],
    threads: int,
) -> None: ...
def fma_peak(threads: int, seconds: float) -> float: ...
def copy_bandwidth(threads: int, bytes: int, repeats: int) -> float: ...
def keep_freed_memory() -> bool: ...
def isa() -> str: ...
def isas() -> List[str]: ...
def build_info() -> Dict[str, Any]: ...
def gpus() -> List[Dict[str, Any]]: ...
def mapping_config() -> Dict[str, Any]: ...
