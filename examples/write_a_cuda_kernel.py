# %% [markdown]
# # Write a CUDA kernel of your own
#
# An attention kernel of 45 lines, with plain `@cuda.jit` and nothing of numba_flash in it. Numba's simulator runs it
# without a GPU. The tools look into it: `race_check` for barriers, `watch` for numbers, `check_kernel` for all that
# you did not think of. The same source compiles for a GPU.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import contextlib
import inspect
import io
import linecache
import math

import numpy as np
from numba import cuda, float32

from numba_flash import debug, testing

# %% [markdown]
# ## The kernel
#
# A block has 16 threads and owns 16 queries of one head, a query for each thread. It loads K and V in tiles of 16 keys
# into shared memory. This is listing 5 of `docs/first_kernels.md`.

# %%
TILE, MOST = 16, 16  # keys of a tile, queries of a block; the largest head_dim


@cuda.jit
def flash(q, k, v, scale, ahead, o):
    heads, tiles = q.shape[1], (q.shape[2] + TILE - 1) // TILE
    b, h = cuda.blockIdx.x // (heads * tiles), cuda.blockIdx.x // tiles % heads
    i, thread = cuda.blockIdx.x % tiles * TILE + cuda.threadIdx.x, cuda.threadIdx.x
    k_tile = cuda.shared.array((TILE, MOST), float32)
    v_tile = cuda.shared.array((TILE, MOST), float32)
    s = cuda.local.array(TILE, float32)
    acc = cuda.local.array(MOST, float32)
    for x in range(v.shape[3]):
        acc[x] = 0
    m, l = -math.inf, float32(0)
    for first in range(0, k.shape[2], TILE):
        cuda.syncthreads()  # everyone is done with the tile before
        if first + thread < k.shape[2]:
            for x in range(k.shape[3]):
                k_tile[thread, x] = k[b, h, first + thread, x]
            for x in range(v.shape[3]):
                v_tile[thread, x] = v[b, h, first + thread, x]
        cuda.syncthreads()  # the tile is there
        if i < q.shape[2]:
            keys = min(TILE, k.shape[2] - first, i + ahead + 1 - first)  # of the tile that the query sees
            m_new = m
            for y in range(keys):
                total = float32(0)
                for x in range(q.shape[3]):
                    total += q[b, h, i, x] * k_tile[y, x]
                s[y] = total * scale
                m_new = max(m_new, s[y])
            if keys > 0:
                alpha = math.exp(m - m_new)
                l = alpha * l
                for x in range(v.shape[3]):
                    acc[x] = alpha * acc[x]
                for y in range(keys):
                    p = math.exp(s[y] - m_new)
                    l += p
                    for x in range(v.shape[3]):
                        acc[x] += p * v_tile[y, x]
                m = m_new  # watch: i, first, m, m_new, alpha, l
    if i < q.shape[2]:
        for x in range(v.shape[3]):
            o[b, h, i, x] = acc[x] / l if l != 0 else 0  # a query without keys


def attention(q, k, v, causal=False, kernel=flash):
    o = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    ahead = k.shape[2] - q.shape[2] if causal else k.shape[2]  # the last query sees the last key
    blocks = q.shape[0] * q.shape[1] * -(-q.shape[2] // TILE)
    if blocks:
        with debug.race_check():
            kernel[blocks, TILE](q, k, v, q.shape[3] ** -0.5, ahead, o)
    return o


# %% [markdown]
# ## What one query sees
#
# The comment `# watch: ...` names variables. `watch` records them whenever a thread comes to that line. Query 22 sees
# two tiles:

# %%
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, 24, 4), dtype=np.float32) for _ in range(3))

with debug.watch(flash) as seen:
    attention(q, k, v, causal=True)
rows = [one.values for one in seen if one.values["i"] == 22]
for row in rows:
    print({name: round(float(value), 4) for name, value in row.items()})
assert len(rows) == 2 and math.isclose(rows[1]["alpha"], math.exp(rows[1]["m"] - rows[1]["m_new"]))

# %% [markdown]
# ## Is it right?
#
# `check_kernel` tries the promises of `docs/contract.md`; `quick=True` takes small problems, for kernels in the
# simulator. The limits say what the kernel claims: `causal` and no other option, one layout, no grouped heads, arrays
# as Numba takes them.

# %%
claims = dict(layouts=("bhsd",), features=("causal",), grouped=False, strange_strides=False, quick=True)
report = testing.check_kernel(attention, **claims)
assert report

# %% [markdown]
# ## A barrier is missing
#
# Leave out the second `cuda.syncthreads()`. On a GPU the result may be right for years. The simulator names the thread,
# its line, the address, and the other thread:


# %%
def changed(line, instead):
    """The kernel with one piece of its text replaced."""
    text = inspect.getsource(flash.fn)
    assert text.count(line) == 1, f"{line!r} is there {text.count(line)} times"
    text = text.replace(line, instead)
    linecache.cache["changed"] = len(text), None, text.splitlines(True), "changed"  # for messages: it is in no file
    names = dict(globals())
    exec(compile(text, "changed", "exec"), names)
    return names["flash"]


no_barrier = changed("cuda.syncthreads()  # the tile is there", "pass")
try:
    attention(q, k, v, kernel=no_barrier)
except RuntimeError as error:
    message = str(error)
print(message)
assert "with no barrier in between" in message

# %% [markdown]
# ## A line is wrong
#
# A NaN that nobody sees must not reach a result, and a NaN that is seen must. This line looks careful, and it turns NaN
# into 0. The promise about NaN finds it:

# %%
careful = changed("acc[x] / l if l != 0 else 0", "acc[x] / l if l > 0 else 0")
with contextlib.redirect_stdout(io.StringIO()):  # the table
    report = testing.check_kernel(lambda **given: attention(**given, kernel=careful), **claims)
broken = [line.promise for line in report.lines if line.outcome == "FAILED"]
print(*broken, sep="\n")
assert broken == ["NaN goes where it is seen, and nowhere else"]

# %% [markdown]
# ## On a GPU
#
# Without `NUMBA_ENABLE_CUDASIM`, `flash[blocks, TILE](...)` compiles the same source. `race_check` and `watch` need the
# simulator, `check_kernel` does not: pass `move=cupy.asarray, back=cupy.asnumpy` and leave `quick` out.
