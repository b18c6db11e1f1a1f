# %% [markdown]
# # What one row sees
#
# FlashAttention never stores the score matrix. It loops over tiles of keys and keeps three values for each row: the
# running maximum `m`, the sum `l` and the output `O`. This notebook runs the real kernel `v2` in Numba's simulator,
# reads its variables at each tile, and draws them. No GPU is needed.
#
# The lines are those of listing 5 in `docs/first_kernels.md`.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import matplotlib.pyplot as plt
import numpy as np

import numba_flash
from numba_flash import debug
from numba_flash.problem import ranges

# %% [markdown]
# ## Look into the thread
#
# The problem is one head with 64 queries and keys. In the simulator tiles are 16 x 16, so there are 4 tiles of each.
# `trace` runs the kernel and copies the variables of the thread that owns a row. Here it is the row of the last query.

# %%
rng = np.random.default_rng(30)
q, k, v = (rng.standard_normal((1, 1, 64, 8), dtype=np.float32) for _ in range(3))
seen = debug.trace(q, k, v, causal=True, row=63)
print(seen)

# %% [markdown]
# The final values of the thread give the row's output, $O / l$, and its log-sum-exp, $m + \log l$:

# %%
o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True, kernel="reference")
last = seen.tiles[-1]
print(last.m + np.log(last.l), "is lse", lse[0, 0, 63])
assert np.allclose(last.O / last.l, o[0, 0, 63], rtol=1e-5)
assert np.isclose(last.m + np.log(last.l), lse[0, 0, 63])

# %% [markdown]
# ## The running maximum
#
# Where the maximum grows, the earlier sums are multiplied by `alpha` (line 14).

# %%
picture = seen.plot()
if "get_ipython" not in globals():  # a notebook shows pictures; a script saves them
    picture.savefig("running_maximum.png")
    seen.html("running_maximum.html")
    print("saved running_maximum.png, and as a page running_maximum.html")
picture  # noqa: B018

# %% [markdown]
# ## Move through the tiles
#
# Move the first slider to see the numbers tile by tile. `seen.html("trace.html")` writes this page to a file, which
# needs no network. Here the tiles have 8 keys, and you can choose among 16 rows.

# %%
debug.trace(q, k, v, causal=True, row=range(48, 64), tile=(16, 8))

# %% [markdown]
# ## Which tiles are visited
#
# `ranges.py` finds the key tiles of a query tile: those without a mask, those with one, and those that nobody sees.
# Here is a causal mask with a window of 35 keys.

# %%
tile = 16
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
# Each score that counts lies in a visited tile. And the trace of a row has just the tiles of its row of the picture:

# %%
assert (np.kron(kinds, np.ones((tile, tile)))[sees] > 0).all()
windowed = debug.trace(q, k, v, causal=True, window=(35, 0), row=63)
print("query 63 visits tiles", [one.number for one in windowed.tiles])
assert [one.number for one in windowed.tiles] == list(np.flatnonzero(kinds[3]))
