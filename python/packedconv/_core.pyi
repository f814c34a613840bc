from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

class CpuPlan:
    def __init__(
        self,
        input_shape: Sequence[int],
        output_shape: Sequence[int],
        words: np.ndarray,
        offsets: np.ndarray,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        threads: int,
        schedule: Optional[Dict[str, Any]] = None,
    ) -> None: ...
    def execute(
        self,
        input: int,
        input_strides: Sequence[int],
        bias: int,
        relu: bool,
        output: int,
        output_strides: Sequence[int],
        threads: int,
    ) -> None: ...
    @property
    def schedule(self) -> Dict[str, Any]: ...
    @property
    def facts(self) -> Dict[str, Any]: ...
    @property
    def why(self) -> str: ...

class CpuPartialExecution:
    """Executions of a plan without part of their work, to measure what it takes.

    For nothing else: the output is wrong by design. Without `fill`, each thread copies input
    into its tiles once and never again, and nothing is fetched ahead; without `stores`, sums go
    to a tile of the thread's own and the output is not touched. One call at a time.
    Raises ValueError for a naive plan, which has no tiles.
    """

    def __init__(self, plan: CpuPlan, threads: int, *, fill: bool, stores: bool) -> None: ...
    def execute(
        self,
        input: int,
        input_strides: Sequence[int],
        output: int,
        output_strides: Sequence[int],
    ) -> None: ...

def cpu_schedules(
    input_shape: Sequence[int],
    output_shape: Sequence[int],
    words: np.ndarray,
    offsets: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    threads: int,
) -> List[Dict[str, Any]]: ...

class CudaPlan:
    @property
    def kernel(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def facts(self) -> Dict[str, Any]: ...
    @property
    def table(self) -> np.ndarray: ...

def cuda_plan(
    input_shape: Sequence[int],
    output_shape: Sequence[int],
    words: np.ndarray,
    offsets: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    limits: Sequence[int],
    implementation: str = "auto",
    config: Optional[Sequence[int]] = None,
) -> CudaPlan: ...
def cuda_conv2d(
    plan: CudaPlan,
    device: int,
    stream: int,
    input: int,
    input_strides: Sequence[int],
    table: int,
    bias: int,
    relu: bool,
    output: int,
    output_strides: Sequence[int],
) -> None: ...
def cuda_kernels() -> Dict[str, List[Tuple[int, ...]]]: ...
def fma_peak(threads: int, seconds: float) -> float: ...
def copy_bandwidth(threads: int, bytes: int, repeats: int) -> float: ...
def keep_freed_memory() -> bool: ...
def isa() -> str: ...
def isas() -> List[str]: ...
def parallel_library() -> str: ...
def build_info() -> Dict[str, Any]: ...
def gpus() -> List[Dict[str, Any]]: ...
def cuda_driver_version() -> str: ...
def mapping_config() -> Dict[str, Any]: ...
