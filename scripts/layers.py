"""Time one layer of the tables layers and layers_cold on a CPU."""

from packedconv.bench.cpu_steps import layers, run_step

if __name__ == "__main__":
    run_step(__doc__, layers)
