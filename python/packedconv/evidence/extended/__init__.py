"""Experiments beyond the paper on a CPU, one module each: samples to the table that is drawn."""
