"""A Group: the processes, threads or GPUs that share a sequence, and the one way in which data moves among them.

`send_recv` is the only primitive. The Layout says what each rank sends to each other rank, so no sizes are exchanged.
The receiver sums in the order of ranks, so sums do not depend on a library's algorithm.
"""

import abc
from collections.abc import Callable
from typing import Any

MOST_MESSAGES = 32  # messages from one rank to another in one exchange
Buffers = dict[int, list[Any]]  # the other rank's number -> arrays


class Group(abc.ABC):
    """rank: the number of this member; size: the number of members.

    A subclass sets both and implements `send_recv`. A caller can pass torch's process groups and nccl4py's
    communicators as they are; numba_flash wraps them.
    """

    rank: int
    size: int
    transport: str = "send_recv of the Group"  # what moves data, in words

    @abc.abstractmethod
    def send_recv(self, sends: Buffers, receives: Buffers, then: Callable[[], None] | None = None) -> Callable[[], Any]:
        """Starts to send `sends` and to receive into `receives`, lists of arrays by rank, and calls `then` when all are
        there. -> a function that makes the caller, or its stream, wait for that. Buffers must not be used before. The
        arrays are contiguous, or any with `takes_views`.

        All ranks call this equally often. The n-th array sent to a rank is the n-th that it receives from here in the
        same call. Calls may be waited for in any order. It raises RuntimeError if another rank is gone.
        """

    def takes_views(self, like: Any) -> bool:
        """Whether `send_recv` takes arrays like this one with any strides, at least as fast as contiguous ones."""
        return False

    def beside(self, work: Callable[[], Any], like: Any, lane: int) -> Callable[[], Any]:
        """Runs `work`, which computes. -> a function that makes the caller's stream wait for it. On a GPU two lanes run
        concurrently, so that one fills multiprocessors that the other leaves idle. like: an array of the device.
        """
        work()
        return nothing

    def all_gather(self, x: Any, counts: tuple[int, ...]) -> list[Any]:
        """The arrays of all ranks, which may differ in the first dimension. counts: its length on each rank."""
        xp, others = namespace(x), [rank for rank in range(self.size) if rank != self.rank]
        x = contiguous(x)
        found = {r: empty(x, (counts[r], *x.shape[1:])) for r in others if counts[r]}
        sends = dict.fromkeys(others, [x]) if x.shape[0] else {}
        self.send_recv(sends, {r: [got] for r, got in found.items()})()
        found[self.rank] = x
        return [found[r] if r in found else xp.asarray(x[:0]) for r in range(self.size)]

    def reduce_scatter(self, parts: list[Any]) -> Any:
        """The sum over ranks, in their order, of each rank's part for this one. parts: this rank's part for each rank,
        all of one shape."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = {r: empty(parts[self.rank], parts[self.rank].shape) for r in others}
        self.send_recv({r: [contiguous(parts[r])] for r in others}, {r: [got] for r, got in found.items()})()
        found[self.rank] = parts[self.rank]
        total = found[0]
        for rank in range(1, self.size):
            total = total + found[rank]
        return total


def nothing() -> None:
    pass


def namespace(x: Any) -> Any:
    """The array API of x's library."""
    import array_api_compat

    return array_api_compat.array_namespace(x)


def empty(like: Any, shape: tuple[int, ...], dtype: Any = None, fill: Any = None) -> Any:
    """A contiguous array on the device of `like`, not written to or full of `fill`."""
    if fill is None and hasattr(like, "new_empty"):  # torch's own, in a tenth of the time
        return like.new_empty(shape, dtype=dtype)
    import array_api_compat

    xp, where = namespace(like), array_api_compat.device(like)
    dtype = like.dtype if dtype is None else dtype
    return (
        xp.empty(shape, dtype=dtype, device=where) if fill is None else xp.full(shape, fill, dtype=dtype, device=where)
    )


def is_contiguous(x: Any) -> bool:
    return bool(x.is_contiguous() if hasattr(x, "is_contiguous") else x.flags.c_contiguous)


def contiguous(x: Any) -> Any:
    """x, or a copy whose elements follow each other."""
    if is_contiguous(x):
        return x
    made = empty(x, tuple(x.shape))
    copy(made, x)
    return made


def copy(to: Any, x: Any) -> None:
    """to[...] = x, of equal shapes. torch's kernel copies views element by element, so here by elements of 16 bytes."""
    both = to, x
    if to.dtype == x.dtype and hasattr(x, "data_ptr") and all(_of_16_bytes(y) for y in both):
        import torch

        to, x = (y.view(torch.complex128) for y in both)
    to[...] = x


def _of_16_bytes(x: Any) -> bool:
    """Whether the memory of this torch tensor is rows of whole, aligned elements of 16 bytes."""
    each, strides = 16 // x.element_size(), x.stride()
    steps = (x.storage_offset(), x.shape[-1], *strides[:-1])
    return strides[-1] == 1 and x.data_ptr() % 16 == 0 and not any(step % each for step in steps)
