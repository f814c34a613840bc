"""Two sets of results side by side: a panel each, shared scales, and the ratio below."""
