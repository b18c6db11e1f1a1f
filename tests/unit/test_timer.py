"""scripts/_gpu.py: a launch that the host was late with does not count."""

import itertools
import sys
import types
from pathlib import Path

import pytest


@pytest.fixture
def timed(monkeypatch):
    """(was the GPU done spinning, try by try) -> (how many launches, medians), with a torch that only counts."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import _gpu

    def run(spun):
        answers, launches, numbers = iter(spun), [], itertools.count()

        class Event:
            def __init__(self, enable_timing):
                self.number = next(numbers)

            def record(self):
                pass

            synchronize = record

            def query(self):
                return next(answers)

            def elapsed_time(self, stop):
                assert stop.number == self.number + 1
                return float(self.number)

        cuda = types.SimpleNamespace(Event=Event, _sleep=lambda cycles: None, synchronize=lambda: None)
        memory = types.SimpleNamespace(zero_=lambda: None)
        torch = types.SimpleNamespace(cuda=cuda, int8="int8", empty=lambda *_, **__: memory)
        monkeypatch.setitem(sys.modules, "torch", torch)
        medians = _gpu.Timer().medians({"mine": lambda: launches.append(1)}, 1)
        return len(launches), medians

    return run


def test_what_was_late_is_launched_again(timed):
    assert timed([False]) == (1 + 1, {"mine": 0.0})  # once ahead, and once between events 0 and 1
    assert timed([True, True, False]) == (1 + 3, {"mine": 4.0})


def test_a_host_that_is_always_late_is_named(timed):
    with pytest.raises(RuntimeError, match="longer than 300000 cycles to launch mine, 100 times"):
        timed([True] * 100)
