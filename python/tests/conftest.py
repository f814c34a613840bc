import hypothesis
import pytest

# Run by `scripts/artifact slow` alone.
collect_ignore = ["slow"]

# The same examples on every machine and no files written beside the sources.
hypothesis.settings.register_profile(
    "packedconv", deadline=None, derandomize=True, database=None, max_examples=60
)
hypothesis.settings.load_profile("packedconv")


@pytest.fixture
def torch_threads():
    """torch.set_num_threads, undone after the test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(torch_threads):
    """For small layers, where torch's own threads cost more than they gain."""
    torch_threads(1)
