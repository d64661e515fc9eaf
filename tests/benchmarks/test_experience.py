"""The benchmark of the experience makes a step of each method."""

import pytest

from benchmarks import test_experience as benchmark


@pytest.mark.parametrize("method", benchmark.METHODS)
def test_each_method_makes_a_step(method, monkeypatch):
    monkeypatch.setattr(benchmark, "SIZE", 1600)
    experience = benchmark.Experience(method)
    assert experience.plan()
    batch = experience.store(experience.batch())
    assert experience.settle(batch).groups >= batch.groups
