"""Which launches share a tile counter: with a driver that is not there, since it says what decides."""

import sys
import types

import pytest

from numba_flash.gpu import stream_numbers, tile_counters as counters

ACTIVE, NONE = "active", "none"


class Driver(types.SimpleNamespace):
    """As much of cuda.bindings.driver as counters asks. A stream is a handle; numbers says what number it has now."""

    CUstreamCaptureStatus = types.SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=ACTIVE)

    def __init__(self):
        super().__init__(numbers={}, capturing=set(), contexts=[0])

    def cuStreamIsCapturing(self, stream):
        return self.answer(ACTIVE if stream in self.capturing else NONE)

    def cuStreamGetId(self, stream):
        return self.answer(self.numbers[stream])

    def answer(self, value):
        return (0, value) if self.contexts else (types.SimpleNamespace(name="CUDA_ERROR_INVALID_CONTEXT"), None)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    bindings = types.SimpleNamespace(driver=made)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    for name in ("_unused", "_of_default", "_of_stream"):
        monkeypatch.setattr(counters, name, {})
    slabs = iter(range(1000, 10**6, 1000))
    monkeypatch.setattr(counters, "STREAMS", 4)
    monkeypatch.setattr(stream_numbers.context, "ensure", made.contexts.append)
    monkeypatch.setattr(counters, "_slab", lambda device, size: [next(slabs) + i for i in range(4)])
    return made


def pointer(stream, device=0):
    return counters.counter(device, stream)


def test_a_stream_keeps_its_counter_and_shares_it_with_nobody(driver):
    driver.numbers = {2: 11, 700: 12}
    found = {(device, stream): pointer(stream, device) for device in (0, 1) for stream in (0, 2, 700)}
    assert len(set(found.values())) == 6
    assert found == {where: pointer(where[1], where[0]) for where in found}
    assert pointer(1) == pointer(0), "two handles of the legacy default stream"


def test_a_handle_that_comes_back_is_another_stream(driver):
    driver.numbers = {2: 11, 700: 12}
    before = pointer(2), pointer(700)
    driver.numbers = {2: 13, 700: 14}  # in another thread, and behind a cuStreamDestroy
    assert not {pointer(2), pointer(700)} & set(before)


def test_every_captured_launch_has_its_own(driver):
    driver.numbers = {700: 12}
    mine = pointer(700)
    driver.capturing = {700}
    assert len({mine, *(pointer(700) for _ in range(9))}) == 10, "more than a slab"
    driver.capturing = set()
    assert pointer(700) == mine


def test_a_thread_that_has_had_no_call_of_cuda_yet(driver):
    driver.numbers = {2: 11, 700: 12}
    here = pointer(2)
    driver.contexts.clear()
    driver.numbers[2] = 13
    assert pointer(2) != here and driver.contexts == [0]
    driver.contexts.clear()
    driver.capturing = {700}
    assert pointer(700) != pointer(700) and driver.contexts == [0]


def test_streams_without_end_take_memory_with_an_end(driver):
    driver.numbers = {stream: stream for stream in range(3, 1000)}
    default, busy = pointer(0), pointer(3)
    seen = set()
    for stream in range(4, 1000):
        seen.add(pointer(stream))
        assert (pointer(0), pointer(3)) == (default, busy)
    assert not {default, busy} & seen and len(seen) <= 2 * counters.STREAMS
    assert len(counters._of_stream) <= counters.STREAMS
