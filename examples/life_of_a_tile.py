# %% [markdown]
# # The life of a tile
#
# A block of the Hopper kernel `wgmma` has threads with different roles: a scheduler, a producer and two consumers. This
# notebook runs the real kernel in Numba's simulator, follows one thread of each role, and draws who waits for whom. No
# GPU is needed. Read `docs/hopper.md` before.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import numpy as np

from numba_flash import debug

# %% [markdown]
# One head with 100 queries and 500 keys under a causal mask, which is one query tile and four key tiles.

# %%
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(np.float16) for n in (100, 500, 500))
seen = debug.timeline(q, k, v, causal=True)

# %% [markdown]
# Move through the steps with the slider, the buttons or the arrow keys. Follow one tile of keys:
#
# 1. The producer waits until a place is free, and starts the copy of K 2.
# 2. The consumers wait until it is there. Each begins S 2, the scores, and then PV 1, the product of the tile before.
# 3. Each consumer waits for S 2 and gives the place of K 2 back. While PV 1 still runs, it computes the softmax.
# 4. When both have given the place back, the producer fills it with K 4.
#
# Look also for the turns: while one consumer issues its products, the other waits for its turn or computes its softmax.

# %%
seen  # noqa: B018

# %% [markdown]
# The same as data: a place is never filled before both consumers have given it back.

# %%
stages = seen.places["K"]
filled = {span.tile: span.end for span in seen.spans if (span.role, span.what, span.of) == ("producer", "wait", "K")}
freed = {span.tile: span.begin for span in seen.spans if (span.what, span.of) == ("release", "K")}  # by the last one
for tile, moment in freed.items():
    if tile + stages in filled:
        free = filled[tile + stages]
        print(f"K {tile} given back at step {moment}, its place free for K {tile + stages} at step {free}")
        assert moment < free
