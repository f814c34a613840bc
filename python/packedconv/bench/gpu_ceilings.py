"""Measured ceilings of a GPU: an FP32 matrix product and a copy, by PyTorch."""

import typing

import torch

from packedconv.bench import events, gpu_state
from packedconv.bench.gpu_contenders import Switches, switched

TRIALS = 5
# Every side of the square matrices, smaller where three of them take an eighth of the memory.
MATRIX_SIZE = 4096
COPY_BYTES = 2**30
BURST_SECONDS = 0.3
PEAK_OF = (
    "an FP32 matrix product of PyTorch, TF32 off: a lower bound of the FMA peak, which "
    "the device file states"
)


class Peak:
    """FP32 matrix products on a GPU, TF32 off; keeps its matrices from one burst to the next."""

    def __init__(self, accelerator: typing.Any) -> None:
        size = MATRIX_SIZE
        while size > 64 and 3 * 4 * size**2 > accelerator.free_bytes() // 8:
            size //= 2
        self._accelerator = accelerator
        self.size = size
        # Ordinary values: a product of zeros takes less power and so more clock.
        self._a, self._b = (torch.rand(size, size, device=accelerator.device) for _ in range(2))
        self._c = torch.empty(size, size, device=accelerator.device)
        with switched(Switches(False, False)):
            self._pace = events.calibrate(accelerator, self._multiply)

    def burst(self, states: typing.Optional[typing.List[gpu_state.State]] = None) -> float:
        """FLOP/s of products over BURST_SECONDS, during which the GPU's state is read.

        It is added to `states`, with under_load False where the products had ended by then.
        """
        accelerator = self._accelerator
        count = max(1, round(BURST_SECONDS / max(self._pace.seconds, 1e-6)))
        with switched(Switches(False, False)):
            begin = accelerator.record()
            for _ in range(count):
                self._multiply()
            end = accelerator.record()
            if states is not None:
                state = accelerator.state()
                states.append(dict(state, under_load=accelerator.pending(end)))
            accelerator.synchronize()
        return 2.0 * self.size**3 * count / accelerator.elapsed(begin, end)

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._c)


def copy_bandwidth(accelerator: typing.Any) -> float:
    """Bytes/s, read and written, of copying a large tensor."""
    size = min(COPY_BYTES, accelerator.free_bytes() // 8)
    source = torch.ones(max(16, size // 4), device=accelerator.device)
    target = torch.empty_like(source)

    def execute() -> None:
        target.copy_(source)

    pace = events.calibrate(accelerator, execute)
    seconds = events.time_pairs(accelerator, execute, 3, pace.executions)
    return 2.0 * source.numel() * source.element_size() / min(seconds)


def measure_ceilings(
    device: str, run: str, threads: int, accelerator: typing.Any, trials: int = TRIALS
) -> typing.List[typing.Dict[str, typing.Any]]:
    """Rows of ceilings.csv: peak_flops (FLOP/s, see PEAK_OF), bandwidth (bytes/s), per trial."""
    peak = Peak(accelerator)
    rows = []
    for trial in range(trials):
        values = {"peak_flops": peak.burst(), "bandwidth": copy_bandwidth(accelerator)}
        for quantity, value in values.items():
            row = {"device": device, "run": run, "quantity": quantity}
            rows.append(dict(row, threads=threads, trial=trial, value=value))
    return rows
