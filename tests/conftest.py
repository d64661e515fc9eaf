"""What holds for all tests."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    """Files whose tests start programs come first: they take minutes, and one that came last would run alone."""
    items.sort(key=lambda item: not hasattr(item.module, "launch"))


@pytest.fixture
def one_thread():
    """Tiny models are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
