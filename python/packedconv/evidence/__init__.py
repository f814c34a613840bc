"""From stored samples to statistics, tables, claims and audit. Imports no torch."""
