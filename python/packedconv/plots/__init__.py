"""Drawing of the figures from stored data. Imports no torch."""
