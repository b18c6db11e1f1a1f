"""For one run: functions on a GPU, beside the options that they describe, and how long they take."""

import concurrent.futures
import json
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def alibi(score, b, h, q_pos, k_pos, slopes):
    return score - slopes[h] * abs(q_pos - k_pos)


def softcap(score, b, h, q_pos, k_pos, slopes):
    return 20.0 * math.tanh(score / 20.0)


def causal(b, h, q_pos, k_pos, slopes):
    return q_pos >= k_pos


def relative(score, b, h, q_pos, k_pos, table):
    return score + table[h, min(abs(q_pos - k_pos), 127)]


def document(b, h, q_pos, k_pos, ids):
    return ids[b, q_pos] == ids[b, k_pos]


def variants(torch, n, heads, batch):
    slopes = torch.linspace(0.01, 0.5, heads, device="cuda")
    table = torch.randn(heads, 128, device="cuda")
    ids = (torch.arange(n, device="cuda") // 700).to(torch.int32).expand(batch, n).contiguous()
    same = ids[:, None, :, None] == ids[:, None, None, :]
    i = torch.arange(n, device="cuda")
    bias = table[:, (i[:, None] - i).abs().clamp(max=127)][None]
    return {
        "plain": (dict(), dict()),
        "alibi": (dict(score_mod=alibi, aux=(slopes,)), dict(alibi_slopes=slopes)),
        "softcap": (dict(score_mod=softcap, aux=(slopes,)), dict(softcap=20.0)),
        "causal": (dict(mask_mod=causal, aux=(slopes,)), dict(causal=True)),
        "relative": (dict(score_mod=relative, aux=(table,)), dict(bias=bias.contiguous())),
        "document": (dict(mask_mod=document, aux=(ids,)), dict(mask=same.contiguous())),
    }


def inputs(torch, n, d, heads, batch, dtype):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, n, d, device="cuda", dtype=dtype) for _ in range(3)]


def warm(job):
    name, kernel, d, n, heads, batch = job
    import torch

    import numba_flash

    began = time.time()
    own, option = variants(torch, n, heads, batch)[name]
    q, k, v = inputs(torch, n, d, heads, batch, torch.bfloat16 if kernel != "v2" else torch.float32)
    numba_flash.warmup(q, k, v, **own, kernel=kernel)
    return (*job, round(time.time() - began, 1))


def cut(key, x, n):
    """Of an option, what the first batch entry and its first two heads read."""
    if n <= 1000:
        return x
    if key in ("bias", "mask"):
        return x[:1, :2] if x.shape[1] > 1 else x[:1]
    return x[:2] if key == "alibi_slopes" else x


def cut_all(options, n):
    return {key: cut(key, x, n) for key, x in options.items()}


def main():
    names = ("plain", "alibi", "softcap", "causal", "relative", "document")
    jobs = [(name, "wgmma", d, 4096, 16, 4) for d in (64, 128) for name in names]
    jobs += [(name, "mma", 128, 4096, 16, 4) for name in ("alibi", "document")]
    jobs += [(name, "v2", 64, 200, 4, 2) for name in ("softcap", "document")]
    import multiprocessing

    began = time.time()
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(warm, jobs):
            print("compiled", done, flush=True)
    print("all compiled after", time.time() - began)
    import torch

    import numba_flash

    results, cases = [], {}
    for name, kernel, d, n, heads, batch in jobs:
        cases.setdefault((kernel, d, n, heads, batch), []).append(name)
    for (kernel, d, n, heads, batch), names in cases.items():
        dtype = torch.bfloat16 if kernel != "v2" else torch.float32
        q, k, v = inputs(torch, n, d, heads, batch, dtype)
        made = variants(torch, n, heads, batch)
        for name, (own, option) in ((name, made[name]) for name in names):
            try:
                reference_kernel = "auto" if {"bias", "mask"}.isdisjoint(option) else "v2"
                o = numba_flash.attention(q, k, v, **own, kernel=kernel)
                few = [x[:1, :2] for x in (q, k, v)] if n > 1000 else [q, k, v]
                right = numba_flash.attention(
                    *[x.contiguous() for x in few], **cut_all(option, n), kernel=reference_kernel
                )
                error = (o[: right.shape[0], : right.shape[1]].float() - right.float()).abs().max().item()
                times = []
                for _ in range(6):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    numba_flash.attention(q, k, v, **own, kernel=kernel)
                    end.record()
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(end))
                row = dict(kernel=kernel, d=d, name=name, error=error, ms=min(times))
            except Exception as wrong:
                row = dict(kernel=kernel, d=d, name=name, wrong=f"{type(wrong).__name__}: {wrong}"[:300])
            print(row, flush=True)
            results.append(row)
    # gradients on v2 beside those of options
    q, k, v = inputs(torch, 200, 64, 4, 2, torch.float32)
    do = torch.randn_like(q)
    for name in ("softcap",):
        own, option = variants(torch, 200, 4, 2)[name]
        o, lse = numba_flash.attention(q, k, v, **option, return_lse=True, kernel="v2")
        one = numba_flash.attention_backward(do, q, k, v, o, lse, **own, kernel="v2")
        two = numba_flash.attention_backward(do, q, k, v, o, lse, **option, kernel="v2")
        error = max((x - y).abs().max().item() for x, y in zip(one[:3], two[:3], strict=True))
        print("gradients", name, error, flush=True)
        results.append(dict(gradients=name, error=error))
    Path(os.environ.get("OUT", "."), "functions.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
