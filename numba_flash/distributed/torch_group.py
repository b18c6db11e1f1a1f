"""The ranks of a torch process group: NCCL on GPUs, gloo on CPUs."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .groups import MOST_MESSAGES, Buffers, Group

PLACES = 2  # number of the stream that copies received data to its place; lanes have streams 0 and 1


@functools.cache
def side_stream(current: Any, number: int) -> Any:
    """A side stream. Each current stream has its own, so that it can wait for it before it reuses memory."""
    return torch.cuda.Stream(current.device)


class TorchGroup(Group):
    def __init__(self, group: Any) -> None:
        if hasattr(group, "get_group"):
            if group.ndim != 1:
                raise ValueError(f"a DeviceMesh must have one dimension, as mesh['cp'] has, not {group.ndim}")
            group = group.get_group()
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of group")
        self.transport = dist.get_backend(group)
        self._tags = itertools.count()  # a new tag for each message, so that gloo cannot confuse two

    def send_recv(self, sends: Buffers, receives: Buffers, then: Callable[[], None] | None = None) -> Callable[[], Any]:
        first = next((x for some in (sends, receives) for listed in some.values() for x in listed), None)
        if first is None or not first.is_cuda:
            return self._on_host(sends, receives, then)
        current = torch.cuda.current_stream(first.device)
        side = side_stream(current, PLACES)
        with self._said(sends, receives):
            # NCCL's own stream waits for the current one, not for the last exchange's `then`. So exchanges follow each
            # other at once, before a persistent kernel takes all multiprocessors.
            works = dist.batch_isend_irecv(self._operations(sends, receives))
        with torch.cuda.stream(side), self._said(sends, receives):
            for work in works:
                work.wait()  # the stream waits, not the host
            if then is not None:
                then()
            arrived = side.record_event()
        kept = [sends, receives, then]  # keeps them alive: the current stream must not reuse their memory

        def finish() -> None:
            current.wait_event(arrived)
            kept.clear()

        return finish

    def beside(self, work: Callable[[], Any], like: Any, lane: int) -> Callable[[], Any]:
        if not like.is_cuda:
            return super().beside(work, like, lane)
        current = torch.cuda.current_stream(like.device)
        stream = side_stream(current, lane % 2)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
            done = stream.record_event()
        kept = [work]  # keeps its arrays alive, as in send_recv

        def finish() -> None:
            current.wait_event(done)
            kept.clear()

        return finish

    def _on_host(self, sends: Buffers, receives: Buffers, then: Callable[[], None] | None) -> Callable[[], None]:
        with self._said(sends, receives):
            works = [x.op(x.tensor, x.peer, self.group, x.tag) for x in self._operations(sends, receives)]

        def finish() -> None:
            with self._said(sends, receives):
                for work in works:
                    work.wait()
            if then is not None:
                then()

        return finish

    def _operations(self, sends: Buffers, receives: Buffers) -> list[Any]:
        tag, number = next(self._tags) * MOST_MESSAGES, functools.partial(dist.get_global_rank, self.group)
        return [
            dist.P2POp(op, x, number(rank), self.group, tag + n)
            for op, some in ((dist.isend, sends), (dist.irecv, receives))
            for rank, listed in some.items()
            for n, x in enumerate(listed)
        ]

    def _said(self, sends: Buffers, receives: Buffers) -> "_Said":
        return _Said(f"rank {self.rank} of {self.size} could not exchange tokens with {sorted({*sends, *receives})}")


class _Said:
    """Adds the ranks concerned to torch's errors."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"{self.what}: one of them has ended, hangs or called something else. {error}"
            ) from error
