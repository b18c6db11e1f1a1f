"""Exact attention in pure Python on Numba: readable kernels, from the textbook to the tensor core.

Importing this loads NumPy and nothing else; Numba, CUDA and frameworks come in with the first call
that needs them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import forked as _forked  # noqa: F401 - is told of forks from now on

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "attention": "api",
    "AttentionOutput": "api",
    "attention_backward": "gradients",
    "AttentionGradients": "gradients",
    "explain": "explaining",
    "explain_backward": "explaining",
    "merge": "merging",
    "softmax": "ladder",
    "warmup": "api",
}
_MODULES = ("reference", "testing", "debug")
__all__ = [
    "AttentionGradients", "AttentionOutput", "attention", "attention_backward", "debug", "explain",
    "explain_backward", "merge", "reference", "softmax", "testing", "warmup",
]  # fmt: skip

if TYPE_CHECKING:
    from . import debug as debug
    from . import reference as reference
    from . import testing as testing
    from .api import AttentionOutput as AttentionOutput
    from .api import attention as attention
    from .api import warmup as warmup
    from .explaining import explain as explain
    from .explaining import explain_backward as explain_backward
    from .gradients import AttentionGradients as AttentionGradients
    from .gradients import attention_backward as attention_backward
    from .ladder import softmax as softmax
    from .merging import merge as merge


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"numba_flash.{_PUBLIC[name]}"), name)
        globals()[name] = value  # the next look-up finds it without this function
        return value
    if name in _MODULES:
        return importlib.import_module(f"numba_flash.{name}")
    raise AttributeError(f"module 'numba_flash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
