"""Lockstep: equal calls run as one batch, in client order, and every client gets its own result."""

import threading
from functools import partial

import pytest
import torch

from fedloom.engines.stacked.lockstep import Batched, Group, run_lockstep
from fedloom.nn.operations import Operation


class Doubling(Batched):
    """Doubles numbers. `calls` records the calls: a tuple of numbers for each batch."""

    def __init__(self, waits=False):
        self.waits, self.calls = waits, []
        self.operation = Operation(self.double)

    def double(self, *args):
        self.calls.append(args)
        if args[0] < 0:
            raise ValueError(f"{args[0]} is negative")
        return 2 * args[0]

    def key(self, *args):
        return args[1] if len(args) > 1 else "all"

    def batch(self, calls, context):
        self.calls.append(tuple(number for number, *_ in calls))
        return [2 * number for number, *_ in calls]


def group_of(*batched):
    return Group({each.operation: each for each in batched})


def test_outside_lockstep_an_operation_runs_directly():
    assert Doubling().operation(4) == 8


def test_equal_calls_at_the_same_time_run_as_one_batch():
    doubling = Doubling()
    double, group = doubling.operation, group_of(doubling)

    def work(k):
        once = double(k)
        return double(once) if k != 1 else once

    assert run_lockstep([partial(work, k) for k in range(4)], group) == [0, 2, 8, 12]
    assert doubling.calls == [(0, 1, 2, 3), (0, 4, 6)]
    assert group.calls == {"batched": 7}


def test_calls_with_different_keys_or_without_a_key_run_separately():
    doubling = Doubling()
    group, keys = group_of(doubling), ["a", "b", "a", None, None]
    tasks = [partial(doubling.operation, k, keys[k]) for k in range(5)]
    assert run_lockstep(tasks, group) == [0, 2, 4, 6, 8]
    assert doubling.calls == [(0, 2), (1, "b"), (3, None), (4, None)]
    assert group.calls == {"batched": 2, "single": 3}


def test_an_operation_without_a_batched_form_runs_directly():
    doubling = Doubling()
    group = group_of()
    assert run_lockstep([partial(doubling.operation, k) for k in range(3)], group) == [0, 2, 4]
    assert doubling.calls == [(0,), (1,), (2,)]
    assert not group.calls


def test_an_operation_that_waits_runs_after_all_others():
    quick, slow = Doubling(), Doubling(waits=True)

    def work(k):
        number = quick.operation(k) if k == 1 else k
        return slow.operation(quick.operation(number) if k == 1 else number)

    tasks = [partial(work, k) for k in range(3)]
    assert run_lockstep(tasks, group_of(quick, slow)) == [0, 8, 4]
    assert slow.calls == [(0, 4, 2)]


def test_an_error_is_raised_in_the_client_whose_call_failed():
    doubling = Doubling()

    def work(k):
        try:
            return doubling.operation(-k, k)
        except ValueError as error:
            return str(error)

    tasks = [partial(work, k) for k in range(2)]
    assert run_lockstep(tasks, group_of(doubling)) == [0, "-1 is negative"]


def test_a_client_that_fails_stops_all_clients_of_its_group():
    doubling, ended = Doubling(), []
    double, group = doubling.operation, group_of(doubling)

    def work(k):
        try:
            double(k)
            if k == 1:
                raise KeyError("of client 1")
            double(k)
        finally:
            ended.append(k)

    with pytest.raises(KeyError, match="of client 1"):
        run_lockstep([partial(work, k) for k in range(4)], group)
    assert sorted(ended) == [0, 1, 2, 3]
    assert double(1) == 2  # no scheduler is left behind
    assert run_lockstep([partial(double, k) for k in range(6)], group) == [0, 2, 4, 6, 8, 10]


def test_an_error_in_a_batch_stops_all_clients():
    class Broken(Doubling):
        def batch(self, calls, context):
            raise RuntimeError("broken")

    broken, doubling = Broken(), Doubling()
    with pytest.raises(RuntimeError, match="broken"):
        run_lockstep([partial(broken.operation, k) for k in range(3)], group_of(broken))
    tasks = [partial(doubling.operation, k) for k in range(3)]
    assert run_lockstep(tasks, group_of(doubling)) == [0, 2, 4]


def test_each_client_has_its_own_gradient_mode():
    doubling, seen = Doubling(), []
    double = doubling.operation

    def work(k):
        if k % 2:
            with torch.no_grad():
                double(k)
                seen.append((k, torch.is_grad_enabled()))
        else:
            double(k)
            seen.append((k, torch.is_grad_enabled()))
        return torch.is_grad_enabled()

    assert run_lockstep([partial(work, k) for k in range(4)], group_of(doubling)) == [True] * 4
    assert sorted(seen) == [(0, True), (1, False), (2, True), (3, False)]
    assert doubling.calls == [(0, 2), (1, 3)]
    assert torch.is_grad_enabled()


def test_a_group_caches_by_the_identity_of_the_objects():
    made, things = [], [object() for _ in range(3)]

    class Caching(Doubling):
        def batch(self, calls, context):
            used = things[: len(calls)]
            context.group.cached("list", used, lambda: made.append(len(calls)))
            return [context.others_running] * len(calls)

    caching = Caching()
    group, work = group_of(caching), caching.operation
    assert run_lockstep([partial(work, k) for k in range(3)], group) == [False] * 3
    run_lockstep([partial(work, k) for k in range(3)], group)
    run_lockstep([partial(work, k) for k in range(2)], group)
    assert made == [3, 2]


def test_a_group_evicts_the_entries_that_were_not_used_for_longest():
    group, made = group_of(), []
    things = [object() for _ in range(Group.CACHE_LIMIT + 1)]
    for thing in [*things, things[0]]:
        group.cached("thing", [thing], lambda thing=thing: made.append(thing))
    assert made == [*things, things[0]]


def test_threads_run_independently():
    results = {}

    def work(number):
        doubling = Doubling()
        tasks = [partial(doubling.operation, number + k) for k in range(3)]
        results[number] = run_lockstep(tasks, group_of(doubling))

    threads = [threading.Thread(target=work, args=(10 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [0, 2, 4], 10: [20, 22, 24], 20: [40, 42, 44]}
