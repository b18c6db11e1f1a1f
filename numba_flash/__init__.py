"""Exact attention in pure Python on Numba: readable kernels, from the textbook to the tensor core.

Importing this loads NumPy and nothing else. The first call that needs Numba, CUDA or a framework loads
it. If torch is imported, before or after, our operations are registered with it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .machine import (
    forked as _forked,  # noqa: F401 - registers an at-fork handler
    torch_arrival as _torch_arrival,
)

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "attention": "api.forward",
    "AttentionOutput": "api.forward",
    "attention_backward": "api.backward",
    "attention_kvcache": "api.kvcache",
    "attention_lse": "api.weights",
    "attention_varlen": "api.varlen",
    "attention_varlen_backward": "api.varlen",
    "AttentionGradients": "api.backward",
    "BlockMask": "api.block_mask",
    "block_mask": "api.block_mask",
    "column_sums": "api.weights",
    "explain": "api.explain",
    "explain_backward": "api.explain",
    "merge": "api.merge",
    "row_statistics": "api.weights",
    "RowStatistics": "api.weights",
    "softmax": "api.softmax",
    "warmup": "api.forward",
    "weights": "api.weights",
}
_MODULES = ("reference", "testing", "debug", "mods", "distributed")
__all__ = [
    "AttentionGradients", "AttentionOutput", "BlockMask", "RowStatistics", "attention", "attention_backward",
    "attention_kvcache", "attention_lse", "attention_varlen", "attention_varlen_backward", "block_mask", "column_sums",
    "debug", "distributed", "explain", "explain_backward", "merge", "mods", "reference", "row_statistics", "softmax",
    "testing", "warmup", "weights",
]  # fmt: skip

if TYPE_CHECKING:
    from . import debug, distributed, mods, reference, testing
    from .api.backward import AttentionGradients as AttentionGradients, attention_backward as attention_backward
    from .api.block_mask import BlockMask as BlockMask, block_mask as block_mask
    from .api.explain import explain as explain, explain_backward as explain_backward
    from .api.forward import AttentionOutput as AttentionOutput, attention as attention, warmup as warmup
    from .api.kvcache import attention_kvcache as attention_kvcache
    from .api.merge import merge as merge
    from .api.softmax import softmax as softmax
    from .api.varlen import attention_varlen as attention_varlen, attention_varlen_backward as attention_varlen_backward
    from .api.weights import (
        RowStatistics as RowStatistics,
        attention_lse as attention_lse,
        column_sums as column_sums,
        row_statistics as row_statistics,
        weights as weights,
    )


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


_torch_arrival.await_torch()
