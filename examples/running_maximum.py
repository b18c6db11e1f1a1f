# %% [markdown]
# # What one row sees
#
# FlashAttention never holds the score matrix. It walks over tiles of keys and carries on three things a row: the
# running maximum `m`, the sum `l` and the output `O`. This notebook runs the real kernel `v2` in Numba's simulator,
# looks into one thread at each tile, and draws what it finds. No GPU is needed.
#
# The lines are those of listing 5 in `docs/algorithm.md`.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import pdb

import matplotlib.pyplot as plt
import numpy as np

import numba_flash
from numba_flash import debug
from numba_flash.problem import ranges

# %% [markdown]
# ## A small problem
#
# One head with 64 queries and keys. In the simulator tiles are 16 x 16, so there are 4 tiles of each.

# %%
rng = np.random.default_rng(30)
q, k, v = (rng.standard_normal((1, 1, 64, 8), dtype=np.float32) for _ in range(3))
tile, row = 16, 63  # the last query: block 3, thread 15
print(numba_flash.explain(q, k, v, causal=True, kernel="v2"))

# %% [markdown]
# ## Look into the thread
#
# `stop_at` puts a debugger into one thread of one block. This debugger asks nobody: it notes some variables where it
# stops, and goes on. Line 17 of the listing is a good place: the tile's weights are there, and `l` is still the old
# sum.

# %%
seen = []


class Notebook(pdb.Pdb):
    def user_line(self, frame):
        now = frame.f_locals
        weights = np.array(now["s_smem"][now["s_k"] : now["s_k"] + tile])
        seen.append({name: float(now[name]) for name in ("m", "m_new", "l", "alpha", "sum_tmp")} | {"p": weights})
        self.set_continue()


with debug.stop_at("v2", "l = alpha * l", thread=row % tile, block=row // tile, debugger=Notebook):
    o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True, kernel="v2")

for j, tile_seen in enumerate(seen):
    numbers = "  ".join(f"{name} {value:8.4f}" for name, value in tile_seen.items() if name != "p")
    print(f"tile {j}:  {numbers}")

# %% [markdown]
# What the thread carried on is enough for the row's log-sum-exp, $m + \log l$:

# %%
last = seen[-1]
l = last["alpha"] * last["l"] + last["sum_tmp"]
print(last["m_new"] + np.log(l), "is lse", lse[0, 0, row])
assert np.isclose(last["m_new"] + np.log(l), lse[0, 0, row])

# %% [markdown]
# ## The running maximum
#
# A score is $m + \log p$. Where the maximum grows, all that was summed before shrinks by `alpha`.

# %%
scores = np.concatenate([one["m_new"] + np.log(one["p"]) for one in seen])
fig, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 5), gridspec_kw=dict(height_ratios=(2, 1)))
above.bar(range(len(scores)), scores, color="#7fb2e5", label="score of a key")
above.step(np.arange(5) * tile - 0.5, [seen[0]["m_new"], *(one["m_new"] for one in seen)], "C1", label="m")
above.legend()
below.bar(np.arange(4) * tile + tile / 2, [one["alpha"] for one in seen], width=tile - 2, color="#f4b06a")
below.set_ylabel("alpha")
below.set_xlabel("key; a tile is 16 keys")
for edge in np.arange(1, 4) * tile - 0.5:
    above.axvline(edge, color="0.8")
fig.tight_layout()

# %% [markdown]
# ## Which tiles are visited
#
# `ranges.py` finds the key tiles of a query tile: those without a mask, those with one, and those that nobody sees.
# Here is a causal mask with a window of 35 keys.

# %%
kinds = np.zeros((4, 4))
for i in range(4):
    first = ranges.row_keys(i * tile, 35, 0, 64)
    bottom = ranges.row_keys(i * tile + tile - 1, 35, 0, 64)
    begin, free, cut, end = ranges.key_tiles(*first, *bottom, tile)
    kinds[i, begin:end] = 1  # visited, with a mask
    kinds[i, free:cut] = 2  # visited, without

queries, keys = np.ogrid[:64, :64]
sees = (keys <= queries) & (keys >= queries - 35)
fig, axis = plt.subplots(figsize=(4.5, 4.5))
axis.imshow(np.kron(kinds, np.ones((tile, tile))) + 0.5 * sees, cmap="Blues")
axis.set_xlabel("key")
axis.set_ylabel("query")
axis.set_title("darkest: a tile without a mask; white: never visited")
for edge in np.arange(1, 4) * tile - 0.5:
    axis.axvline(edge, color="0.6")
    axis.axhline(edge, color="0.6")

# %% [markdown]
# Each score that counts lies in a visited tile:

# %%
assert (np.kron(kinds, np.ones((tile, tile)))[sees] > 0).all()
