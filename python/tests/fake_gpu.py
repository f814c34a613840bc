"""A stand-in for a GPU: plans are those of an A100, all work is done on the CPU.

What tests show with it is that the steps hold together: files, arithmetic, what is skipped
and said. Nothing of torch.cuda is run, and no time means anything.
"""

import time

import torch

import packedconv
from packedconv import _core
from packedconv.bench.accelerator import SparsePlan
from packedconv.device import Device

TITLE = "NVIDIA A100-SXM4-40GB"
DEVICE = Device("a100-sxm4-40gb", "cuda", TITLE, 108)
LIMITS = (80, 108, 166912, 167936)
# A few of the compiled mappings: the last does not fit any layer of many channels.
MAPPINGS = [(32, 4, 2, 1), (8, 2, 4, 1), (4, 8, 2, 1)]


def state(**values):
    """A state as nvidia-smi would give it."""
    steady = {
        "sm_clock_mhz": 1410.0,
        "memory_clock_mhz": 1215.0,
        "temperature_c": 40.0,
        "power_w": 300.0,
        "throttle_reasons": [],
        "source": "nvidia-smi",
    }
    return {**steady, **values}


class FakeGpu:
    """What bench.accelerator.Accelerator offers.

    clock: seconds, in place of events. states: returned in turn, the last one for ever.
    fails: errors by (implementation of the sparse kernels, config) raised when it is queued.
    busy: whether queued work still goes on when a state has been read.
    """

    def __init__(self, clock=time.perf_counter):
        self.device = torch.device("cpu")
        self.title = TITLE
        self.compute_capability = (8, 0)
        self.l2_bytes = 40 * 2**10
        self.memory_bytes = 2**30
        self.clock = clock
        self.states = [state()]
        self.fails = {}
        self.synchronized = 0
        self.emptied = 0
        self.known_kernels = True
        self.busy = True

    def comparable(self):
        return {"gpu": self.title, "driver": "1.0", "cuda": "13.0", "cudnn": 90000}

    def record(self):
        return self.clock()

    def elapsed(self, begin, end):
        # Never nothing: an event's clock has a resolution too.
        return max(end - begin, 1e-9)

    def pending(self, event):
        return self.busy

    def synchronize(self):
        self.synchronized += 1

    def free_bytes(self):
        return 2**28

    def empty_cache(self):
        self.emptied += 1

    def start_memory(self):
        return 1000

    def peak_memory(self):
        return 5000

    def state(self):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def mappings(self):
        return MAPPINGS

    def plan(self, layer, packed, implementation, config=None):
        plan = _core.cuda_plan(
            input_shape=layer.input_shape,
            output_shape=layer.output_shape,
            words=packed.words,
            offsets=packed.offsets,
            kernel=packed.shape[2:],
            stride=(layer.stride,) * 2,
            padding=(layer.padding,) * 2,
            dilation=(1, 1),
            groups=1,
            limits=LIMITS,
            implementation=implementation,
            config=config,
        )
        return SparsePlan(plan.kernel, plan.why, dict(plan.facts))

    def sparse(self, layer, input, packed, out, implementation, config=None):
        error = self.fails.get((implementation, config), self.fails.get(implementation))
        if error is not None:
            raise error
        packedconv.conv2d(input, packed, stride=layer.stride, padding=layer.padding, out=out)

    def kernels(self, execute):
        execute()
        if self.known_kernels:
            return ["fake_kernel"], None
        return None, "no profiler: it is not there"
