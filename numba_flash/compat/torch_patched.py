"""torch.nn.functional.scaled_dot_product_attention replaced by ours, for programs that call it themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

NAME = "scaled_dot_product_attention"


class Patched:
    """Result of compat.torch.patched: torch calls `ours` until `restore`, or until the end of a with block."""

    def __init__(self, ours: Callable[..., Any]) -> None:
        self._before: Any = getattr(functional, NAME)
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        setattr(functional, NAME, ours)
        torch.backends.mha.set_fastpath_enabled(False)
        self._in_use = True

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts torch's function and fast path back. A second call does nothing."""
        if self._in_use:
            self._in_use = False
            setattr(functional, NAME, self._before)
            torch.backends.mha.set_fastpath_enabled(self._fast_path)
