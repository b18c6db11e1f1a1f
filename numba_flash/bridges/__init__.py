"""Attention as an operation of other frameworks: torch's autograd and compiler, JAX's transformations.

`numba_flash.attention` loads torch.py or jax.py when an array asks for it; importing numba_flash loads neither. Modules
torch_* and jax_* are parts of them.
"""
