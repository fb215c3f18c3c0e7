"""How long work waits for devices that are lost. No device is used, and no time passes but what a fake clock shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from eqtune.errors import SetupError
from eqtune.measure.elsewhere import fleet as fleet_module
from eqtune.measure.elsewhere.fleet import ATTEMPTS, DeviceLost, Fleet

PATIENCE_S = 64.0
SESSION_S = 254.0
OPENING_S = 60.0
"""Less than the patience: however late a device comes back, it is looked for once more in time."""


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Board:
    """Loses the first `hangs` requests. Each occupies it, as far as is known; it can be opened `absent_s` later."""

    def __init__(self, clock: Clock, absent_s: float, occupied_s: float, hangs: int = 1) -> None:
        self._clock = clock
        self._absent_s, self.occupied_s = absent_s, occupied_s
        self.hangs = hangs
        self._back_s = 0.0

    def open(self) -> None:
        if self._clock.now_s < self._back_s:
            self._clock.now_s += OPENING_S  # it waits for a server
            raise DeviceLost("crash", "no server was free")

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if not self.hangs:
            return {"ran": request["number"]}
        self.hangs -= 1
        self._back_s = self._clock.now_s + self._absent_s
        lost = DeviceLost("timeout", "no result after 10 s")
        if self.occupied_s:
            lost.occupied_until_s = self._clock.now_s + self.occupied_s
        raise lost

    def close(self) -> None: ...

    def release(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fleet_module, "time", clock)
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.25)  # the fleet looks at the clock more often
    return clock


@pytest.fixture
def fleet(clock: Clock) -> Iterator[Fleet]:
    fleet = Fleet(PATIENCE_S, "start a server")
    yield fleet
    fleet.close()


def answers(fleet: Fleet, requests: int = 1) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    fleet.run([[number] for number in range(requests)], lambda number: {"number": number}, found.__setitem__)
    return found


def test_a_device_is_waited_for_while_what_hangs_may_occupy_it(fleet: Fleet, clock: Clock) -> None:
    fleet.add(Board(clock, absent_s=SESSION_S, occupied_s=SESSION_S))
    assert answers(fleet, requests=2) == {0: {"ran": 0}, 1: {"ran": 1}}
    assert clock.now_s >= SESSION_S > PATIENCE_S


def test_one_request_that_always_hangs_is_an_error_and_the_others_are_run(fleet: Fleet, clock: Clock) -> None:
    fleet.add(Board(clock, absent_s=SESSION_S / 2, occupied_s=SESSION_S / 2, hangs=ATTEMPTS))
    assert answers(fleet, requests=2) == {0: {"error": "timeout", "detail": "no result after 10 s"}, 1: {"ran": 1}}


@pytest.mark.parametrize(("occupied_s", "waited_s"), [(0.0, PATIENCE_S), (SESSION_S, SESSION_S + PATIENCE_S)])
def test_a_device_that_does_not_come_back_is_given_up(
    fleet: Fleet, clock: Clock, occupied_s: float, waited_s: float
) -> None:
    fleet.add(Board(clock, absent_s=1e9, occupied_s=occupied_s))
    with pytest.raises(SetupError, match=rf"no device to measure on for {waited_s:g} s \(.*\); start a server"):
        answers(fleet)
    assert clock.now_s > waited_s


def test_what_once_occupied_a_device_is_not_waited_for_again(fleet: Fleet, clock: Clock) -> None:
    board = Board(clock, absent_s=SESSION_S, occupied_s=SESSION_S)
    fleet.add(board)
    assert answers(fleet) == {0: {"ran": 0}}
    board.hangs, board.occupied_s = 1, 0.0
    with pytest.raises(SetupError, match=rf"for {PATIENCE_S:g} s "):
        answers(fleet)
