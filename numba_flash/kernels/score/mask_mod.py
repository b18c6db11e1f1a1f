"""mask_mod(b, h, q_pos, k_pos, *aux): a function of the caller's own; False removes a key."""

from typing import Any

from . import user


def make(config: Any) -> Any:
    """visible(at, arrays, strides), or None without a mask_mod."""
    return user.make(config, "mask_mod") if config.has("mask_mod") else None
