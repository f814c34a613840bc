"""Everything that checks and measures on the device at hand."""
