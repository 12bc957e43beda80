"""Laws of the circuit of an upstream, by a clock of its own and without jitter."""

from __future__ import annotations

from functools import partial

import pytest

from streamserve.clients.remote.circuit import Circuit

middle = partial(float, 0.5)  # no jitter: 0.75 + 0.5 * 0.5


def test_a_lost_connection_opens_it_and_a_probe_lets_one_request_try() -> None:
    """Only one request is on its way while nothing is known; its first token closes the circuit."""
    circuit = Circuit(middle)
    circuit.fail(0.0, lost=True)
    assert (circuit.may_try(0.0), circuit.is_well) == (False, False)
    circuit.find(0.1)
    assert (circuit.may_try(0.1), circuit.is_well) == (True, True)
    circuit.begin(0.1)
    assert not circuit.may_try(0.2)
    circuit.succeed()
    circuit.leave()
    assert (circuit.may_try(0.2), circuit.is_well) == (True, True)


def test_each_failure_of_the_one_request_takes_twice_as_long() -> None:
    """Up to half a minute; a probe that finds the server shortens only the first time."""
    circuit, now, waits = Circuit(middle), 0.0, []
    for _ in range(7):
        circuit.fail(now, lost=True)
        if len(waits):
            circuit.find(now)
        begun = now
        while not circuit.may_try(now):
            now += 0.25
        waits.append(now - begun)
        circuit.begin(now)
        circuit.leave()
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_answers_that_are_none_open_it_at_the_third_in_a_row() -> None:
    """A request of its own kind may be what fails: a first token in between begins the count anew."""
    circuit = Circuit(middle)
    for _ in range(4):
        circuit.fail(0.0)
        circuit.fail(0.0)
        assert circuit.may_try(0.0)
        circuit.succeed()
    for _ in range(3):
        circuit.fail(0.0)
    assert not circuit.may_try(0.9)
    circuit.find(0.5)  # that it lists its models says nothing of its answers
    assert not circuit.may_try(0.9)
    assert circuit.may_try(1.0)


def test_a_wrong_key_opens_it_at_once() -> None:
    """Every other request would be refused as well."""
    circuit = Circuit(middle)
    circuit.fail(0.0, certain=True)
    assert not circuit.may_try(0.0)


def test_requests_that_began_before_count_once() -> None:
    """Thirty connections that break together are one failure."""
    circuit = Circuit(middle)
    for _ in range(30):
        circuit.fail(0.0, lost=True)
    assert circuit.may_try(1.0)


@pytest.mark.parametrize(("now", "left"), [(0.0, 7.0), (6.5, 0.5), (7.0, 0.0)])
def test_a_busy_server_is_left_alone_for_so_long(now: float, left: float) -> None:
    """The longest of the times that it has named."""
    circuit = Circuit(middle)
    circuit.rest(0.0, 7.0)
    circuit.rest(1.0, 2.0)
    assert circuit.busy_seconds(now) == left
