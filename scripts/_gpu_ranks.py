"""gpu_check on several GPUs: context_parallel_attention of one process a GPU, over NCCL and by copy engines, beside one
GPU. Where there is one GPU, two ranks are threads (_gpu_thread_ranks.py).

Each rank computes the whole problem on its own GPU, too. o, lse and dq must have its bits where that is promised
(docs/context_parallel.md), dk and dv must be close, and a second call must repeat all bits. Memory that is handed out
holds NaN before. A case that hangs or ends a process fails alone: the ranks start again for those behind it.
"""

import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path

from _gpu import Ahead, compile_ahead
from _processes import Processes, first_line

import numba_flash
from numba_flash import attention_kvcache
from numba_flash.distributed import (
    Group,
    Layout,
    context_parallel_attention,
    context_parallel_attention_kvcache,
    peer_group,
    shard,
    unshard,
)
from numba_flash.distributed.whole import group_of

STARTING, PATIENCE, JAX_PATIENCE = 60, 20, 100  # seconds for the ranks, for each case, and for JAX, which compiles
# What has the bits of one GPU. Of slices as small as these dq has not: they take two kernels where the whole takes one
OUT, ROWS, ALL = ("o", "lse"), ("o", "lse", "dq"), ("o", "lse", "dq", "dk", "dv")


def _learned(s, b, h, i, j):
    return s - 0.01 * h * abs(i - j)


def _in_blocks(b, h, i, j):
    return j <= i // 100 * 100 + 99


# name: (tokens, head_dim, dtype, what is equal to one GPU, options). 32 heads on 8 KV heads.
CASES = {
    "causal": (4096, 128, "bfloat16", ROWS, dict(causal=True)),
    "four slices": (4096, 128, "bfloat16", OUT, dict(causal=True, slices=4)),
    "one slice at a time": (4096, 128, "bfloat16", OUT, dict(causal=True, slices=4, most_gathered=1)),
    "uneven, sinks": (4099, 128, "bfloat16", ROWS, dict(causal=True, sinks=True)),
    "window": (5000, 64, "float16", ROWS, dict(window=(700, 0))),
    "window, contiguous": (5000, 64, "float16", ROWS, dict(window=(700, 0), layout="contiguous")),
    "softcap, alibi": (3001, 64, "bfloat16", ROWS, dict(causal=True, softcap=8.0, alibi_slopes=True)),
    "functions": (2500, 64, "bfloat16", ROWS, dict(score_mod=_learned, mask_mod=_in_blocks)),
    "float32": (2500, 64, "float32", ROWS, dict(causal=True)),
    "documents": (4096, 128, "bfloat16", ROWS, dict(causal=True, cu_seqlens=(0, 900, 901, 1901, 4096))),
    "each document": (
        4096, 128, "bfloat16", ROWS, dict(causal=True, cu_seqlens=(0, 900, 901, 1901, 4096), per_document=True),
    ),
    "heads": (4099, 128, "bfloat16", ALL, dict(causal=True, method="heads")),
    "heads, documents": (
        4096, 128, "bfloat16", ALL, dict(causal=True, cu_seqlens=(0, 900, 901, 1901, 4096), method="heads"),
    ),
    "ring": (4099, 128, "bfloat16", (), dict(causal=True, method="ring")),
    "ring, window, sinks": (5000, 64, "float16", (), dict(window=(700, 0), sinks=True, method="ring")),
    "ranks without tokens": (1, 128, "bfloat16", (), dict(causal=True)),
}  # fmt: skip


PEERS, PEERS_MEMORY = "peers: ", 4 << 20  # before a case's name: by copy engines, through slots that are used again


def inputs(case, device):
    """q, k, v, do in bhsd, or packed; the options of one process, and those of ranks."""
    import torch

    tokens, head_dim, dtype, _, options = CASES[case]
    options, packed = dict(options), "cu_seqlens" in options
    generator = torch.Generator(device).manual_seed(len(case))
    shapes = [(tokens, h, head_dim) if packed else (1, h, tokens, head_dim) for h in (32, 8, 8, 32)]
    given = [torch.randn(x, device=device, generator=generator).to(getattr(torch, dtype)) for x in shapes]
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            options[name] = torch.linspace(0.01, 0.5, 32, device=device)
    ranks = dict(seqlen=tokens)
    for name in ("method", "slices", "most_gathered", "layout", "cu_seqlens"):
        if name in options:
            ranks[name] = options.pop(name)
    ranks.setdefault("method", "gather")
    if options.pop("per_document", False):
        ranks["layout"] = Layout.per_document(ranks["cu_seqlens"], _size())
    return given, options, ranks


def one_gpu(given, options, cu_seqlens, kernel):
    """o, lse, dq, dk and dv of all tokens."""
    import torch

    *given, do = given
    given = [x.detach().requires_grad_() for x in given]
    if cu_seqlens is None:
        o, lse = numba_flash.attention(*given, q_offset=0, return_lse=True, kernel=kernel, **options)
    else:
        ends = torch.tensor(cu_seqlens, dtype=torch.int32, device=do.device)
        o, lse = numba_flash.attention_varlen(*given, ends, return_lse=True, kernel=kernel, **options)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, given, do)]


def of_ranks(given, options, ranks, group, kernel):
    """The same of this rank's tokens."""
    import torch

    dim, layout = 0 if "cu_seqlens" in ranks else 2, ranks.get("layout", "zigzag")
    *own, do = [shard(x, group, dim, layout) for x in given]
    own = [x.requires_grad_() for x in own]
    o, lse = context_parallel_attention(*own, group, return_lse=True, kernel=kernel, **options, **ranks)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, own, do)]


def run(case, group, kernel, device):
    """A line about a case, or an AssertionError."""
    import torch

    if case == GENERATION:
        return check_step(group, device)
    given, options, ranks = inputs(case, device)
    expected = one_gpu(given, options, ranks.get("cu_seqlens"), kernel)
    found = []
    for again in range(2):
        stream = torch.cuda.Stream(device) if again else torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            freed = [torch.full((1 << 24,), float("nan"), device=device) for _ in range(8)]
            del freed  # what reads memory that nobody wrote finds these
            found.append(of_ranks(given, options, ranks, group, kernel))
        torch.cuda.synchronize(device)
    names = ("o", "lse", "dq", "dk", "dv")
    last = 1 if "cu_seqlens" in ranks else 2  # where lse has its tokens; the others have them there or in front
    whole = [
        unshard(
            x, group, last if name == "lse" or last == 2 else 0, ranks.get("layout", "zigzag"), seqlen=ranks["seqlen"]
        )
        for name, x in zip(names, found[0], strict=True)
    ]  # before anything is compared: a rank that fails leaves the others waiting
    differ = [name for name, x, y in zip(names, *found, strict=True) if not torch.equal(x, y)]
    assert not differ, f"{differ} differ in a second call"
    tolerance = dict(rtol=2e-2, atol=2e-2) if given[0].dtype.itemsize == 2 else dict(rtol=5e-5, atol=5e-5)
    for name, x, y in zip(names, whole, expected, strict=True):
        torch.testing.assert_close(x, y, **tolerance, msg=lambda said, name=name: f"{name}: {said}")
    equal = [name for name, x, y in zip(names, whole, expected, strict=True) if torch.equal(x, y)]
    missing = [name for name in CASES[case][3] if name not in equal]
    assert not missing, f"{missing} have other bits than one GPU"
    return f"{case}: {group_of(group).transport}: bits of one GPU in {' '.join(equal) or 'none'}"


def _traced(work):
    """For another process: the reason alone comes back from there. XLA ends it when a device has waited for 40 seconds
    for another one; before that it says where it is."""

    @functools.wraps(work)
    def run(job):
        faulthandler.dump_traceback_later(20, repeat=True)
        try:
            work(job)
        except Exception:
            traceback.print_exc()
            raise

    return run


MESH_TOKENS = 2048


@_traced
def on_a_mesh(kernel):
    """JAX's shard_map, which has one process for all GPUs: o has the bits of one GPU, gradients are close."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    tokens, keys = MESH_TOKENS, jax.random.split(jax.random.key(0), 4)
    given = [jax.random.normal(x, (1, h, tokens, 128), jnp.bfloat16) for x, h in zip(keys, (32, 8, 8, 32), strict=True)]
    options = dict(causal=True, kernel=kernel)

    def with_gradients(attend, q, k, v, do):
        o, back = jax.vjp(attend, q, k, v)
        return o, *back(do)

    def local(*given):
        own = [shard(x, "cp", 2) for x in given]
        found = with_gradients(lambda *x: context_parallel_attention(*x, "cp", **options), *own)
        return tuple(unshard(x, "cp", 2) for x in found)

    devices = jax.devices()[: _size()]
    for device in devices:  # each alone, because an error of one in the mesh lets the others wait
        alone = [jax.device_put(x, device) for x in given]
        expected = with_gradients(lambda *x: numba_flash.attention(*x, q_offset=0, **options), *alone)
        print("     JAX: alone on", device, jax.block_until_ready(expected)[0].shape, flush=True)
    mesh = jax.make_mesh((_size(),), ("cp",), devices=devices)
    specs = dict(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    found = jax.block_until_ready(jax.jit(jax.shard_map(local, **specs))(*given))
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        np.testing.assert_allclose(x, y, 2e-2, 2e-2, err_msg=name)
        assert name in ("dk", "dv") or np.array_equal(x, y), f"{name} has other bits than one GPU"


def run_hollow_mesh(kernel):
    """The calls of `on_a_mesh`, without JAX: where a device's tokens stand is not known there when it traces."""
    import torch

    chunk, device = MESH_TOKENS // (2 * _size()), torch.device("cuda", 0)
    q, k, v = (torch.zeros(1, h, MESH_TOKENS, 128, device=device, dtype=torch.bfloat16) for h in (32, 8, 8))
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    for rows, offset in ((MESH_TOKENS, 0), (chunk, starts)):
        given = [x.requires_grad_() for x in (q[:, :, :rows].contiguous(), k, v)]
        o, _ = numba_flash.attention(*given, causal=True, q_offset=offset, return_lse=True, kernel=kernel)
        torch.autograd.grad(o, given, torch.zeros_like(o))


GENERATION = "generation"
SHARE = 4096  # keys of each rank


def one_step(group, size, device):
    """A step of generation: o and lse of this rank, and of one GPU with the whole cache."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    lengths = torch.tensor([size * SHARE, SHARE + 300, SHARE, 5, -1], dtype=torch.int32, device=device)
    shapes = (5, 32, 1, 128), *[(5, 8, size * SHARE, 128)] * 2
    q, k, v = (torch.randn(x, device=device, generator=generator).bfloat16() for x in shapes)
    own = (x[:, :, group.rank * SHARE : (group.rank + 1) * SHARE] for x in (k, v))
    options = dict(seqlens_k=lengths, causal=True, return_lse=True)
    return context_parallel_attention_kvcache(q, *own, group, **options), attention_kvcache(q, k, v, **options)


def check_step(group, device):
    import torch

    made = group_of(group)
    found, expected = one_step(made, made.size, device)
    torch.testing.assert_close(found.o, expected.o, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    equal = [name for name, x, y in zip(("o", "lse"), found, expected, strict=True) if torch.equal(x, y)]
    return f"{GENERATION}: bits of one GPU in {' '.join(equal) or 'none'}"


class Hollow(Group):
    """A rank to which nothing comes: to compile what it will run, in one process."""

    def __init__(self, rank, size, views=False):
        self.rank, self.size, self.views = rank, size, views

    def takes_views(self, like):
        return self.views

    def send_recv(self, sends, receives, then=None):
        for x in (x for listed in receives.values() for x in listed):
            x.zero_()
        return then or (lambda: None)

    def all_gather(self, x, counts):
        return [x] * self.size


def configs_of(runs):
    """Of the kernels that these functions would launch: (Config, compute capability). Nothing is computed."""
    from numba_flash.dispatch import launch

    found, recording, start = {}, True, launch._OnGpu.start

    def noted(kernel, *given):
        if recording:
            found[kernel._config, kernel._target.cc] = None
        else:  # of a call that keeps this function
            start(kernel, *given)

    launch._OnGpu.start = noted
    try:
        for run in runs:
            run()
    finally:
        launch._OnGpu.start, recording = start, False
    return list(found)


def run_hollow(case, kernel):
    """A case on one GPU, and the part of each rank."""
    import torch

    device = torch.device("cuda", 0)
    if case == GENERATION:
        one_step(Hollow(0, _size()), _size(), device)
        return
    given, options, ranks = inputs(case, device)
    one_gpu(given, options, ranks.get("cu_seqlens"), kernel)
    for views in (False, True):
        for rank in range(_size()):
            of_ranks(given, options, ranks, Hollow(rank, _size(), views), kernel)


def serve(rank, size, port, kernel, pipe, log):
    """Answers names of cases with (whether it passed, a line)."""
    import torch
    import torch.distributed as dist

    traces = open(log, "a")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, traces, all_threads=True)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast: not everywhere allowed
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    pipe.send("ready")
    peers = None
    while (case := pipe.recv()) is not None:
        try:
            if case.startswith(PEERS):
                peers = peers or peer_group(dist.group.WORLD, memory=PEERS_MEMORY)
                assert peers.transport == "copy engines", peers.transport
            group = peers if case.startswith(PEERS) else dist.group.WORLD
            pipe.send((True, run(case.removeprefix(PEERS), group, kernel, device)))
        except Exception as error:  # of any kind: it is the case's
            traceback.print_exc(file=traces)
            traces.flush()
            pipe.send((False, f"{case}: rank {rank}: {first_line(error)}"))
    dist.destroy_process_group()


class Ranks:
    """One process for each GPU."""

    def __init__(self, kernel, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context, size = multiprocessing.get_context("spawn"), _size()
        self.pipes, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
        self.processes = [
            context.Process(target=serve, args=(rank, size, port, kernel, pipe, log), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process in self.processes:
            process.start()
        for pipe in theirs:
            pipe.close()
        self.answers("starting", STARTING)

    def run(self, case):
        """-> (whether it passed, a line)"""
        for pipe in self.pipes:
            pipe.send(case)
        found = self.answers(case, PATIENCE)
        return next((each for each in found if not each[0]), found[0])

    def answers(self, what, seconds):
        """Of all ranks. RuntimeError if one does not come, with what the others say."""
        ends, found = time.monotonic() + seconds, []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(ends - time.monotonic(), 0)):
                    raise RuntimeError(f"{what}: rank {rank} does not answer within {seconds} s; others: {found}")
                found.append(pipe.recv())
            except (EOFError, OSError):
                raise RuntimeError(f"{what}: rank {rank} has ended; others: {found}") from None
        return found

    def end(self, hanging):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if hanging and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # it says where it is
            elif not hanging:
                pipe.send(None)
        for process in self.processes:
            process.join(1 if hanging else 15)
            if process.is_alive():
                process.kill()


class Threads:
    """Two ranks on one GPU."""

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, case):
        import _gpu_thread_ranks
        import torch

        device = torch.device("cuda", 0)
        try:
            found = _gpu_thread_ranks.run(lambda group: run(case, group, self.kernel, device), _size())
        except Exception as error:  # as in `serve`
            traceback.print_exc()
            return False, f"{case}: {first_line(error)}"
        return True, found[0]

    def end(self, hanging):
        pass


def left_out(kernel, library):
    """Why nothing is checked, or None."""
    if importlib.util.find_spec(library) is None:
        return f"left out: no {library}"
    return None if kernel in ("mma", "wgmma") else "mma and wgmma"


def check_mesh(kernel, options, tools):
    if (why := left_out(kernel, "jax")) is not None:
        return why
    if _devices() < 2:
        return "left out: one GPU only"
    compile_ahead(configs_of([functools.partial(run_hollow_mesh, kernel)]))
    if Ahead.only:
        return Ahead.note
    errors = Processes(on_a_mesh, [kernel], 1).errors(time.monotonic() + JAX_PATIENCE)
    assert not errors, errors[kernel]
    return f"JAX's shard_map on {_size()} GPUs"


def check(kernel, options, tools):
    if (why := left_out(kernel, "torch")) is not None:
        return why
    cases = [*CASES, GENERATION]
    compile_ahead(configs_of(functools.partial(run_hollow, case, kernel) for case in cases))
    if Ahead.only:
        return Ahead.note
    cases += [PEERS + case for case in cases] if _devices() > 1 else []
    ranks, passed, failed, log = None, 0, [], tempfile.mktemp("-ranks.txt")
    for case in cases:
        began, hangs = time.monotonic(), False
        try:
            ranks = ranks or (Ranks(kernel, log) if _devices() > 1 else Threads(kernel))
            good, line = ranks.run(case)
        except RuntimeError as error:
            good, line, hangs = False, str(error), True
        if hangs and ranks is not None:
            ranks.end(hanging=True)
            ranks = None
        print(f"     {'ok  ' if good else 'FAIL'} {time.monotonic() - began:5.1f} s  {line}", flush=True)
        passed, failed = passed + good, failed + [] if good else [*failed, line]
    if ranks is not None:
        ranks.end(hanging=False)
    if failed:
        print(Path(log).read_text() if Path(log).exists() else "")
    assert not failed, f"{len(failed)} of {len(cases)}: " + "; ".join(failed)
    return f"{passed} cases on {_devices()} GPU(s)"


def _devices():
    """How many GPUs there are. torch would make this process hold on to one."""
    from cuda.bindings import driver

    driver.cuInit(0)
    return driver.cuDeviceGetCount()[1]


def _size():
    """How many ranks there are."""
    return min(max(_devices(), 2), 4)
