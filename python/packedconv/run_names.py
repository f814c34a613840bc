"""Names of runs that mean something; needs the standard library alone, as remote machines have it."""

# The run of the default configuration, whose figures lie in figures/ itself.
DEFAULT_RUN = "paper"
# Names that a run may not have, beside those of devices: figures/<name>/ holds no run.
RESERVED = ("compare",)
