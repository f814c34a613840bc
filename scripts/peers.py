"""Time one layer beside MNN: packedconv, PyTorch's best dense convolution, and MNN's best."""

from packedconv.bench.cpu_steps import run_step
from packedconv.bench.peers import peers

if __name__ == "__main__":
    run_step(__doc__, peers)
