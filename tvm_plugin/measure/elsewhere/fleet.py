"""Spread work over devices that may be lost: each has a thread that waits for it, and goes on with another."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import InputError, SetupError
from ..base import CLOSED

__all__ = ["Device", "DeviceLost", "Fleet"]

ATTEMPTS = 2
"""A request that loses two devices is taken to be the cause."""

CLOSE_LIMIT_S = 5.0

RETRY_S = 0.5
"""Between two attempts to get a device back."""


class DeviceLost(Exception):
    """The device is gone, or hangs, and with it the request.

    Attributes
    ----------
    kind : str
        One of `ERROR_KINDS`.
    occupied_until_s : float
        When the device has ended at the latest what it was running, by `time.monotonic`. 0 where nothing occupies it.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.occupied_until_s = 0.0


class Device(Protocol):
    """One device elsewhere, used by one thread."""

    def open(self) -> None:
        """Get hold of the device, again where it was lost. Raises DeviceLost, or OSError where nothing can start."""

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one program. Raises DeviceLost; the device is then closed until `open`."""

    def close(self) -> None:
        """Let go of it, now. May come from another thread: what is running then raises DeviceLost."""

    def release(self) -> None:
        """Leave nothing behind: the last call, by the device's own thread."""


@dataclass(eq=False)
class _Job:
    """Requests that run on one device, one after another, unless it is lost."""

    batch: _Batch
    waiting: deque[int]
    losses: int = 0


@dataclass(eq=False)
class _Batch:
    """The jobs of one call of `Fleet.run`."""

    ask: Callable[[int], Mapping[str, Any] | None]
    note: Callable[[int, dict[str, Any]], None]
    unfinished: int
    cancelled: bool = False
    fault: Exception | None = None
    running: set[int] = field(default_factory=set)


class Fleet:
    """Devices, and the work that waits for one.

    Parameters
    ----------
    patience_s : float
        How long work waits while there is no device at all, and no lost one may still be occupied. May be assigned.
    advice : str
        What to do when there is none; ends the error.

    Attributes
    ----------
    devices : list of Device
        Those that were added.
    losses : int
        How often a device was lost with a request.
    """

    def __init__(self, patience_s: float, advice: str) -> None:
        self.patience_s = patience_s
        self._advice = advice
        self._changed = threading.Condition()
        self.devices: list[Device] = []
        self._threads: list[threading.Thread] = []
        self._open: set[int] = set()
        self._absent: set[int] = set()
        self._queue: deque[_Job] = deque()
        self._closed = False
        self._owner = os.getpid()
        self._last_open_s = time.monotonic()
        self._occupied_until_s = 0.0
        self._last_loss = ""
        self.losses = 0

    def __len__(self) -> int:
        """Devices that were added, those that are lost at the moment included."""
        return len(self.devices)

    def add(self, device: Device) -> None:
        """Use one more device."""
        self.devices.append(device)
        index = len(self.devices) - 1
        thread = threading.Thread(target=self._serve, args=(index, device), name=f"eqtune-device-{index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def run(
        self,
        jobs: Sequence[Sequence[int]],
        ask: Callable[[int], Mapping[str, Any] | None],
        note: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """Do all jobs, as many at once as there are devices.

        Parameters
        ----------
        jobs : sequence of sequences of int
            Numbers of requests; those of one job run on one device, in order.
        ask : callable
            The request of a number, made when its turn comes; None skips it.
        note : callable
            Hears the number and the answer. A request whose device was lost is repeated on another; after `ATTEMPTS`
            losses the answer is the error.

        Raises
        ------
        InputError
            After `close`.
        SetupError
            When there was no device for `patience_s` seconds, nor before that one that may have been occupied.
        """
        batch = _Batch(ask, note, len(jobs))
        with self._changed:
            self._last_open_s = time.monotonic()
            self._queue.extend(_Job(batch, deque(job)) for job in jobs)
            self._changed.notify_all()
            try:
                while batch.unfinished and batch.fault is None:
                    self._changed.wait(0.2)
                    self._check_patience()
            except BaseException:
                self._cancel(batch)
                raise
            if batch.fault is not None:
                self._cancel(batch)
                raise batch.fault

    def close(self) -> None:
        """Let go of all devices, unless this process was forked from the one that uses them. May be repeated."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for device in self.devices:
            device.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_LIMIT_S)

    def _check_patience(self) -> None:
        if self._closed:
            raise InputError(CLOSED)
        being_opened = len(self.devices) - len(self._open) - len(self._absent)
        patience_s = self.patience_s + max(0.0, self._occupied_until_s - self._last_open_s)
        if self._open:
            self._last_open_s = time.monotonic()
        elif not being_opened and time.monotonic() - self._last_open_s > patience_s:
            why = f" ({self._last_loss})" if self._last_loss else ""
            raise SetupError(f"there has been no device to measure on for {patience_s:g} s{why}; {self._advice}")

    def _cancel(self, batch: _Batch) -> None:
        batch.cancelled = True
        self._queue = deque(job for job in self._queue if job.batch is not batch)
        for index in batch.running:
            self.devices[index].close()

    def _serve(self, index: int, device: Device) -> None:
        while not self._closed:
            try:
                device.open()
                with self._changed:
                    self._open.add(index)
                    self._absent.discard(index)
                    self._changed.notify_all()
                while self._work(index, device):
                    pass
            except Exception as error:  # noqa: BLE001 - one that cannot be opened at the moment is lost, too
                with self._changed:
                    self._last_loss = str(error)
                    self._open.discard(index)
                    self._absent.add(index)
                    self._changed.wait_for(lambda: self._closed, RETRY_S)
        device.release()

    def _take(self, index: int) -> _Job | None:
        """The next job; None once the fleet is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            job = self._queue.popleft()
            job.batch.running.add(index)
            return job

    def _work(self, index: int, device: Device) -> bool:
        """Do the next job; False once the fleet is closed."""
        job = self._take(index)
        if job is None:
            return False
        batch = job.batch
        try:
            while job.waiting and not batch.cancelled:
                number = job.waiting[0]
                with self._changed:
                    request = batch.ask(number)
                answer = None if request is None else device.run(request)
                self._settle(job, answer)
        except DeviceLost as lost:
            self._lose(job, lost)
            raise
        except Exception as error:  # noqa: BLE001 - the caller of `run` must hear of it: it waits for this thread
            batch.fault = error
        finally:
            with self._changed:
                batch.running.discard(index)
                self._changed.notify_all()
        return True

    def _settle(self, job: _Job, answer: dict[str, Any] | None) -> None:
        with self._changed:
            number = job.waiting.popleft()
            job.losses = 0
            if answer is not None and not job.batch.cancelled:
                job.batch.note(number, answer)
            job.batch.unfinished -= not job.waiting
            self._changed.notify_all()

    def _lose(self, job: _Job, lost: DeviceLost) -> None:
        with self._changed:
            self.losses += 1
            self._occupied_until_s = max(self._occupied_until_s, lost.occupied_until_s)
            if job.batch.cancelled:
                return
            job.losses += 1
            if job.losses >= ATTEMPTS:
                try:
                    self._settle(job, {"error": lost.kind, "detail": str(lost)[:300]})
                except Exception as error:  # noqa: BLE001 - as in `_work`, where the device is to be opened again
                    job.batch.fault = error
            if job.waiting:
                self._queue.appendleft(job)
            self._changed.notify_all()
