"""From stored samples to statistics, tables, claims and audit. Imports no torch."""

NOT_MEASURED = "not measured here"
