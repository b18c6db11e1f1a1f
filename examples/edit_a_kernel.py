# %% [markdown]
# # Step through a kernel, and change it
#
# The kernels are Python. In Numba's simulator a change runs at once. This notebook prints what one thread computes. It
# breaks the kernel `v2` on purpose, and the tests find the mistake. Then it changes the kernel in a way that does not
# change the result. No GPU is needed.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import contextlib
import inspect
import io
import itertools
import linecache

import numpy as np

import numba_flash
from numba_flash import debug, testing
from numba_flash.kernels.simt import v2

# %% [markdown]
# ## Step
#
# At a terminal, `scripts/step v2 "alpha = math.exp"` gives you a prompt. In a notebook, `commands` replaces typing:
# continue to the second key tile, print the old and the new maximum, go to the next line, print `alpha`.

# %%
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, 24, 4), dtype=np.float32) for _ in range(3))

typed = ["c", "p j, m, m_new", "n", "p alpha", "c"]
session = io.StringIO()
with contextlib.redirect_stdout(session), debug.stop_at("v2", "alpha = math.exp", thread=6, block=1, commands=typed):
    numba_flash.attention(q, k, v, causal=True, kernel="v2")
print(session.getvalue().replace(os.path.dirname(numba_flash.__file__), "numba_flash"))
assert "0.605574361314738" in session.getvalue()


# %% [markdown]
# ## Change
#
# Usually you change a kernel in an editor. Here, the source text is changed for the duration of a `with`.


# %%
@contextlib.contextmanager
def edited(module, line, instead):
    """`module`, with one piece of its text replaced by another."""
    text, make = inspect.getsource(module), module.make
    assert text.count(line) == 1, f"{line!r} is there {text.count(line)} times"
    changed, file = text.replace(line, instead), module.__file__
    exec(compile(changed, file, "exec"), module.__dict__)
    linecache.cache[file] = len(changed), None, changed.splitlines(True), file  # where Python looks for the source
    try:
        yield
    finally:
        module.make = make
        del linecache.cache[file]


# Tiles have 16 keys: these problems have three tiles or more, and enough queries for the maximum to move in some row.
limits = dict(dtypes=("float32",), head_dims=(8,), layouts=("bhsd",), max_batch=1, max_seqlen=60, features=("causal",))
several = (
    case
    for case in testing.random_cases(100, seed=5, **limits)
    if case.q.size and min(case.q.shape[2], case.k.shape[2]) > 32
)
cases = list(itertools.islice(several, 6))
assert len(cases) == 6


def wrong_cases():
    """How many of 6 random problems are not within their tolerance."""
    wrong = 0
    for case in cases:
        o, lse = numba_flash.attention(**case.arguments(), return_lse=True, kernel="v2")
        try:
            testing.check(case, o, lse)
        except AssertionError:
            wrong += 1
    return wrong


wrong = wrong_cases()
print("as it is:", wrong, "of 6 are wrong")
assert wrong == 0

# %% [markdown]
# Without `alpha` (`docs/first_kernels.md`, listing 5, line 14), the sum of the earlier tiles is not rescaled. Every
# problem with several tiles of keys notices:

# %%
with edited(v2, "alpha = math.exp(m - m_new)", "alpha = compute(1)"):
    broken = wrong_cases()
print("without alpha:", broken, "of 6 are wrong")
assert broken == 6

# %% [markdown]
# Any common factor of `l` and `O` is divided out at the end. So a maximum that is slightly too large changes only the
# rounding. Lazy rescaling rests on this (`docs/tensor_cores.md`, equation 20):

# %%
with edited(v2, "m_new = max(max_tmp, m)", "m_new = max(max_tmp + compute(0.5), m)"):
    shifted = wrong_cases()
print("with a maximum that is 0.5 too large:", shifted, "of 6 are wrong")
assert shifted == 0
