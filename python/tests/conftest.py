import hypothesis
import pytest

# Run by `scripts/artifact slow` alone.
collect_ignore = ["slow"]
# Minutes each: first, so that no process is left with one of them while the others are done.
LONGEST = ("test_workflow.py", "test_killed_workflow.py", "test_bundle_workflow.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


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
