"""Experiments beyond the paper on a CPU, one module each: `measure` makes its rows and facts."""
