"""What torch's settings say to a function that stands in for one of torch's own: autocast, and the state of its random
generator."""

import torch
from torch import Tensor


def autocast(x: Tensor) -> Tensor:
    """x as torch's own attention would take it here."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def drawn_seed() -> Tensor:
    """From torch's generator in host memory; a tensor, which torch.compile and torch.func.vmap take as it is."""
    return torch.randint(2**63 - 1, (), device="cpu")
