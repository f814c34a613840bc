"""The slow suite: what needs daemons, root, a browser or many minutes.

Plain runs of pytest leave this folder out; `scripts/artifact slow` runs it.
"""

import pathlib

import pytest
from checkout import Checkout
from held import TARGETS
from slow_record import Recorder

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[2]


def pytest_configure(config: pytest.Config) -> None:
    # Neither the processes of pytest-xdist nor their controller see the whole suite.
    if not getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        recorder = Recorder(FOLDER, ROOT / "docs" / "slow-suite.md", ROOT)
        config.pluginmanager.register(recorder, "slow_record")


@pytest.fixture(scope="session")
def measured_run(tmp_path_factory):
    """A checkout where the tiny run has been measured and `TARGETS` rendered; only to be copied."""
    checkout = Checkout(tmp_path_factory.mktemp("measured") / "packedconv")
    done = checkout.run(*TARGETS)
    assert done.returncode == 0, done.stdout
    return checkout
