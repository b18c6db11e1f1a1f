"""Reads torch's settings for functions that replace one of torch's own: autocast, and the state of its random
generator."""

import torch
from torch import Tensor


def autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype if autocast is on, as torch's own attention takes it."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def drawn_seed() -> Tensor:
    """A seed from torch's generator in host memory, as a tensor, which torch.compile and torch.func.vmap can trace."""
    return torch.randint(2**63 - 1, (), device="cpu")
