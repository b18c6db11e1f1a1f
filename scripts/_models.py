"""Attentions of models, by name: their shapes, dtypes, options and wanted gradients (scripts/bench_models)."""

import math
import random
from typing import Any, NamedTuple

import numba_flash
from numba_flash import mods


class Model(NamedTuple):
    name: str
    shape: tuple[int, ...]  # batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim
    option: str = ""  # a name of OPTIONS
    dtype: str = "bfloat16"
    learned: bool = False  # bias, or what score_mod reads, has a gradient
    gradients: bool = True
    given: Any = None  # of the option


def of(name, batch, heads, n, head_dim, option="", **more):
    """A model whose queries and keys are the same tokens. heads: a number, or (heads, heads_kv); n likewise."""
    heads, heads_kv = heads if isinstance(heads, tuple) else (heads, heads)
    n, m = n if isinstance(n, tuple) else (n, n)
    return Model(name, (batch, heads, heads_kv, n, m, head_dim), option, **more)


MODELS = (
    # vision
    of("ViT-B/16", 64, 12, 197, 64),
    of("DINOv2-L", 16, 16, 1370, 64),
    of("CLIP text", 64, 8, 77, 64, "causal"),
    of("Swin windows", 2048, 4, 49, 32, "bias", learned=True),
    of("SAM windows", 25, 12, 196, 64, "bias of all"),
    of("DETR decoder", 8, 8, (100, 1050), 32, "padding"),
    of("neighbourhood 13 x 13", 4, 8, 4096, 32, "neighbourhood", given=(64, 13)),
    of("Perceiver", 1, 8, (512, 8192), 64),
    of("set transformer", 4, 4, 64, 64),
    # diffusion
    of("Stable Diffusion 1.5, 64 x 64", 4, 8, 4096, 40),
    of("Stable Diffusion 1.5, 32 x 32", 4, 8, 1024, 80),
    of("Stable Diffusion 1.5, 16 x 16", 4, 8, 256, 160),
    of("Stable Diffusion 1.5, text", 4, 8, (4096, 77), 40),
    of("SDXL", 2, 10, 4096, 64),
    of("SDXL, text", 2, 10, (4096, 77), 64),
    of("Flux", 1, 24, 4608, 128),
    of("video, one head", 1, 1, 16384, 64),
    of("video", 1, 12, 9360, 128),
    of("VAE middle block", 1, 1, 2048, 512, gradients=False),
    # text
    of("BERT, 128 tokens", 64, 12, 128, 64),
    of("BERT, padding", 32, 12, 384, 64, "padding"),
    of("T5 base", 8, 12, 512, 64, "bias", learned=True),
    of("Longformer", 1, 12, 8192, 64, "longformer", given=(256, 64)),
    of("one head", 1, 1, 2048, 64),
    of("GPT-2", 8, 12, 1024, 64, "causal"),
    of("Llama 3 8B", 1, (32, 8), 8192, 128, "causal"),
    of("Qwen 3 0.6B", 4, (16, 8), 2048, 128, "causal"),
    of("Mistral", 1, (32, 8), 8192, 128, "window", given=(4095, 0)),
    of("Gemma 2", 1, (16, 8), 4096, 256, "softcap causal", given=50.0),
    of("one KV head", 2, (8, 1), 4096, 256, "causal"),
    of("gpt-oss", 1, (64, 8), 4096, 64, "window", given=(127, 0)),
    of("MPT", 2, 32, 2048, 128, "alibi"),
    of("packed documents", 1, (32, 8), 8192, 128, "documents", given=12),
    of("prefix LM", 2, 16, 2048, 64, "prefix", given=512),
    of("head_dim 256, 16k", 1, 8, 16384, 256),
    of("plain, 4k", 4, 16, 4096, 64),
    of("window, 4k", 4, 16, 4096, 64, "window", given=(1023, 0)),
    of("softcap, 4k", 4, 16, 4096, 64, "softcap", given=20.0),
    # speech and music
    of("Whisper encoder", 8, 20, 1500, 64),
    of("Whisper decoder, cross", 8, 20, (448, 1500), 64),
    of("wav2vec 2", 16, 12, 499, 64, "padding"),
    of("Conformer", 16, 8, 500, 64, "bias"),
    # proteins, molecules, graphs
    of("ESM-2", 16, 20, 512, 64, "padding"),
    of("pair bias", 128, 4, 256, 32, "bias", learned=True),
    of("MSA rows", 64, 8, 256, 32, "bias", learned=True),
    of("MSA columns", 256, 8, 64, 32),
    of("Graphormer", 64, 32, 64, 24, "bias of all", learned=True),
    of("distances, learned", 8, 8, 1024, 64, "distances", learned=True),
    # tables, series, points, decisions
    of("TabPFN, rows", 8, 4, 1000, 32),
    of("TabPFN, columns", 4096, 4, 16, 32),
    of("FT-Transformer", 4096, 8, 20, 24, dtype="float32"),
    of("PatchTST", 224, 16, 42, 8),
    of("Decision Transformer", 64, 1, 60, 64, "causal"),
    of("short rows", 1024, 8, 32, 64),
    of("points, 3 columns", 1, 1, 5000, 3, dtype="float32"),
    of("points, 3 columns", 1, 1, 5000, 3, dtype="float64"),
    of("50 columns", 8, 4, 777, 50, "causal", dtype="float32"),
    of("one query", 1, (32, 8), (1, 16384), 128, dtype="float32", gradients=False),
    of("GPT-2", 4, 12, 1024, 64, "causal", dtype="float32"),
    of("physics, float64", 2, 4, 1024, 64, dtype="float64"),
)  # fmt: skip


DIMS = (8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 104, 112, 128, 128, 128, 160, 192, 256)
LEAST_WORK, MOST_WORK, MOST_WORK_FLOAT32, MOST_NUMBERS = 2e7, 4e11, 4e10, 2**28  # operations of a forward; of an array


def random_models(seed, count):
    """Attentions that are on no list: lengths, batches, heads and head dims over their whole range, by their
    logarithm."""
    g, found = random.Random(seed), []
    while len(found) < count:
        head_dim, group, heads_kv = g.choice(DIMS), g.choice((1, 1, 1, 2, 4, 8)), int(2 ** g.uniform(0, 4))
        batch, n = int(2 ** g.uniform(0, 8.5)), int(2 ** g.uniform(3, 13))
        m = n if g.random() < 0.75 else int(2 ** g.uniform(3, 13.5))
        if g.random() < 0.2:
            n = g.choice((1, 1, 2, 4, 16))  # a step of generation
        option = g.choice(("", "", "", "causal", "causal", "window", "padding", "bias"))
        option = "" if option in ("causal", "window") and n != m else option
        dtype, heads = g.choice((*("bfloat16",) * 6, "float16", "float32", "float32")), heads_kv * group
        work, numbers = (
            4 * batch * heads * n * m * head_dim,
            (batch * heads * n * head_dim, batch * heads_kv * m * head_dim),
        )
        most = MOST_WORK_FLOAT32 if dtype == "float32" else MOST_WORK
        if LEAST_WORK < work < most and max(*numbers, heads * n * m * (option == "bias")) <= MOST_NUMBERS:
            shape, given = (batch, heads, heads_kv, n, m, head_dim), (max(n // 8, 1), 0) if option == "window" else None
            found.append(Model(f"{len(found) + 1}", shape, option, dtype, gradients=n > 16, given=given))
    return found


class Case(NamedTuple):
    """A model's options: ours, flex_attention's functions, and what F.scaled_dot_product_attention takes."""

    ours: dict[str, Any]
    score_mod: Any = None
    mask_mod: Any = None
    sdpa: dict[str, Any] | None = None  # None: it has none of this
    learned: Any = None  # the tensor that has a gradient


def case_of(model, device="cuda"):
    """-> Case, with tensors from a fixed seed."""
    import torch

    batch, heads, _, n, m, _ = model.shape
    generator = torch.Generator(device).manual_seed(0)
    rows, keys = torch.arange(n, device=device)[:, None], torch.arange(m, device=device)
    dtype = getattr(torch, model.dtype)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    def bias_of(entries):
        bias = normal(entries, heads, n, m).to(dtype)

        def added(score, b, h, i, j):
            return score + bias[b if entries > 1 else 0, h, i, j]

        return Case(dict(bias=bias), added, sdpa=dict(attn_mask=bias), learned=bias if model.learned else None)

    def padding():
        lengths = torch.linspace(m // 2, m, batch, device=device).int()
        seen = (keys < lengths[:, None])[:, None, None]
        return Case(dict(mask=seen), mask_mod=lambda b, h, i, j: j < lengths[b], sdpa=dict(attn_mask=seen))

    def blocks(mask_mod, theirs, aux=()):
        made = numba_flash.block_mask(mask_mod, batch, heads, n, m, aux=aux)
        seen = theirs(torch.zeros((), device=device, dtype=torch.int64), 0, rows, keys)
        return Case(dict(block_mask=made), mask_mod=theirs, sdpa=dict(attn_mask=seen[None, None]))

    def causal_case(**more):
        return Case(dict(causal=True, **more), mask_mod=lambda b, h, i, j: i >= j, sdpa=dict(is_causal=True))

    def window():
        left = model.given[0]
        seen = (rows >= keys) & (rows - keys <= left)
        return Case(
            dict(window=model.given), mask_mod=lambda b, h, i, j: (i >= j) & (i - j <= left), sdpa=dict(attn_mask=seen)
        )

    def softcapped(score, b, h, i, j):
        return model.given * torch.tanh(score / model.given)

    def alibi():
        slopes = 2.0 ** -torch.linspace(0.5, 8, heads, device=device)
        bias = (-slopes[:, None, None] * (rows - keys).abs()).to(dtype).masked_fill(keys > rows, -math.inf)[None]
        return Case(
            dict(alibi_slopes=slopes, causal=True), lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
            lambda b, h, i, j: i >= j, dict(attn_mask=bias),
        )  # fmt: skip

    def longformer():
        width, few = model.given

        def ours(b, h, q_pos, k_pos):
            return abs(q_pos - k_pos) <= width or q_pos < few or k_pos < few

        return blocks(ours, lambda b, h, i, j: ((i - j).abs() <= width) | (i < few) | (j < few))

    def neighbourhood():
        side, width = model.given
        half = width // 2

        def ours(b, h, q_pos, k_pos):
            row, column = q_pos // side, q_pos % side
            row, column = min(max(row, half), side - 1 - half), min(max(column, half), side - 1 - half)
            return abs(row - k_pos // side) <= half and abs(column - k_pos % side) <= half

        def theirs(b, h, i, j):
            row, column = (i // side).clamp(half, side - 1 - half), (i % side).clamp(half, side - 1 - half)
            return ((row - j // side).abs() <= half) & ((column - j % side).abs() <= half)

        return blocks(ours, theirs)

    def documents():
        segments = (torch.arange(m, device=device) * model.given // m).int().expand(batch, -1).contiguous()

        def theirs(b, h, i, j):
            return (segments[b, i] == segments[b, j]) & (i >= j)

        made = numba_flash.block_mask(mods.document, batch, heads, n, m, aux=(segments,), causal=True)
        seen = theirs(torch.zeros((), device=device, dtype=torch.int64), 0, rows, keys)
        return Case(dict(block_mask=made), mask_mod=theirs, sdpa=dict(attn_mask=seen[None, None]))

    def prefix():
        lengths = torch.full((batch,), model.given, dtype=torch.int32, device=device)
        return blocks(mods.prefix_lm, lambda b, h, i, j: (j < lengths[b]) | (i >= j), (lengths,))

    def distances():
        apart = normal(1, 1, n, m).abs()
        weight = normal(heads) / 4

        def ours(score, b, h, q_pos, k_pos, apart, weight):
            return score - weight[h] * apart[0, 0, q_pos, k_pos]

        def theirs(score, b, h, i, j):
            return score - weight[h] * apart[0, 0, i, j]

        return Case(dict(score_mod=ours, aux=(apart, weight)), theirs, learned=weight)

    made = {
        "": lambda: Case({}, sdpa={}),
        "causal": causal_case,
        "window": window,
        "softcap": lambda: Case(dict(softcap=model.given), softcapped),
        "softcap causal": lambda: causal_case(softcap=model.given)._replace(score_mod=softcapped, sdpa=None),
        "alibi": alibi,
        "bias": lambda: bias_of(1),
        "bias of all": lambda: bias_of(batch),
        "padding": padding,
        "longformer": longformer,
        "neighbourhood": neighbourhood,
        "documents": documents,
        "prefix": prefix,
        "distances": distances,
    }
    return made[model.option]()
