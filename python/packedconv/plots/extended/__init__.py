"""Experiments beyond the paper on a CPU, one module each: a table to its figure."""
