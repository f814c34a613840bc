"""The slow suite: what needs daemons, root, a browser or many minutes.

Plain runs of pytest leave this folder out; `scripts/artifact slow` runs it.
"""

import pathlib

import pytest
from slow_record import Recorder

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[2]


def pytest_configure(config: pytest.Config) -> None:
    # Neither the processes of pytest-xdist nor their controller see the whole suite.
    if not getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        recorder = Recorder(FOLDER, ROOT / "docs" / "slow-suite.md", ROOT)
        config.pluginmanager.register(recorder, "slow_record")
