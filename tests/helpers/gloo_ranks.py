"""What the processes of test_context_parallel.py run: gloo groups of two, three and four of them, and many cases.

Each case is a function of this file that a rank calls with its group. Its name and arguments come through a pipe.
"""

import datetime
import os
import traceback
import warnings

import numpy as np
import torch
import torch.distributed as dist

import numba_flash
from numba_flash import distributed

from . import cpu_peers

PATIENCE = datetime.timedelta(seconds=300)  # of a machine that does much else
IMPATIENCE = datetime.timedelta(seconds=15)  # of the group in which a rank does not come


def serve(rank, size, port, pipe):
    """Answers (name, number of ranks, arguments) from the pipe until it is None. Groups: of the first 2, 3, ... ranks,
    and under 0 an impatient one of three."""
    torch.set_num_threads(1)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=PATIENCE)
    groups = {n: dist.new_group(list(range(n)), timeout=PATIENCE) for n in range(2, size + 1)}
    groups[0] = dist.new_group([0, 1, 2], timeout=IMPATIENCE)
    while (asked := pipe.recv()) is not None:
        name, number, arguments = asked
        try:
            answer = globals()[name](groups[number], *arguments)
        except Exception as error:
            answer = error, traceback.format_exc()
        pipe.send(answer)
    dist.destroy_process_group()


def arrays(seqlen, heads=4, heads_kv=2, dim=16, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, h, seqlen, dim) for h in (heads, heads_kv, heads_kv, heads))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def options_of(name, heads=4):
    return dict(
        causal=dict(causal=True),
        window=dict(window=(50, 0)),
        sinks=dict(causal=True, sinks=torch.linspace(-1, 2, heads, requires_grad=True)),
        alibi=dict(causal=True, alibi_slopes=torch.linspace(0.01, 0.3, heads), softcap=5.0),
        functions=dict(score_mod=lambda s, b, h, i, j: s - 0.01 * h * abs(i - j), mask_mod=lambda b, h, i, j: i >= j),
    )[name]


def gradients(o, lse, do, given, options):
    wanted = [*given, *([options["sinks"]] if "sinks" in options else [])]
    return torch.autograd.grad([o, lse], wanted, [do, torch.cos(lse.detach())])


def compared(group, name, method, layout, seqlen, dtype="float32"):
    """o, lse and gradients of autograd beside those of this process alone. -> names of those with equal bits; others
    are close."""
    *given, do = arrays(seqlen, dtype=getattr(torch, dtype))
    options = options_of(name)
    parts = [distributed.shard(x, group, 2, layout).requires_grad_() for x in given]
    more = dict(layout=layout, seqlen=seqlen, method=method, return_lse=True)
    o, lse = distributed.context_parallel_attention(*parts, group, **more, **options)
    mine = [o, lse, *gradients(o, lse, distributed.shard(do, group, 2, layout), parts, options)]
    found = [distributed.unshard(x.detach(), group, 2, layout, seqlen=seqlen) for x in mine[:5]]
    if "sinks" in options:
        dist.all_reduce(mine[5], group=getattr(group, "group", group))
        found.append(mine[5])
    given = [x.requires_grad_() for x in given]
    o, lse = numba_flash.attention(*given, return_lse=True, q_offset=0, **options)
    expected = [o, lse, *gradients(o, lse, do, given, options)]
    tolerance = dict(rtol=2e-5, atol=2e-5) if dtype == "float32" else dict(rtol=2e-2, atol=2e-2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), **tolerance)
    names = ("o", "lse", "dq", "dk", "dv", "dsinks")
    return [n for n, one, other in zip(names, found, expected, strict=False) if torch.equal(one, other)]


def over_peers(group, slot, queues, first, name, *arguments):
    """A case of this file with a PeerGroup."""
    return globals()[name](cpu_peers.peers(group, slot, queues, first), *arguments)


def moved_by_peers(group, slot, queues, first):
    """Views of many kinds, in several exchanges that end in another order than that in which they begin. -> how many
    letters went to each rank"""
    made = cpu_peers.peers(group, slot, queues, first)
    rank, others = made.rank, [r for r in range(made.size) if r != made.rank]

    def views(of, to, turn):
        """What rank `of` sends to `to`, with other strides than those with which it arrives."""
        if (of + to + turn) % 3 == 0:
            return []
        x = torch.arange(2 * 5 * 3 * 8 * (1 + of)).view(2, 5 * (1 + of), 3, 8) + 1000 * (10 * of + to + 100 * turn)
        return [x.transpose(1, 2), x[:, 1:3, :, ::2], x[0, :, 0, 0], x[:1, :0]]

    def places(of, to, turn):
        return [torch.full((*x.shape[:-1], 2 * x.shape[-1]), -1)[..., : x.shape[-1]] for x in views(of, to, turn)]

    waiting = []
    for turn in range(6):
        sends = {r: x for r in others if (x := views(rank, r, turn))}
        receives = {r: x for r in others if (x := places(r, rank, turn))}
        waiting.append((turn, receives, made.send_recv(sends, receives)))
    for turn, receives, finish in reversed(waiting):
        finish()
        for r, listed in receives.items():
            for x, expected in zip(listed, views(r, rank, turn), strict=True):
                assert torch.equal(x, expected), (turn, r)
    return [sent - first for sent in made.sent]


def collectives(group):
    """all_gather and reduce_scatter of a Group; the sum's order is that of ranks."""
    made = distributed.whole.group_of(group)
    gathered = made.all_gather(torch.full((made.rank, 2), float(made.rank)), tuple(range(made.size)))
    summed = made.reduce_scatter([torch.tensor([1e8, -1e8, 1.0, 1.0][made.rank]) for _ in range(made.size)])
    return [x.tolist() for x in gathered], summed.item()


def several_times(group, times):
    """The bits of dk and dv in equal calls."""
    *given, do = (distributed.shard(x, group, 2) for x in arrays(240))
    found = []
    for _ in range(times):
        parts = [x.clone().requires_grad_() for x in given]
        o = distributed.context_parallel_attention(*parts, group, causal=True)
        found.append(torch.autograd.grad(o, parts, do))
    return all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


def on_a_mesh(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),), mesh_dim_names=("cp",))
    x = torch.arange(12.0)
    assert torch.equal(distributed.shard(x, mesh["cp"], 0), distributed.shard(x, group, 0))
    with_two = init_device_mesh("cpu", (2, dist.get_world_size(group) // 2), mesh_dim_names=("dp", "cp"))
    distributed.unshard(distributed.shard(x, with_two["cp"], 0), with_two["cp"], 0)
    try:
        distributed.shard(x, with_two, 0)
    except ValueError as error:
        return str(error)


def from_caches(group):
    """A step of generation over caches of which each rank has a part: whether it has the bits of one process."""
    rank, size, share = dist.get_rank(group), dist.get_world_size(group), 512
    q, k, v, _ = arrays(share * size)
    lengths = torch.tensor([share * size - 3, share + 1], dtype=torch.int32)
    options = dict(seqlens_k=lengths, causal=True, return_lse=True)
    own = (x[:, :, rank * share : (rank + 1) * share] for x in (k, v))
    found = distributed.context_parallel_attention_kvcache(q[:, :, :1], *own, group, **options)
    expected = numba_flash.attention_kvcache(q[:, :, :1], k, v, **options)
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


def called(group):
    q, k, v, _ = (distributed.shard(x, group, 2) for x in arrays(120))
    return distributed.context_parallel_attention(q, k, v, group, causal=True).sum().item()


def refused(group, options):
    q, k, v, _ = (distributed.shard(x, group, 2) for x in arrays(120))
    return distributed.context_parallel_attention(q, k, v, group, **options)


def disagree(group, change):
    """The last rank has something else than the others."""
    q, k, v, _ = (distributed.shard(x, group, 2) for x in arrays(120))
    options = dict(causal=True)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        if change == "tokens":
            q, k, v = (x[:, :, 1:] for x in (q, k, v))
        else:
            options["window"] = (5, 0)
    try:
        distributed.context_parallel_attention(q, k, v, group, **options)
    except ValueError as error:
        return str(error)


def numbers(group):
    """Sizes of ranks that differ, and a dtype for each."""
    x = np.arange(7)
    return distributed.unshard(torch.from_numpy(distributed.shard(x, group, 0)), group, 0, seqlen=7).tolist()


def transport(group):
    """That of peer_group, and what the warning says."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = distributed.peer_group(group)
    return made.transport, [str(each.message) for each in said]
