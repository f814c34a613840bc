"""Time every rung of the ladder for one layer on a CPU."""

from packedconv.bench.cpu_steps import ladder, run_step

if __name__ == "__main__":
    run_step(__doc__, ladder)
