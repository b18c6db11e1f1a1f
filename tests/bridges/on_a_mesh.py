"""Four processes as a mesh of two by two: attention of DTensors against attention of the whole arrays.

python on_a_mesh.py FOLDER; test_torch_dtensor.py reads what each case did.
"""

import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import numba_flash

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K = 4, 8, 4, 5, 7
R, B, H = Replicate(), "batch", "heads"
# {case: (what each dimension of the mesh shards, layout, options)}
CASES = {
    "batch": ((B, ""), "bhsd", ()),
    "heads": (("", H), "bhsd", ()),
    "both": ((B, H), "bhsd", ()),
    "heads over all": ((H, H), "bhsd", ()),
    "rows first": ((B, H), "bshd", ()),
    "options": ((B, H), "bhsd", ("bias", "mask", "alibi_slopes", "sinks", "seqlens_k", "q_offset")),
    "broadcast": ((B, H), "bhsd", ("one bias", "one mask", "slopes of each entry")),
    "compiled": ((B, H), "bhsd", ("bias",)),
    "replicated": (("", ""), "bhsd", ("sinks",)),
    "packed": (("", H), "packed", ("sinks",)),
    "functions": ((B, H), "bhsd", ("distances", "bias")),
    "functions, compiled": ((B, H), "bhsd", ("distances",)),
    "functions of heads": ((B, ""), "bshd", ("distances of heads",)),
    "functions, packed": (("", H), "packed", ("distances",)),
}


def arrays(layout, names):
    """{argument: (array, axis of the batch, axis of the heads)}"""
    torch.manual_seed(0)

    def qkv(heads, rows):
        if layout == "packed":
            return torch.randn(BATCH * rows, heads, 8).double(), None, 1
        shape = (BATCH, heads, rows, 8) if layout == "bhsd" else (BATCH, rows, heads, 8)
        return torch.randn(shape).double(), 0, 1 if layout == "bhsd" else 2

    made = dict(q=qkv(HEADS, SEQLEN_Q), k=qkv(HEADS_KV, SEQLEN_K), v=qkv(HEADS_KV, SEQLEN_K))
    others = {
        "bias": ("bias", torch.randn(1, HEADS, SEQLEN_Q, SEQLEN_K).double(), None, 1),
        "one bias": ("bias", torch.randn(SEQLEN_Q, SEQLEN_K).double(), None, None),
        "mask": ("mask", torch.rand(BATCH, 1, 1, SEQLEN_K) > 0.2, 0, None),
        "one mask": ("mask", torch.rand(SEQLEN_Q, SEQLEN_K) > 0.2, None, None),
        "alibi_slopes": ("alibi_slopes", torch.rand(HEADS), None, 0),
        "slopes of each entry": ("alibi_slopes", torch.rand(BATCH, HEADS), 0, 1),
        "sinks": ("sinks", torch.randn(HEADS), None, 0),
        "seqlens_k": ("seqlens_k", torch.tensor([7, 3, 0, 5], dtype=torch.int32), 0, None),
        "distances": ("aux", torch.randn(SEQLEN_Q + SEQLEN_K).double(), None, None),
        "distances of heads": ("aux", torch.randn(HEADS, SEQLEN_Q + SEQLEN_K).double(), None, None),
        "q_offset": ("q_offset", torch.tensor([2, -1, 0, 4], dtype=torch.int32), 0, None),
    }
    return made | {name: (array, batch, heads) for name, array, batch, heads in (others[x] for x in names)}


def of_distances(score, b, h, i, j, table):
    return score + score * table[abs(i - j)]


def of_heads(score, b, h, i, j, table):
    return score + table[h, abs(i - j)]


def attend(layout, given, compiled=False):
    """(o, lse, gradients) of the call."""
    given = {name: x.clone() for name, x in given.items()}
    differentiable = [x.requires_grad_() for name, x in given.items() if x.is_floating_point()]
    if layout == "packed":
        spans = (torch.arange(BATCH + 1, dtype=torch.int32) * rows for rows in (SEQLEN_Q, SEQLEN_K))
        spans = [distribute_tensor(x, given["q"].device_mesh, [R, R]) if mesh_of(given) else x for x in spans]
        run, options = numba_flash.attention_varlen, dict(cu_seqlens_q=spans[0], cu_seqlens_k=spans[1], causal=True)
    else:
        run, options = numba_flash.attention, dict(layout=layout, causal=True)

    def call(given):
        if "aux" not in given:
            return run(**given, **options, return_lse=True)
        others = {name: x for name, x in given.items() if name != "aux"}
        score_mod = of_heads if given["aux"].ndim == 2 else of_distances
        return run(**others, **options, score_mod=score_mod, aux=(given["aux"],), return_lse=True, kernel="reference")

    found = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(given)
    (found.o.square().sum() + found.lse.nan_to_num(neginf=0).sin().sum()).backward()
    return found.o, found.lse, *(x.grad for x in differentiable)


def mesh_of(given):
    return hasattr(given["q"], "device_mesh")


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check(mesh, splits, layout, names, compiled):
    given = arrays(layout, names)
    expected = attend(layout, {name: x for name, (x, *_) in given.items()})
    placed = {}
    for name, (x, *axes) in given.items():
        of = {B: axes[0], H: axes[1], "": None}
        placements = [R if of[split] is None else Shard(of[split]) for split in splits]
        placed[name] = distribute_tensor(x, mesh, placements)
    found = attend(layout, placed, compiled)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one), other, rtol=1e-5 if other.dtype == torch.float32 else 1e-10, atol=1e-5)
    assert found[0].placements == placed["q"].placements


def of_every_other_head(b, h, i, j):
    return h % 2 == 0


def refused(mesh):
    given = arrays("bhsd", ("bias",))
    x = {name: distribute_tensor(x, mesh, [R, R]) for name, (x, *_) in given.items()}
    seen = []
    for change, options in (
        (dict(q=x["q"].redistribute(placements=[Shard(2), R])), {}),
        (dict(q=x["q"].redistribute(placements=[Shard(0), R])), {}),
        (dict(k=given["k"][0]), {}),
        ({}, dict(dropout_p=0.5, seed=1)),
        ({}, dict(score_mod=lambda s, b, h, i, j: s + h)),  # of q that is replicated
        ({name: x[name].redistribute(placements=[R, Shard(1)]) for name in "qkv"}, dict(mask_mod=of_every_other_head)),
        ({name: distribute_tensor(x[name].full_tensor()[:, :2], mesh, [Shard(1), Shard(1)]) for name in "qkv"}, {}),
        ({name: distribute_tensor(x[name].full_tensor()[:3], mesh, [Shard(0), R]) for name in "qkv"}, {}),
    ):
        try:
            numba_flash.attention(**{name: x[name] for name in "qkv"} | change, **options)
            seen.append("nothing")
        except (NotImplementedError, ValueError, TypeError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def run(rank, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 4)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    results = {}
    for name, (splits, layout, names) in CASES.items():
        try:
            check(mesh, splits, layout, names, "compiled" in name)
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
    results["refused"] = refused(mesh)
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Where processes may be forked, they share what is imported here.
    how = "fork" if sys.platform == "linux" else "spawn"
    torch.multiprocessing.start_processes(run, (Path(sys.argv[1]),), nprocs=4, start_method=how)
