"""Files of measurers that were killed do not stay for ever; those of living ones do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from eqtune.measure.scratch import LOCK, YOUNG_S, Scratch

OWNER = "from eqtune.measure.scratch import Scratch; kept = Scratch('test'); print(kept.name, flush=True); input()"


@pytest.fixture
def owner(tmp_path, monkeypatch):
    """A process with a directory of its own, which is as old as those that may go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    directory = Path(process.stdout.readline().strip())
    age(directory, 2 * YOUNG_S)
    yield process, directory
    process.kill()
    process.communicate()


def age(directory, seconds):
    then = (directory / LOCK).stat().st_mtime - seconds
    os.utime(directory / LOCK, (then, then))


def test_what_a_killed_process_left_is_removed(owner):
    process, directory = owner
    (directory / "reference.npy").write_bytes(b"much")
    process.kill()
    process.wait()
    assert directory.exists()
    with Scratch("test"):
        assert not directory.exists()


def test_the_directory_of_a_living_process_stays(owner):
    _, directory = owner
    with Scratch("test"):
        assert directory.exists()


def test_a_directory_that_may_not_have_its_lock_yet_stays(owner):
    process, directory = owner
    process.kill()
    process.wait()
    os.utime(directory / LOCK)
    with Scratch("test"):
        assert directory.exists()


def test_its_own_is_removed_at_once():
    with Scratch("test") as name:
        assert Path(name).is_dir()
    assert not Path(name).exists()
