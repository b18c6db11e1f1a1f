"""scripts/_timer.py: a launch that the host was late with does not count."""

import sys
import types
from pathlib import Path

import pytest


@pytest.fixture
def spins():
    """For how many cycles the GPU spun, try by try."""
    return []


@pytest.fixture
def timed(monkeypatch, spins):
    """(was the GPU done spinning, try by try) -> (how many launches, medians), of one timer and a torch that only
    counts."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import _timer

    answers, events, launches = [], [], []

    class Event:
        def __init__(self, enable_timing):
            self.number = len(events)
            events.append(self)

        def record(self):
            pass

        synchronize = record

        def query(self):
            return answers.pop(0)

        def elapsed_time(self, stop):
            assert stop.number == self.number + 1
            return float(self.number)

    cuda = types.SimpleNamespace(Event=Event, _sleep=spins.append, synchronize=lambda: None)
    memory = types.SimpleNamespace(zero_=lambda: None)
    torch = types.SimpleNamespace(cuda=cuda, int8="int8", empty=lambda *_, **__: memory)
    monkeypatch.setitem(sys.modules, "torch", torch)
    timer = _timer.Timer()

    def run(spun):
        answers[:] = spun
        for noted in (spins, events, launches):
            noted.clear()
        medians = timer.medians({"mine": lambda: launches.append(1)}, 1)
        return len(launches), medians

    return run


def test_what_was_late_is_launched_again(timed):
    assert timed([False]) == (1 + 1, {"mine": 0.0})  # once ahead, and once between events 0 and 1
    assert timed([True, True, False]) == (1 + 3, {"mine": 4.0})


def test_the_gpu_spins_longer_where_a_peer_is_slow_to_launch(timed, spins):
    timed([True, True, False])
    assert spins == [300_000, 600_000, 1_200_000]
    timed([False])
    assert spins == [300_000], "the next medians begin with a short one"


def test_a_host_that_is_always_late_is_named(timed, spins):
    with pytest.raises(RuntimeError, match="longer than 20000000 cycles to launch mine, 100 times"):
        timed([True] * 100)
    assert max(spins) == 20_000_000
