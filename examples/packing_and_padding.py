# %% [markdown]
# # Packing and padding
#
# A batch has sequences of different lengths, and an array has one length. There are two ways out. *Padding* fills each
# sequence up to the longest. *Packing* puts all behind each other into one long sequence, and no token may look into
# another's document. This notebook computes the same attention in both ways. The pictures show what the real kernel
# `v2` looks at, and what that costs. No GPU is needed.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import matplotlib.pyplot as plt
import numpy as np

import numba_flash
from numba_flash import debug, mods

# %% [markdown]
# Three documents with 6, 16 and 10 tokens. Each token sees those before it in its own document.

# %%
lengths = np.array([6, 16, 10], np.int32)
rng = np.random.default_rng(0)
documents = [rng.standard_normal((3, 1, 1, n, 8), dtype=np.float32) for n in lengths]  # q, k and v of each
alone = [numba_flash.attention(*document, causal=True, kernel="reference") for document in documents]


# %% [markdown]
# ## What a kernel looks at
#
# `look` asks `debug.trace` for each tile of 8 queries which tiles of 8 keys the kernel computed, and which scores in
# them counted. `draw` shows it.


# %%
def look(q, k, v, batch=0, **options):
    """(queries, keys): 0 where no score was computed, 1 where one was and did not count, 2 where it counted."""
    seen = np.zeros((q.shape[2], -(-k.shape[2] // 8) * 8), int)  # tiles are computed whole
    for first in range(0, q.shape[2], 8):
        rows = range(first, min(first + 8, q.shape[2]))
        for tile in debug.trace(q, k, v, row=rows, batch=batch, tile=(8, 8), **options).tiles:
            seen[rows, tile.number * 8 : tile.number * 8 + 8] = 1
            seen[rows, tile.keys.start : tile.keys.stop] += np.isfinite(tile.S)[:, : len(tile.keys)]
    return seen


costs = {}


def draw(name, pictures):
    fig, axes = plt.subplots(1, len(pictures), figsize=(max(4, 2.6 * len(pictures)), 2.9), squeeze=False)
    for axis, seen in zip(axes[0], pictures, strict=True):
        axis.imshow(seen, cmap="Blues", vmin=0, vmax=2)
        axis.set_xlabel("key")
    axes[0, 0].set_ylabel("query")
    fig.suptitle(name)
    costs[name] = sum(np.sum(seen > 0) for seen in pictures)


# %% [markdown]
# ## Padding
#
# All arrays get 16 tokens. `seqlens_k` says how many keys of each batch entry are there. Keys behind it are never read:
# here they are NaN.
#
# `q_offset=0` says that query 0 stands at key 0. It is needed here: by default the *last* query stands at the last
# valid key. That is right for decoding, where the few queries are the newest tokens. Here the last queries are padding.

# %%
q, k, v = np.full((3, 3, 1, 16, 8), np.nan, np.float32)  # each (batch, heads, seqlen, head_dim)
for b, document in enumerate(documents):
    for padded, x in zip((q, k, v), document, strict=True):
        padded[b, :, : lengths[b]] = x[0]

padding = dict(causal=True, q_offset=0, seqlens_k=lengths)
o = numba_flash.attention(q, k, v, **padding)
for b, n in enumerate(lengths):
    assert np.allclose(o[b, :, :n], alone[b][0], atol=1e-6)

draw("padding, with seqlens_k", [look(q, k, v, b, **padding) for b in range(3)])

# %% [markdown]
# Dark scores count. Light ones were computed and thrown away. White tiles were never visited. The rows of padded
# queries are computed as well, and hold nothing of use.
#
# A mask says the same about the keys. The kernel does not know beforehand which tiles a mask hides, so it visits all up
# to the diagonal. And a mask is an array that has to be read. It is for what lengths cannot say, such as padding on the
# left, or holes.

# %%
there = np.arange(16) < lengths[:, None]  # (batch, seqlen_k)
masked = dict(causal=True, mask=there[:, None, None, :])
assert np.allclose(numba_flash.attention(q, k, v, **masked)[0, :, :6], alone[0][0], atol=1e-6)

draw("padding, with a mask", [look(q, k, v, b, **masked) for b in range(3)])

# %% [markdown]
# ## Packing
#
# One sequence of 32 tokens, and for each token the number of its document. `mods.document` is a function of two lines,
# which becomes part of the kernel: a token sees only keys of its own document. Nothing is padded.

# %%
q, k, v = np.concatenate(documents, axis=3)  # each (1, 1, 32, 8)
segments = np.repeat([[0, 1, 2]], lengths, axis=1)  # (batch, seqlen_k)
packing = dict(causal=True, mask_mod=mods.document, aux=(segments,))
o = numba_flash.attention(q, k, v, **packing)
for b, part in enumerate(np.split(o, np.cumsum(lengths)[:-1], axis=2)):
    assert np.allclose(part, alone[b], atol=1e-6)

draw("packing, documents by mask_mod", [look(q, k, v, **packing)])

# %% [markdown]
# The function is asked for each score, so tiles in which no score counts are visited, too. With many short documents in
# a long sequence these are most of all tiles. One call for each document visits none of them, but it needs a launch for
# each, and a short document does not fill a GPU:

# %%
draw("a call for each document", [look(*document, causal=True) for document in documents])

# %% [markdown]
# ## What it costs
#
# Scores that are computed, of which the same number counts each time:

# %%
useful = sum(n * (n + 1) // 2 for n in lengths)
print(f"{useful} scores count; computed are")
for name, computed in costs.items():
    print(f"{computed:6}  {name}")
assert costs["padding, with seqlens_k"] < costs["padding, with a mask"]
assert costs["a call for each document"] == min(costs.values())

# %% [markdown]
# | | memory | positions | takes |
# | --- | --- | --- | --- |
# | `seqlens_k` | the longest, for each | `q_offset=0` where queries are padded, too | every kernel |
# | `mask` | the same, and the mask | the same | every kernel; tensor cores in 16 bits |
# | `mask_mod` | no padding | those of the whole sequence; `causal` and distances are the same | all but `cpu` |
# | a call for each | no padding | nothing to do | every kernel |
