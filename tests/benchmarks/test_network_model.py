"""The model of the network, against a ring in which every part is sent on by itself."""

import pytest

from benchmarks.network_model import TRIPS_OF_MESSAGE, Network, Ring, Traffic


def sent_on(hosts, each):
    """Parts that come into the first host, and trips between hosts until the last part is where it goes last."""
    ranks = hosts * each
    into_first, last = 0, 0
    for owner in range(ranks):
        trips = 0
        for hop in range(1, ranks):
            to = (owner + hop) % ranks
            if to % each == 0:  # its neighbour is on another host
                trips += 1
                into_first += to == 0
        last = max(last, trips)
    return into_first, last


@pytest.mark.parametrize(("hosts", "each"), [(2, 1), (3, 1), (2, 4), (5, 3), (8, 8)])
def test_a_collective_moves_what_a_ring_moves(hosts, each):
    into_first, trips = sent_on(hosts, each)
    ranks = hosts * each
    traffic = Ring(hosts, ranks).collective(ranks * 1000.0, 3)
    assert traffic.size == pytest.approx(into_first * 1000.0)
    assert traffic.trips == 3 * TRIPS_OF_MESSAGE * trips


def test_seconds_are_those_of_the_bytes_and_of_the_trips():
    assert Traffic(6e6, 10).seconds(Network(2e6, 0.25)) == pytest.approx(3 + 2.5)
    assert Ring(2, 2).update(8.0, 2, 16.0, 0).size == pytest.approx(16)
    assert Ring(2, 2, 0.5).update(8.0, 2, 16.0, 0).size == pytest.approx(32)


def test_a_push_leaves_the_first_host_once_for_each_server():
    ring = Ring(2, 2)
    one, four = ring.push(1e9, 10, 1), ring.push(1e9, 10, 4)
    assert four.size - one.size == pytest.approx(3e9)
    assert four.trips == one.trips
