import pytest

from exgrpo.train.rollout.server import pool
from tests.train import tiny
from tests.train.rollout.server.fake_server import FakeServer


@pytest.fixture(scope="session")
def settings(folder):
    """Settings of a trainer of a tiny model for its servers."""
    return tiny.engine_settings(folder, max_tokens=56)


@pytest.fixture
def fakes():
    made = []

    def make():
        made.append(FakeServer())
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Retry a failing server at once."""
    monkeypatch.setattr(pool, "PAUSE_SECONDS", 0.01)
