# %% [markdown]
# # Check your own kernel
#
# Is your own attention function correct? `testing.check_kernel` takes any function and gives it the problems that our
# own kernels have to solve. This notebook has a kernel of ten lines, the report about it, and the reports when a line
# is wrong. No GPU is needed.

# %%
import contextlib
import inspect
import io
import math

import numpy as np
from numba import njit, types

from numba_flash import testing

# %% [markdown]
# ## A kernel in ten lines
#
# The kernel loops over the keys one by one. It updates `m`, `l` and `acc` by equation 9 of `docs/algorithm.md`, with
# tiles of one key. Query `i` sees the keys up to number `i + ahead`.


# %%
def attend(q, k, v, ahead, o):
    for b, h, i in np.ndindex(q.shape[:3]):
        m, l, acc = -np.inf, 0.0, np.zeros(v.shape[3])
        for j in range(min(i + ahead + 1, k.shape[2])):
            s = np.sum(q[b, h, i] * k[b, h, j]) / math.sqrt(q.shape[3])
            m_new = max(m, s)
            alpha, p = math.exp(m - m_new), math.exp(s - m_new)
            l, acc, m = alpha * l + p, alpha * acc + p * v[b, h, j], m_new
        o[b, h, i] = acc / l if l > 0 else acc


# %% [markdown]
# `njit` compiles it for the CPU, once for arrays of any strides ("A"). The function around it has the arguments of
# `numba_flash.attention`. It takes `causal` and no other option, one layout, and as many heads of K and V as of Q. The
# limits say so:


# %%
GIVEN, RESULT = (types.Array(types.float32, 4, "A", readonly=readonly) for readonly in (True, False))


def with_arguments(function):
    kernel = njit(types.void(GIVEN, GIVEN, GIVEN, types.int64, RESULT))(function)

    def attention(q, k, v, causal=False):
        o = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
        kernel(q, k, v, k.shape[2] - q.shape[2] if causal else k.shape[2], o)  # the last query sees the last key
        return o

    return attention


claims = dict(layouts=("bhsd",), features=("causal",), grouped=False)
report = testing.check_kernel(with_arguments(attend), **claims)
assert report

# %% [markdown]
# Each line is a promise of the contract (`docs/contract.md`), with the number of problems that were tried. The bound on
# the error is derived for each problem (`docs/numerics.md`).
#
# ## When a line is wrong
#
# A check is useful only if it finds mistakes. Here are three mistakes, each in one line:


# %%
def promises_broken(line, instead):
    """The promises that the kernel does not keep when one piece of its text is another."""
    text = inspect.getsource(attend)
    assert text.count(line) == 1, f"{line!r} is there {text.count(line)} times"
    changed = dict(np=np, math=math)
    exec(text.replace(line, instead), changed)
    with contextlib.redirect_stdout(io.StringIO()):  # the table
        found = testing.check_kernel(with_arguments(changed["attend"]), **claims, strange_strides=False)
    return [f"{one.promise}: {one.note[:48]}..." for one in found.lines if one.outcome not in ("held", "not tried")]


print("The sums are not corrected when the maximum grows:")
broken = promises_broken("math.exp(m - m_new), ", "1.0, ")
print(*broken, sep="\n")
assert broken

# %%
print("The maximum is not subtracted:")
broken = promises_broken("m_new = max(m, s)", "m_new = 0.0")
print(*broken, sep="\n")
assert [one.partition(":")[0] for one in broken] == ["scores may be large"]

# %%
print("A query sees one key too few:")
broken = promises_broken("i + ahead + 1", "i + ahead")
print(*broken, sep="\n")
assert broken

# %% [markdown]
# Random problems alone do not find the second mistake: their scores are small, and `exp` does not overflow.
#
# A kernel on a GPU is checked in the same way. `move` and `back` copy arrays there and back, such as `cupy.asarray` and
# `cupy.asnumpy`. The page "testing your own kernel" also shows single problems, hypothesis, and gradients.
