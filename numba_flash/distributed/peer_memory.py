"""Memory of GPUs that the processes of one host share, and operations on streams that torch has no call for.

A flag that never comes holds a stream for ever. So behind the pulls an operation of torch's NCCL waits, on a group of
this rank alone; it starts no kernel. If it does not end within the timeout of the given group, torch's watchdog ends
the process with an error, as for any operation of NCCL that hangs.
"""

import socket
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..machine import context
from .groups import Group, copy
from .peers import FLAGS, PULLING, STAGING, Letter, PeerGroup
from .torch_group import PLACES, TorchGroup, side_stream

MOST_PITCH = 2**31 - 1  # bytes between rows that a copy engine can pass over


def of(group: Any, nbytes: int) -> Group:
    plain = TorchGroup(group)
    obstacle = _obstacle(plain)
    if not obstacle:
        return PeerGroup(plain.group, PeerMemory(plain.group, nbytes))
    if plain.size > 1:
        warnings.warn(f"tokens are moved by {plain.transport}: {obstacle}", RuntimeWarning, stacklevel=3)
    return plain


def _obstacle(group: TorchGroup) -> str:
    """Why copy engines cannot serve these ranks, or "". The same on all ranks."""
    if group.size == 1:
        return "there is one rank"
    if group.transport != "nccl":
        return f"the backend of the group is {group.transport}, not nccl"
    own, every = torch.cuda.current_device(), [("", 0)] * group.size
    dist.all_gather_object(every, (socket.gethostname(), own), group=group.group)
    hosts, devices = zip(*every, strict=True)
    found, said = "", [""] * group.size
    if len(set(hosts)) > 1:
        return f"the ranks are on several hosts, {sorted(set(hosts))}"
    if len(set(devices)) < group.size:
        return f"ranks have the same numbers of GPUs, {list(devices)}: torch.cuda.set_device before, all GPUs visible"
    for other in set(devices) - {own}:
        if other >= torch.cuda.device_count() or not torch.cuda.can_device_access_peer(own, other):
            found = f"GPU {own} cannot read the memory of GPU {other}"
    dist.all_gather_object(said, found, group=group.group)
    return max(said)


class PeerMemory:
    """What a PeerGroup needs of this rank's GPU, the current one. A collective call."""

    def __init__(self, group: Any, nbytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric.empty(FLAGS + nbytes, dtype=torch.uint8, device=self.device)
        self._handle = symmetric.rendezvous(self.memory, group.group_name)
        self.bases = [int(address) for address in self._handle.buffer_ptrs]
        self.streams = [torch.cuda.Stream(self.device, priority=-1) for _ in (STAGING, PULLING)]
        self._alone = _of_one_rank(group._get_backend(self.device).options._timeout)
        weakref.finalize(self, self._alone.abort)
        self._token = torch.zeros(1, device=self.device)
        self._watched()
        self.memory[:FLAGS] = 0
        torch.cuda.synchronize(self.device)
        dist.barrier(group, device_ids=[self.device.index])  # all flags are 0 before the first one rises
        torch.cuda.synchronize(self.device)

    def serves(self, like: Any) -> bool:
        """A CUDA graph would wait for the same numbers again: while one is recorded, NCCL serves."""
        return like.is_cuda and not torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        context.ensure(self.device.index)
        ready = torch.cuda.current_stream(self.device).record_event()
        for stream in self.streams:
            stream.wait_event(ready)

    def end(self, then: Callable[[], None] | None) -> Callable[[], Any]:
        """Calls `then` when all is pulled. -> a function that makes the current stream wait for that"""
        current, (staging, pulling) = torch.cuda.current_stream(self.device), self.streams
        pulling.wait_stream(staging)
        done = pulling.record_event()
        with torch.cuda.stream(pulling):
            self._watched()
        if then is not None:
            places = side_stream(current, PLACES)
            places.wait_event(done)
            with torch.cuda.stream(places):
                then()
                done = places.record_event()
        return lambda: current.wait_event(done)

    def _watched(self) -> None:
        """torch's watchdog waits for what the current stream has done until here."""
        self._alone.allreduce([self._token])

    def stage(self, at: int, letter: Letter) -> None:
        """Copies a letter to this GPU's shared memory."""
        with torch.cuda.stream(self.streams[STAGING]):
            for offset, x in letter:
                place = self.memory[at + offset :][: x.numel() * x.element_size()]
                copy(place.view(x.dtype).view(x.shape), x)

    def pull(self, address: int, letter: Letter) -> None:
        """Copies a letter at an address of another GPU to its places."""
        from cuda.bindings import runtime

        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, self.streams[PULLING].cuda_stream
        for offset, x in letter:
            width, rows, pitch, planes = in_planes(x)
            for n, plane in enumerate(planes):
                to, source = x.data_ptr() + plane, address + offset + n * width * rows
                _checked(runtime.cudaMemcpy2DAsync(to, pitch, source, width, width, rows, kind, stream))

    def write(self, stream: int, address: int, value: int) -> None:
        """Raises a flag. Whoever sees it sees all that the stream did before."""
        from cuda.bindings import driver

        _checked(driver.cuStreamWriteValue32(self.streams[stream].cuda_stream, address, value % 2**32, 0))

    def wait(self, stream: int, address: int, value: int) -> None:
        """Holds the stream until the flag has this number, or a later one: numbers go round after 32 bits."""
        from cuda.bindings import driver

        _checked(driver.cuStreamWaitValue32(self.streams[stream].cuda_stream, address, value % 2**32, 0))


def _of_one_rank(timeout: Any) -> Any:
    """A group of NCCL, without torch.distributed.new_group, for which all processes of the job would have to come."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)


def in_planes(x: Any) -> tuple[int, int, int, list[int]]:
    """How x lies in memory, in bytes: planes begin at these offsets, each with rows of this width and pitch."""
    width, rows, pitch, offsets = x.element_size(), 1, 0, [0]
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        step, one = stride * x.element_size(), len(offsets) == 1
        if size == 1:
            continue
        if one and rows == 1 and step == width:
            width *= size
        elif one and rows == 1 and step <= MOST_PITCH:
            rows, pitch = size, step
        elif one and step == rows * pitch:
            rows *= size
        else:
            offsets = [n * step + offset for n in range(size) for offset in offsets]
    return width, rows, max(pitch, width), offsets


def _checked(result: tuple[Any, ...]) -> None:
    if result[0]:
        raise RuntimeError(f"a GPU cannot read another's memory: {result[0].name}")
