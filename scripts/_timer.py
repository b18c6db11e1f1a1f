"""Times of single launches on a GPU, without what the host takes."""

import statistics


class Timer:
    """Single launches between two CUDA events, behind a spinning GPU, so that what the host takes does not show. One
    that the host was late with, because something else kept it, does not count.

    The L2 is written over before each. Peers take turns, so that a clock that drifts hits all of them alike.
    """

    SPIN, LONGEST_SPIN = 300_000, 20_000_000  # cycles, about 150 us and 10 ms
    ATTEMPTS = 100

    def __init__(self):
        import torch

        self._torch, self._spin = torch, self.SPIN
        self._flush = torch.empty(2**28, dtype=torch.int8, device="cuda")  # several times the L2

    def once(self, name, function):
        """A function that waits and returns milliseconds, of a launch that is only enqueued yet."""
        cuda = self._torch.cuda
        for _ in range(self.ATTEMPTS):
            start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            cuda._sleep(self._spin)
            start.record()
            function()
            stop.record()
            if not start.query():  # the GPU is spinning still
                break
            self._spin = min(2 * self._spin, self.LONGEST_SPIN)  # some peers take long to launch
        else:
            raise RuntimeError(f"the host took longer than {self._spin} cycles to launch {name}, {self.ATTEMPTS} times")

        def wait():
            stop.synchronize()
            return start.elapsed_time(stop)

        return wait

    def medians(self, functions, repeats):
        """{name: milliseconds} of {name: function}."""
        for function in functions.values():
            function()  # loaded, and memory for its results in the pool
        self._torch.cuda.synchronize()
        self._spin = self.SPIN
        times = {name: [] for name in functions}
        for _ in range(repeats):
            waits = {name: self.once(name, function) for name, function in functions.items()}
            for name, wait in waits.items():
                times[name].append(wait())
        return {name: statistics.median(found) for name, found in times.items()}
