import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20251002)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of the tiny model that trainers of TRL start from."""
    from .trl_trainers import save_model

    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder
