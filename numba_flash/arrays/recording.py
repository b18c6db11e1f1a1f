"""Whether a framework records what is done to arrays, so that a kernel it does not see would be missing from it.

Most arrays tell so themselves when `arrays.read` meets them. Here is what torch keeps apart from its tensors.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any


class NeedsBridge(NotImplementedError):
    """A framework records what is done to this array; its bridge, numba_flash.bridges.<family>, makes the call."""

    def __init__(self, message: str, family: str):
        super().__init__(message)
        self.family = family


def refuse_jax_tracer(x: Any) -> None:
    """Raises if x is a tracer of JAX."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise NeedsBridge(
            "a traced JAX array was given, which has no values: call this outside jax.jit and jax.grad", "jax"
        )


def torch_check() -> Callable[[Iterable[Any]], None]:
    """A function of a call's arrays, which raises where torch records for this thread whatever is done.

    Modes see every operation of torch: make_fx, FakeTensorMode, a counter of operations. They would miss the kernel
    and keep the allocation of its result. Forward-mode differentiation would lose its tangents. The function runs in
    each call, which costs it 0.1 us.
    """
    torch = sys.modules["torch"]
    forward_ad = torch.autograd.forward_ad
    dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack

    def check(given: Iterable[Any]) -> None:
        if not (dispatch_modes() or function_modes() or forward_ad._current_level >= 0):
            return
        refuse_tangents(array.owner for array in given if array is not None)
        mode = recording_mode()
        if mode:
            raise NeedsBridge(f"{mode} records what is done, and would miss what is computed here", "torch")

    return check


@functools.cache
def torch_differentiates() -> Callable[[Any, Any, Any], bool]:
    """A function of q, k and v, the first of which is a torch tensor: whether autograd is to know of the call."""
    is_grad_enabled = sys.modules["torch"].is_grad_enabled

    def differentiates(q: Any, k: Any, v: Any) -> bool:
        try:
            return is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        except AttributeError:  # k or v is something else, and will be refused
            return False

    return differentiates


def recording_mode() -> str | None:
    """The mode of torch that sees every operation; None if there is none.

    The mode of `torch.set_default_device` only says where new tensors go.
    """
    torch = sys.modules["torch"]
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode of torch"
    for number in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(number))
        if kind.__module__ != "torch.utils._device":
            return f"torch's mode {kind.__name__}"
    return None


def shown(family: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Shows what runs in it to torch's profiler as `name`, while that is on. The fast path of a repeated
    call is closed while the profiler is on (arrays/fast_path.py)."""
    if family == "torch" and sys.modules["torch"].autograd.profiler._is_profiler_enabled:
        return sys.modules["torch"].autograd.profiler.record_function(name)
    return _NOTHING


_NOTHING: contextlib.nullcontext[Any] = contextlib.nullcontext()


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Raise where one of these torch tensors has a tangent of forward-mode differentiation."""
    torch = sys.modules["torch"]
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(NO_TANGENTS)


NO_TANGENTS = (
    "numba_flash has no forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp, jacfwd, hessian): use "
    "reverse mode (backward, torch.func.grad, vjp, jacrev), or pass torch.autograd.forward_ad.unpack_dual(x).primal"
)
