"""Two sets of results side by side: what both have, ratios, and what else differs."""
