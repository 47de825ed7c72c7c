"""Clients in step: calls that meet are done together, in client order, and everybody's code goes on as if it were alone."""

import threading
from functools import partial

import pytest
import torch

from fedloom.engines.stacked.lockstep import kept, others_go_on, run_lockstep
from fedloom.experiments.executor import Executor
from fedloom.nn.operations import Operation


class Doubled(Operation):
    """Doubles numbers, and remembers with whom."""

    def __init__(self, waits=False):
        self.waits, self.met = waits, []

    def alone(self, *args):
        self.met.append(args)
        if args[0] < 0:
            raise ValueError(f"{args[0]} is negative")
        return 2 * args[0]

    def alike(self, *args):
        return args[1] if len(args) > 1 else "all"

    def together(self, calls):
        self.met.append(tuple(number for number, *_ in calls))
        return [2 * number for number, *_ in calls]


def test_outside_an_operation_is_itself():
    assert Doubled()(4) == 8


def test_those_who_ask_alike_at_the_same_time_are_answered_together():
    double, crew = Doubled(), Executor()

    def work(k):
        once = double(k)
        return double(once) if k != 1 else once

    assert run_lockstep([partial(work, k) for k in range(4)], executor) == [0, 2, 8, 12]
    assert double.met == [(0, 1, 2, 3), (0, 4, 6)]
    assert executor.tally == {"together": 7}


def test_the_unlike_are_not_and_none_is_like_nobody():
    double, crew = Doubled(), Executor()
    kinds = ["a", "b", "a", None, None]
    assert run_lockstep([partial(double, k, kinds[k]) for k in range(5)], executor) == [
        0,
        2,
        4,
        6,
        8,
    ]
    assert double.met == [(0, 2), (1, "b"), (3, None), (4, None)]
    assert executor.tally == {"together": 2, "alone": 3}


def test_who_waits_waits_for_those_who_do_not():
    quick, slow = Doubled(), Doubled(waits=True)

    def work(k):
        number = quick(k) if k == 1 else k
        return slow(quick(number) if k == 1 else number)

    assert run_lockstep([partial(work, k) for k in range(3)], Executor()) == [0, 8, 4]
    assert slow.met == [(0, 4, 2)]


def test_an_error_is_raised_where_it_was_asked_for():
    double = Doubled()

    def work(k):
        try:
            return double(-k, k)
        except ValueError as error:
            return str(error)

    assert run_lockstep([partial(work, k) for k in range(2)], Executor()) == [0, "-1 is negative"]


def test_who_fails_ends_all_and_nothing_is_left_behind():
    double, ended = Doubled(), []

    def work(k):
        try:
            double(k)
            if k == 1:
                raise KeyError("of client 1")
            double(k)
        finally:
            ended.append(k)

    with pytest.raises(KeyError, match="of client 1"):
        run_lockstep([partial(work, k) for k in range(4)], Executor())
    assert sorted(ended) == [0, 1, 2, 3]
    assert double(1) == 2  # nobody runs in step any more
    assert run_lockstep([partial(double, k) for k in range(6)], Executor()) == [0, 2, 4, 6, 8, 10]


def test_an_error_in_what_is_done_together_ends_all():
    class Broken(Doubled):
        def together(self, calls):
            raise RuntimeError("broken")

    broken, double = Broken(), Doubled()
    with pytest.raises(RuntimeError, match="broken"):
        run_lockstep([partial(broken, k) for k in range(3)], Executor())
    assert run_lockstep([partial(double, k) for k in range(3)], Executor()) == [0, 2, 4]


def test_whether_gradients_are_recorded_is_each_ones_own_affair():
    double, seen = Doubled(), []

    def work(k):
        if k % 2:
            with torch.no_grad():
                double(k)
                seen.append((k, torch.is_grad_enabled()))
        else:
            double(k)
            seen.append((k, torch.is_grad_enabled()))
        return torch.is_grad_enabled()

    assert run_lockstep([partial(work, k) for k in range(4)], Executor()) == [True] * 4
    assert sorted(seen) == [(0, True), (1, False), (2, True), (3, False)]
    assert double.met == [(0, 2), (1, 3)]
    assert torch.is_grad_enabled()


def test_what_a_crew_keeps_is_made_once_for_the_same_objects():
    made, things = [], [object() for _ in range(3)]

    class Keeps(Doubled):
        def together(self, calls):
            kept("list", things[: len(calls)], lambda: made.append(len(calls)))
            return [others_go_on()] * len(calls)

    executor, keeps = Executor(), Keeps()
    assert run_lockstep([partial(keeps, k) for k in range(3)], executor) == [False] * 3
    run_lockstep([partial(keeps, k) for k in range(3)], executor)
    run_lockstep([partial(keeps, k) for k in range(2)], executor)
    assert made == [3, 2]


def test_a_crew_forgets_what_was_not_asked_for_long():
    executor, made = Executor(), []
    things = [object() for _ in range(Executor.LIMIT + 1)]
    for thing in [*things, things[0]]:
        executor.kept("thing", [thing], lambda thing=thing: made.append(thing))
    assert made == [*things, things[0]]


def test_threads_do_not_meet():
    results = {}

    def work(number):
        results[number] = run_lockstep(
            [partial(Doubled(), number + k) for k in range(3)], Executor()
        )

    threads = [threading.Thread(target=work, args=(10 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [0, 2, 4], 10: [20, 22, 24], 20: [40, 42, 44]}
