import pytest

from tests.train import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of a tiny model, not to be changed."""
    path = tmp_path_factory.mktemp("model")
    tiny.save_model(path, tied=True)
    return path
