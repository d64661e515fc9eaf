import pytest

from tests.train.rollout.server.fake_server import FakeServer


@pytest.fixture
def fakes():
    made = []

    def make():
        made.append(FakeServer())
        return made[-1]

    yield make
    for fake in made:
        fake.close()
