"""The ranks of a communicator of nccl4py, for CuPy's arrays and Numba's device arrays.

Written from nccl4py 0.6's interface. It has not been run: there was no machine with nccl4py and two GPUs.
"""

from collections.abc import Callable
from typing import Any

from .groups import Buffers, Group


class NcclGroup(Group):
    """Everything runs on CuPy's current stream, so nothing overlaps: nccl4py does not know which stream wrote a buffer,
    and without a named stream it takes the default one."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.nranks

    def send_recv(self, sends: Buffers, receives: Buffers, then: Callable[[], None] | None = None) -> Callable[[], Any]:
        import cupy
        from nccl.core import group as together

        stream = cupy.cuda.get_current_stream().ptr
        with together():
            for move, some in ((self.communicator.send, sends), (self.communicator.recv, receives)):
                for rank, listed in some.items():
                    for x in listed:
                        move(_bytes(x), rank, stream=stream)
        if then is not None:
            then()
        return lambda: None


def _bytes(x: Any) -> Any:
    """x as bytes. CuPy's NCCL takes the type from the array, and does not know CuPy's bfloat16."""
    return x.reshape(-1).view("uint8")
