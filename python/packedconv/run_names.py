"""Names of runs that mean something; imports nothing, since bundles are unpacked anywhere."""

# The run of the default configuration, whose figures lie in figures/ itself.
DEFAULT_RUN = "paper"
# Names that a run may not have, beside those of devices: figures/<name>/ holds no run.
RESERVED = ("compare",)
