"""Snakemake's report (`snakemake --report`): what it shows, and what its captions say."""
