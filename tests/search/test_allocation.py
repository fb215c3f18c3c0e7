"""Allocators: the budget goes where most is to gain, and ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqtune.errors import InputError
from eqtune.search import allocation
from eqtune.search.allocation.base import Allocator, TaskStatus
from eqtune.search.allocation.gradient import Gradient, expected_gain_s
from eqtune.search.allocation.stopping import Stopping


def kernel(
    history: list[float],
    calls: int = 1,
    flops: float = 1e6,
    roofline_s: float = 1e-6,
    similarity: str = "",
    finished: str = "",
    price_s: float = math.nan,
) -> TaskStatus:
    trials = 16 * len(history)
    return TaskStatus("kernel", calls, flops, roofline_s, similarity, history, trials, price_s, finished=finished)


def choose(*statuses: TaskStatus, name: str = "gradient") -> int | None:
    return allocation.create(name).begin(0).next_task(statuses)


def test_every_kernel_once_the_most_expensive_first() -> None:
    statuses = [kernel([], calls=1), kernel([], calls=5), kernel([], roofline_s=4e-6), kernel([9.0])]
    order = []
    for _ in range(3):
        index = choose(*statuses)
        assert index is not None
        order.append(index)
        statuses[index].history.append(1e-3)
        statuses[index].trials += 16
    assert order == [1, 2, 0]


def test_calls_and_latency_decide() -> None:
    assert choose(kernel([1e-3, 1e-3]), kernel([1e-3, 1e-3], calls=3)) == 1
    assert choose(kernel([5e-3, 5e-3]), kernel([1e-3, 1e-3], calls=3)) == 0


def test_a_priced_kernel_waits_until_it_promises_most() -> None:
    unknown, good, bad = kernel([]), kernel([], price_s=1.1e-6), kernel([], price_s=9e-6)
    measured = kernel([5e-6])
    assert choose(unknown, good, bad, measured) == 0, "nobody knows what it takes"
    assert choose(good, bad, measured) == 1
    assert choose(good, measured) == 1
    assert expected_gain_s([bad], 0, Gradient(alpha=0.0)) == pytest.approx(8e-6)
    bad.history = [9e-6]
    assert expected_gain_s([bad], 0, Gradient(alpha=0.0)) == pytest.approx(4.5e-6), "the price was a first round"


def test_no_hope_far_below_the_estimate_unless_it_is_off() -> None:
    kernels = [kernel([1e-3, 1e-3]), kernel([1e-3, 1e-3]), kernel([1e-3, 1e-3])]
    kernels[1].estimate_s, kernels[2].estimate_s = 1.1e-3, 2e-3
    gains = [expected_gain_s(kernels, i, Gradient(alpha=0.0)) for i in range(3)]
    assert gains == pytest.approx([0.5e-3, 0.12e-3, 0.5e-3])


def test_a_round_that_takes_longer_must_promise_more() -> None:
    slow, quick, new = kernel([2e-3, 2e-3]), kernel([1e-3, 1e-3]), kernel([1.5e-3, 1.5e-3])
    assert choose(slow, quick) == 0
    slow.round_s, quick.round_s = 3.0, 1.0
    assert choose(slow, quick) == 1
    assert choose(slow, new) == 0, "it is taken to be as slow as the others"
    assert choose(slow, new, quick) == 2, "or as slow as they are on the whole"


def test_what_only_a_slower_form_needs_counts_for_less() -> None:
    kernels = [kernel([2e-3, 2e-3]), kernel([1e-3, 1e-3])]
    kernels[0].weight = 0.25
    assert choose(*kernels) == 1
    assert expected_gain_s(kernels, 0, Gradient(alpha=0.0)) == pytest.approx(0.25e-3)


def test_recent_gain_counts() -> None:
    assert choose(kernel([1e-3] * 5), kernel([2e-3, 1.8e-3, 1.6e-3, 1.2e-3, 1e-3])) == 1


def test_no_hope_below_the_roofline() -> None:
    near_roofline = kernel([1e-3, 1e-3], roofline_s=0.9e-3, calls=2)
    assert choose(near_roofline, kernel([1e-3, 1e-3])) == 1
    assert expected_gain_s([near_roofline], 0, Gradient(alpha=0.0)) == pytest.approx(2 * 0.1e-3)


def test_a_kernel_slower_than_its_like_is_promising() -> None:
    slow, fast = kernel([8e-3] * 5, similarity="matmul"), kernel([1e-3] * 5, similarity="matmul")
    alone = kernel([8e-3] * 5)
    assert choose(alone, slow, fast) == 1
    # It may come within a factor beta of its like: from 8 ms to 2 ms.
    assert expected_gain_s([alone, slow, fast], 1, Gradient(alpha=0.0)) == pytest.approx(6e-3)
    # But not for ever: a kernel that stays behind leaves the group.
    slow.history = [8e-3] * 11
    assert expected_gain_s([alone, slow, fast], 1, Gradient(alpha=0.0)) == pytest.approx(8e-3 / 11)


def test_a_kernel_of_which_nothing_works_comes_first_and_ends() -> None:
    broken = kernel([math.inf] * 2)
    assert choose(kernel([1.0, 1.0]), broken) == 1
    broken.history = [math.inf] * 6
    assert choose(kernel([1.0, 1.0]), broken) == 0
    assert "no candidate worked" in broken.finished


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (kernel([1e-3] * 6), "no improvement in 5 rounds"),
        (kernel([1e-3] * 5 + [0.995e-3]), "no improvement in 5 rounds"),
        (kernel([1e-3] * 5 + [0.9e-3]), ""),
        (kernel([1e-3] * 5), ""),
        (kernel([1.04e-6]), "within 5% of the roofline"),
        (kernel([1.06e-6]), ""),
        (kernel([1e-9], roofline_s=0.0), ""),
        (kernel([1e-3], finished="every candidate was measured"), "every candidate was measured"),
        (kernel([]), ""),
    ],
)
def test_stopping_rules(status: TaskStatus, reason: str) -> None:
    assert Stopping().reason(status) == reason


@pytest.mark.parametrize("name", allocation.names())
def test_finished_kernels_say_why_and_are_never_chosen(name: str) -> None:
    stalled, done = kernel([1.0] * 9, calls=100), kernel([1.0], finished="asked for it")
    assert choose(stalled, done, kernel([1e-3]), name=name) == 2
    assert stalled.finished == "no improvement in 5 rounds"
    assert choose(stalled, done, name=name) is None
    assert choose(name=name) is None


def test_round_robin_takes_turns() -> None:
    statuses = [kernel([], calls=calls) for calls in (1, 9, 3)]
    order = []
    for _ in range(7):
        index = choose(*statuses, name="round-robin")
        assert index is not None
        order.append(index)
        statuses[index].history.append(1.0)
        statuses[index].trials += 16
    assert order == [0, 1, 2, 0, 1, 2, 0]


kernels = st.lists(
    st.tuples(st.integers(1, 50), st.floats(1e-6, 1e-1), st.floats(0.3, 1.0), st.sampled_from(["", "matmul", "conv"])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(kernels, st.sampled_from(allocation.names()))
def test_ends_after_every_kernel_was_measured(tasks: list[tuple[int, float, float, str]], name: str) -> None:
    """Kernels that improve by a factor a round down to a floor: all are measured, all finish, and None ends it."""
    statuses = [kernel([], calls, similarity=similarity) for calls, _, _, similarity in tasks]
    running = allocation.create(name).begin(0)
    for _ in range(4000):  # 0.2 % a round, the least that goes on, takes 550 rounds to the floor
        index = running.next_task(statuses)
        if index is None:
            break
        status, (_, start_s, factor, _) = statuses[index], tasks[index]
        assert not status.finished
        status.history.append(max(start_s * factor ** len(status.history), start_s / 3))
        status.trials += 16
    assert running.next_task(statuses) is None
    assert all(status.finished and status.trials for status in statuses)


def test_gradient_beats_round_robin_where_kernels_differ() -> None:
    """One heavy kernel with much to gain among light ones: more of a short budget goes there."""

    def total_s(name: str) -> float:
        statuses = [kernel([], calls=20 if i == 0 else 1, roofline_s=1e-5) for i in range(10)]
        running = allocation.create(name).begin(0)
        for _ in range(25):
            index = running.next_task(statuses)
            assert index is not None
            statuses[index].history.append(1e-3 * 0.8 ** len(statuses[index].history))
            statuses[index].trials += 16
        return sum(status.calls * status.history[-1] for status in statuses)

    assert total_s("gradient") < 0.7 * total_s("round-robin")


def test_names_and_instances() -> None:
    own: Allocator = Gradient(alpha=0.5)
    assert allocation.create(own) is own
    assert all(allocation.create(name).name == name for name in allocation.names())
    with pytest.raises(InputError, match="unknown allocator 'greedy'; there are gradient, round-robin"):
        allocation.create("greedy")
    with pytest.raises(InputError, match="begin"):
        allocation.create(Gradient)  # type: ignore[arg-type]
