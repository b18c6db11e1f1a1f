"""What torch's settings say to a function that stands in for one of torch's own: autocast, and the state of its random
generator."""

import torch
from torch import Tensor


def autocast(x: Tensor) -> Tensor:
    """x as torch's own attention would take it here."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def drawn_seed() -> int:
    """From torch's generator in host memory.

    To read it torch.compile leaves its graph, or with capture_scalar_outputs keeps it as a symbol.
    """
    return int(torch.randint(2**63 - 1, ()))
