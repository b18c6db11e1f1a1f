"""Marks the mesh axes over which a value differs, inside jax.shard_map(check_vma=True).

JAX tracks these axes for every value, and checks those of results and gradients. A callback's results have none. So
operands are first marked as differing over the axes of all operands; the transpose of that sums their gradients over
the added axes. Results differ over the same axes as the operands.
"""

from collections.abc import Iterable
from typing import Any

import jax

Axes = frozenset[Any]


def axes_of(values: Iterable[Any]) -> Axes:
    return frozenset().union(*(_axes(value) for value in values))


def varying(x: Any, axes: Axes) -> Any:
    """x, marked as differing over all of these axes."""
    missing = tuple(sorted(axes - _axes(x), key=str))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # its name before JAX 0.9


def _axes(value: Any) -> Axes:
    facts = jax.typeof(value)
    known = getattr(facts, "manual_axis_type", None)  # since JAX 0.10
    return getattr(facts, "vma", frozenset()) if known is None else known.varying
