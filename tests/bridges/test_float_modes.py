"""torch.set_flush_denormal: float16 numbers below 6.1e-5 are subnormal, and stay what they are."""

import subprocess
import sys

import pytest

OF_TORCH = """
import torch
import numba_flash

torch.set_flush_denormal(True)
assert torch.tensor(1e-39) * 1 == 0
for seqlen in (3, 40, 1000):
    x = torch.full((1, 2, seqlen, 16), 3e-6, dtype=torch.float16)
    v = x.clone().requires_grad_()
    o = numba_flash.attention(x, x, v)
    o.backward(x)
    assert torch.equal(o, x) and (v.grad != 0).all(), seqlen
"""

# The threads of XLA are started while the flag is set, and keep it.
OF_JAX = """
import torch

torch.set_flush_denormal(True)
import jax
import jax.numpy as jnp
import numba_flash

run = jax.jit(numba_flash.attention)
x = jnp.full((1, 2, 40, 16), 3e-6, jnp.float16)
run(x, x, x).block_until_ready()
torch.set_flush_denormal(False)
o, back = jax.vjp(run, x, x, x)
assert (o == x).all() and (back(x)[2] != 0).all()
"""


@pytest.mark.parametrize("program", [OF_TORCH, OF_JAX], ids=["torch", "jax"])
def test_nothing_is_flushed(program):
    subprocess.run([sys.executable, "-c", program], check=True)
