import pytest


@pytest.fixture(scope="module")
def mine(request, tmp_path_factory):
    """A file with the rewards of the module's tests."""
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(request.module.REWARDS)
    return path
