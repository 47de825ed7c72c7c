"""Operations: they run directly, or a scheduler of their thread receives the call."""

from __future__ import annotations

import threading

import pytest

from fedloom.nn.operations import operation, set_scheduler


@operation
def add(a: int, b: int) -> int:
    """Returns a + b."""
    return a + b


@pytest.fixture
def calls():
    """Installs a scheduler that records the calls and returns their number."""
    received = []

    def scheduler(called, *arguments):
        received.append((called, arguments))
        return len(received)

    before = set_scheduler(scheduler)
    yield received
    assert set_scheduler(before) is scheduler


def test_an_operation_runs_directly_without_a_scheduler():
    assert add(2, 3) == 5
    assert add(2, b=3) == 5
    assert (add.__name__, add.__doc__) == ("add", "Returns a + b.")


def test_a_scheduler_receives_the_call_and_gives_the_result(calls):
    assert add(2, 3) == 1
    assert add(4, 5) == 2
    assert calls == [(add, (2, 3)), (add, (4, 5))]
    assert add.function(2, 3) == 5


def test_set_scheduler_returns_the_scheduler_before_it(calls):
    own = set_scheduler(None)
    assert add(2, 3) == 5
    assert set_scheduler(own) is None
    assert add(2, 3) == 1


def test_a_scheduler_belongs_to_its_thread(calls):
    results = []
    other = threading.Thread(target=lambda: results.append(add(2, 3)))
    other.start()
    other.join()
    assert results == [5]
    assert calls == []
