# %% [markdown]
# # Packing and padding
#
# The sequences of a batch have different lengths, but an array has one length. There are two solutions. *Padding*
# extends each sequence to the length of the longest. *Packing* joins all sequences into one long sequence, in which
# each token sees only its own document. This notebook computes the same attention in both ways. The pictures show
# which scores the real kernel `v2` computes, and how many. No GPU is needed.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import matplotlib.pyplot as plt
import numpy as np

import numba_flash
from numba_flash import debug, mods

# %% [markdown]
# There are three documents with 6, 16 and 10 tokens. Each token sees itself and the earlier tokens of its own document.

# %%
lengths = np.array([6, 16, 10], np.int32)
rng = np.random.default_rng(0)
documents = [rng.standard_normal((3, 1, 1, n, 8), dtype=np.float32) for n in lengths]  # q, k and v of each
alone = [numba_flash.attention(*document, causal=True, kernel="reference") for document in documents]


# %% [markdown]
# ## What a kernel computes
#
# For each tile of 8 queries, `look` asks `debug.trace` which tiles of 8 keys the kernel computed, and which of their
# scores counted. `draw` draws the result.


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
# All arrays have 16 tokens. `seqlens_k` is the number of valid keys of each batch entry. Later keys are never read;
# here they are NaN.
#
# `q_offset=0` gives query 0 the position of key 0. By default the *last* query has the position of the last valid key,
# which is right for decoding, where the few queries are the newest tokens. Here the last queries are padding.

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
# Dark scores count. Light scores were computed and discarded. White tiles were skipped. The rows of padded queries are
# computed too, but they are not useful.
#
# A mask can remove the same keys. But `v2` does not know beforehand which tiles a mask removes, so it computes all
# tiles up to the diagonal, and it has to read the mask. Use a mask for what lengths cannot describe, such as padding
# on the left, or holes.

# %%
there = np.arange(16) < lengths[:, None]  # (batch, seqlen_k)
masked = dict(causal=True, mask=there[:, None, None, :])
assert np.allclose(numba_flash.attention(q, k, v, **masked)[0, :, :6], alone[0][0], atol=1e-6)

draw("padding, with a mask", [look(q, k, v, b, **masked) for b in range(3)])

# %% [markdown]
# ## Packing
#
# There is one sequence of 32 tokens, and the number of the document of each token. `mods.document` is a function of two
# lines that is compiled into the kernel: a token sees only keys of its own document. There is no padding.

# %%
q, k, v = np.concatenate(documents, axis=3)  # each (1, 1, 32, 8)
segments = np.repeat([[0, 1, 2]], lengths, axis=1)  # (batch, seqlen_k)
packing = dict(causal=True, mask_mod=mods.document, aux=(segments,))
o = numba_flash.attention(q, k, v, **packing)
for b, part in enumerate(np.split(o, np.cumsum(lengths)[:-1], axis=2)):
    assert np.allclose(part, alone[b], atol=1e-6)

draw("packing, documents by mask_mod", [look(q, k, v, **packing)])

# %% [markdown]
# A small kernel calls the function first and finds the tiles in which no score counts. `v2` skips them. Documents that
# do not begin at the beginning of a tile share tiles with their neighbours. With one call for each document no tiles
# are shared, but each call needs a launch, and a short document does not fill a GPU:

# %%
draw("a call for each document", [look(*document, causal=True) for document in documents])

# %% [markdown]
# `attention_varlen` computes these tiles in one call. It takes arrays (tokens, heads, head_dim), and `cu_seqlens`:
# where each document begins, and where the last one ends.

# %%
cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
tokens = [x[0].swapaxes(0, 1) for x in (q, k, v)]  # each (32, 1, 8)
o = numba_flash.attention_varlen(*tokens, cu_seqlens, causal=True)
for first, end, part in zip(cu_seqlens, cu_seqlens[1:], alone, strict=False):
    assert np.allclose(o[first:end, 0], part[0, 0], atol=1e-6)

# %% [markdown]
# ## What it costs
#
# These are the numbers of computed scores. The number of scores that count is always the same:

# %%
useful = sum(n * (n + 1) // 2 for n in lengths)
print(f"{useful} scores count. Computed scores:")
for name, computed in costs.items():
    print(f"{computed:6}  {name}")
assert costs["padding, with seqlens_k"] < costs["padding, with a mask"]
assert costs["a call for each document"] == min(costs.values())

# %% [markdown]
# | | memory | positions | kernels |
# | --- | --- | --- | --- |
# | `seqlens_k` | the longest length for each sequence | `q_offset=0` if queries are padded too | all |
# | `mask` | the same, and the mask | the same | all |
# | `mask_mod` | no padding | those of the whole sequence; `causal` and distances are the same | all |
# | one call for each | no padding | no change | all |
# | `attention_varlen` | no padding | no change: those inside a document | all |
