"""Three arrays of a call that may be like one before: all that a plan follows from, read in one go.

`read` makes an Array of each and looks its Layout up. Here the same facts come as they are, as the part of a key, in
half the time. Torch's tensors alone have this: torch's own attention takes 4 us for a tiny problem, so it counts there.
"""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .layout import Layout, contiguous_like

Maker = Callable[[Any], Any]


class OneGo(NamedTuple):
    """What a call like one before still asks of a family's arrays."""

    # x, y, z -> their addresses; what else a plan follows from, which can be a key; and whether their library is to
    # know of the call because one of them requires grad. None where only `read` knows what to make of them.
    facts: Callable[[Any, Any, Any], tuple[tuple[int, int, int], tuple[Any, ...], bool] | None]
    maker: Callable[[Layout, tuple[int, ...], str], Maker]  # layout of q, shape, dtype -> q -> new array
    address: Callable[[Any], int]
    current_stream: Callable[[int], int] | None  # of a CUDA device; None where the library knows none


@functools.lru_cache(maxsize=20_000)
def torch_maker(like: Layout, shape: tuple[int, ...], dtype: str) -> Maker:
    """What makes of a tensor with the layout `like` a new contiguous one, in the quickest way that torch has."""
    torch = sys.modules["torch"]
    if contiguous_like(like, shape, dtype) is like:
        return torch.empty_like  # 0.8 us sooner than new_empty (H200)
    # The shape as numbers: 0.4 us sooner than as a tuple. Of no dimensions there is no number.
    return operator.methodcaller("new_empty", *(shape or [()]), dtype=getattr(torch, dtype))


@functools.cache
def of_torch() -> OneGo:
    torch = sys.modules["torch"]
    dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
    transforms, forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
    is_grad_enabled = torch.is_grad_enabled

    def facts(x: Any, y: Any, z: Any) -> Any:
        if dispatch_modes() or function_modes() or transforms() or forward_ad._current_level >= 0:
            return None
        try:
            addresses = x.data_ptr(), y.data_ptr(), z.data_ptr()
            if 0 in addresses:
                return None
            facts = (
                x.shape, y.shape, z.shape, x.dtype, y.dtype, z.dtype, x.device, y.device, z.device,
                x.is_contiguous() or x.stride(), y.is_contiguous() or y.stride(), z.is_contiguous() or z.stride(),
                x.is_neg(), y.is_neg(), z.is_neg(), type(x), type(y), type(z),
            )  # fmt: skip
            return addresses, facts, is_grad_enabled() and (x.requires_grad or y.requires_grad or z.requires_grad)
        except (RuntimeError, AttributeError):  # one has no address, or is no tensor
            return None

    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not there in a torch for CPUs
    return OneGo(facts, torch_maker, torch.Tensor.data_ptr, stream)
