"""What a machine has and lacks for this artifact, and what it can decide, before anything runs.

The checks of the machine need nothing but Python 3.6 and its standard library, so that they run
where nothing is set up yet; those of compiler, Python and disk are the launcher's own
(scripts/artifact). `matrix` needs the environment.
"""
