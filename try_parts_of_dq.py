"""Stage 1: new options beside float64. Stage 2: rows of the fused backward and others, timed. Stage 3: bench_precision."""

import json, math, os, sys, time, statistics, traceback

sys.path.insert(0, "scripts")
import _clone
from pathlib import Path
import importlib.machinery, importlib.util

loader = importlib.machinery.SourceFileLoader("bench_precision", "scripts/bench_precision")
spec = importlib.util.spec_from_loader("bench_precision", loader)
bp = importlib.util.module_from_spec(spec)
loader.exec_module(bp)
import numpy as np
import numba_flash
from numba_flash.select import tiles, backward as sb, forward as sf
from numba_flash.dispatch import backward as db, forward as df
from numba_flash.api import backward as gradients
from _gpu import compile_ahead, Timer, job, machine

OUT = Path(os.environ["OUT"])
START = time.perf_counter()
W, M = tiles.WideBackward, tiles.MmaWide


def clock(*words):
    print(f"[{time.perf_counter() - START:5.1f}]", *words, flush=True)


def clear():
    for x in (sb.v2_configs, sb.mma_configs, sb.wide_configs, sb.wgmma_configs):
        x.cache_clear()
    db._plans.clear()
    df._plans.clear()


BASE = {k: v for k, v in tiles.TABLES.items()}


def use(rows):
    """rows: {table: [rows first]}"""
    tiles.TABLES.update(BASE)
    for k, first in rows.items():
        tiles.TABLES[k] = (*first, *BASE[k])
    clear()


def by_place(s, b, h, i, j, table, slopes):
    return math.tanh((1.0 + table[b, i % 5, j % 7]) * s) - slopes[h] * abs(i - j)


def documents(b, h, i, j, table, slopes):
    return i // 37 == j // 37


def with_both():
    return dict(score_mod=by_place, mask_mod=documents)


def fused(own, other, g, d, **k):
    return W(d, own, other, 16, g, 1, plain=True, of_dq=True, **k)


VARIANTS = {  # (dtype, head_dim): {name: rows}
    ("float32", 64): {
        "64x32g1": {"mma_dkdv_float32": [fused(64, 32, 1, 64)]},
        "64x32g2": {"mma_dkdv_float32": [fused(64, 32, 2, 64)]},
        "wr32": {"mma_dkdv_float32": [W(64, 64, 32, 32, 2, 1)], "mma_dq_float32": [W(64, 64, 64, 32, 2, 1)]},
    },
    ("float32", 128): {"64x32g2": {"mma_dkdv_float32": [fused(64, 32, 2, 128)]}},
    ("float32", 256): {
        "64x16g2": {"mma_dkdv_float32": [fused(64, 16, 2, 256)]},
        "32x16g2": {"mma_dkdv_float32": [fused(32, 16, 2, 256)]},
    },
    ("float64", 64): {
        "32x16g2": {"mma_dkdv_float64": [fused(32, 16, 2, 64)]},
        "32x32g2": {"mma_dkdv_float64": [fused(32, 32, 2, 64)]},
    },
    ("float64", 128): {"32x16g2": {"mma_dkdv_float64": [fused(32, 16, 2, 128)]}},
}
FORWARD = {
    ("float32", 64): {"128x64wr32g2": M(64, 128, 64, 32, 2, 1, 8), "64x64wr32g2": M(64, 64, 64, 32, 2, 1, 8)},
    ("float32", 128): {"128x32wr32g2": M(128, 128, 32, 32, 2, 1, 8), "128x16wr32": M(128, 128, 16, 32, 1, 1, 8)},
    ("float32", 256): {"64x32wr32g2": M(256, 64, 32, 32, 2, 1, 8)},
}


def option_cases():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        for d, n, m in ((40, 150, 203), (100, 131, 150)):
            shape = lambda *s: rng.standard_normal(s)
            q, k, v, do = (shape(2, 4, n, d), shape(2, 2, m, d), shape(2, 2, m, d), shape(2, 4, n, d))
            yield (
                f"{dtype} {d} bias mask",
                dtype,
                (q, k, v, do),
                dict(bias=shape(4, n, m), mask=rng.random((2, 1, n, m)) < 0.7, causal=True),
            )
            yield (
                f"{dtype} {d} functions",
                dtype,
                (q, k, v, do),
                dict(**with_both(), aux=(rng.random((2, 5, 7)).astype(np.float32), np.float32([0.3, -0.1, 0.2, 0.05]))),
            )


def truth(q, k, v, do, options):
    import torch

    t = [torch.tensor(x, dtype=torch.float64, device="cuda").requires_grad_() for x in (q, k, v)]
    n, m = q.shape[2], k.shape[2]
    s = t[0] @ t[1].repeat_interleave(2, 1).mT / q.shape[3] ** 0.5
    i, j = torch.arange(n, device="cuda")[:, None] + m - n, torch.arange(m, device="cuda")
    seen = torch.ones(2, 4, n, m, dtype=torch.bool, device="cuda")
    bias = None
    if "bias" in options:
        bias = torch.tensor(options["bias"], dtype=torch.float64, device="cuda").requires_grad_()
        s = s + bias
        seen = seen & torch.tensor(options["mask"], device="cuda") & (i >= j)
    else:
        table, slopes = (torch.tensor(x, dtype=torch.float64, device="cuda") for x in options["aux"])
        s = torch.tanh((1 + table[:, i % 5, j % 7][:, None]) * s) - slopes[:, None, None] * (i - j).abs()
        seen = seen & (i // 37 == j // 37)
    p = torch.nan_to_num(torch.softmax(s.masked_fill(~seen, -math.inf), -1))
    o = p @ t[2].repeat_interleave(2, 1)
    leaves = [*t, bias] if bias is not None else t
    return o, torch.autograd.grad(o, leaves, torch.tensor(do, dtype=torch.float64, device="cuda"))


def padded(x, dtype):
    import torch

    step = 4 if dtype == "float32" else 2
    t = torch.zeros((*x.shape[:3], -(-x.shape[3] // step) * step), dtype=getattr(torch, dtype), device="cuda")[
        ..., : x.shape[3]
    ]
    t.copy_(torch.tensor(x))
    return t


def stage1(cases):
    import torch

    for name, dtype, (q, k, v, do), options in cases:
        try:
            a = [padded(x, dtype) for x in (q, k, v, do)]
            opts = {n: (torch.tensor(x, device="cuda") if isinstance(x, np.ndarray) else x) for n, x in options.items()}
            if "bias" in opts:
                opts["bias"] = opts["bias"].to(getattr(torch, dtype))
            if "aux" in opts:
                opts["aux"] = tuple(torch.tensor(x, device="cuda") for x in opts["aux"])
            runs = []
            for _ in range(2):
                o, lse = numba_flash.attention(*a[:3], **opts, return_lse=True, kernel="mma")
                wanted = ("dq", "dk", "dv", "dbias") if "bias" in opts else ("dq", "dk", "dv")
                g = numba_flash.attention_backward(a[3], *a[:3], o, lse, **opts, kernel="mma", wanted=wanted)
                runs.append([o, *[x for x in g[:4] if x is not None]])
            same = all(torch.equal(x, y) for x, y in zip(*runs))
            o, true = truth(q, k, v, do, options)
            errors = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(runs[0], [o, *true])]
            clock(name, "equal bits" if same else "BITS DIFFER", [f"{e:.1e}" for e in errors])
        except Exception:
            traceback.print_exc()


def jobs():
    import torch

    found = set()
    for rows, (dtype, d) in (
        [(r, key) for key, v in VARIANTS.items() for r in v.values()]
        + [({}, key) for key in VARIANTS]
        + [({}, ("float64", 256))]
    ):
        use(rows)
        for causal in (False, True):
            for seqlen in (1024, 4096):
                x = bp.inputs(dtype, 16384 // seqlen, 2048 // d, seqlen, d, True)
                found |= bp.jobs_of("mma", *x, causal=causal)
                del x
    for (dtype, d), v in FORWARD.items():
        for row in v.values():
            use({f"mma_{dtype}": [row]})
            x = bp.inputs(dtype, 4, 2048 // d, 4096, d)
            found |= bp.jobs_of("mma", *x, causal=False)
    use({})
    cases = list(option_cases())
    for name, dtype, (q, k, v, do), options in cases:
        a = [padded(x, dtype) for x in (q, k, v, do)]
        opts = {n: (torch.tensor(x, device="cuda") if isinstance(x, np.ndarray) else x) for n, x in options.items()}
        if "bias" in opts:
            opts["bias"] = opts["bias"].to(getattr(torch, dtype))
        if "aux" in opts:
            opts["aux"] = tuple(torch.tensor(x, device="cuda") for x in opts["aux"])
        found.add(job(dict(q=a[0], k=a[1], v=a[2]), "mma", **opts, return_lse=True))
        lse = a[0].new_empty(a[0].shape[:3])
        wanted = ("dq", "dk", "dv", "dbias") if "bias" in opts else ("dq", "dk", "dv")
        _, made = gradients.prepare_call(
            dict(do=a[3], q=a[0], k=a[1], v=a[2], o=a[3], lse=lse, **opts, wanted=wanted, kernel="mma")
        )
        found |= {(c, made.target.cc) for c in made.choice.configs}
    return found, cases


def stage2(timer, best):
    import torch

    for (dtype, d), variants in VARIANTS.items():
        for causal in (False, True):
            q, k, v, do = bp.inputs(dtype, 4, 2048 // d, 4096, d, True)
            flop = 10 * 4 * (2048 // d) * 4096**2 * d / (2 if causal else 1)
            reference = None
            for name, rows in [("old", {}), *variants.items()]:
                use(rows)
                try:
                    call = bp.our_gradients("mma", q, k, v, do, causal)
                    first = [x.clone() for x in call()]
                    reference = reference or first
                    same = all(torch.equal(x, y) for x, y in zip(first, call()))
                    off = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(first, reference))
                    err = bp.gradient_errors({name: call}, q, k, v, do, causal)[name] if not causal else math.nan
                    ms = timer.medians({name: call}, 5)[name]
                    clock(
                        f"{dtype} {d} {'causal' if causal else 'full'} {name:10} {flop / ms / 1e9:6.1f} TFLOP/s  same {same} off {off:.1e} error {err:.1e}"
                    )
                    best.setdefault((dtype, d), {}).setdefault(name, []).append(
                        flop / ms / 1e9 if same and off < 1e-4 else 0
                    )
                except Exception as e:
                    print(dtype, d, name, repr(e)[:300], flush=True)
    for (dtype, d), variants in FORWARD.items():
        q, k, v = bp.inputs(dtype, 4, 2048 // d, 4096, d)
        flop = 4 * 4 * (2048 // d) * 4096**2 * d
        for name, row in [("old", None), *variants.items()]:
            use({f"mma_{dtype}": [row]} if row else {})
            call = bp.ours("mma", q, k, v, False)
            ms = timer.medians({name: call}, 5)[name]
            clock(f"forward {dtype} {d} {name:14} {flop / ms / 1e9:6.1f}", bp.errors({name: call}, q, k, v, False))


def main():
    import torch

    torch.set_grad_enabled(False)
    found, cases = jobs()
    clock(len(found), "kernels")
    compile_ahead(sorted(found, key=repr))
    with torch.enable_grad():
        stage1(cases)
    timer, best = Timer(), {}
    timer.SPIN *= 20
    stage2(timer, best)
    rows = {}
    for (dtype, d), names in best.items():
        name = max(names, key=lambda n: math.prod(names[n]) if len(names[n]) == 2 else 0)
        clock("best", dtype, d, name)
        for table, first in ({} if name == "old" else VARIANTS[dtype, d][name]).items():
            rows.setdefault(table, []).extend(first)
    use({t: sorted(r, key=lambda x: x.head_dim) for t, r in rows.items()})
    if time.perf_counter() - START > 110:
        return clock("no time for bench_precision")
    kernels = ["mma"]
    results = dict(backward=True, kernels=kernels, repeats=5, machine=machine(), rows=[])
    for workload in bp.workloads(["float32", "float64"]):
        results["rows"].append(bp.measure(workload, kernels, timer, 5, True))
        print(bp.line(results["rows"][-1], [*kernels, *bp.PEERS, "best"]), flush=True)
    results["seconds"] = round(time.perf_counter() - START)
    results["summary"] = bp.summary(results["rows"], kernels)
    (OUT / "bench_precision_backward_h200.json").write_text(json.dumps(results, indent=1) + "\n")
    clock("done")


if __name__ == "__main__":
    main()
