"""The fast path of a repeated call. It takes arrays of NumPy, CuPy or torch, options that are neither arrays nor
functions nor a seed, and a launch that needs only addresses.

`prepare` creates an Array for every argument of a call, and a key of their Layouts. For a tiny problem that takes
longer than the kernel. So `find` reads q, k and v in one pass (arrays/fast_path.py) and looks up a cached call: how the
results are allocated and what starts the launch. `run` stores it after the first call with the same key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import arrays
from ..arrays import Array, Layout
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, GRADIENT_OF, Options
from .call import Call
from .launch import Addresses, Launch

Made = tuple[tuple[int, ...], str]  # shape and dtype
NO_OPTIONS = (0,) * len(ARRAY_NAMES)  # the addresses of a call without options
NO_LSE_OR_OPTIONS = (0, *NO_OPTIONS)
NO_GRADIENTS = (0,) * (len(GRADIENT_OF) - 3)  # addresses of the gradients of options


def is_cacheable(launch: Launch, *given: Any) -> bool:
    """Whether later calls with the same key can take the fast path. given: the arrays."""
    return launch.by_addresses and all(arrays.fast_paths[type(x)] for x in given)


class _Device(NamedTuple):
    """The device facts that a launch needs if q is in device memory."""

    layout: Layout
    number: int
    current_stream: Callable[[int], int]

    @staticmethod
    def of(family: arrays.FastPath, layout: Layout) -> "_Device | None":
        if layout.device is None:
            return None
        assert family.current_stream is not None
        return _Device(layout, layout.device, family.current_stream)

    def about(self, q: Any, address: int) -> tuple[Array, int]:
        """q as an Array, and the stream to work on."""
        return Array(address, self.layout, q), self.current_stream(self.number)


class CachedForward(NamedTuple):
    """Runs a repeated call of attention(). options and kernel: those of the first such call."""

    start: Callable[..., None]
    make_o: Callable[[Any], Any]
    make_lse: Callable[[Any], Any] | None
    address: Callable[[Any], int]  # address of an array that make_o or make_lse returned
    note_writing: Callable[[Any], None] | None
    device: _Device | None
    options: Options
    kernel: Any
    bounds: tuple[tuple[int, int], ...]  # the byte ranges of q, k, v and o, relative to their addresses

    @staticmethod
    def of(launch: Launch, call: Call, layouts: list[Layout], o: Made, lse: Made | None) -> "CachedForward":
        """layouts: of q, k, v and o; o, lse: their shapes and dtypes."""
        family, layout = arrays.fast_paths[type(call.operands[0])], layouts[0]
        makers = family.maker(layout, *o), None if lse is None else family.maker(layout, *lse)
        options = call.options
        options = options._replace(window=options.window and window_sides(options.window))  # a list might be changed
        bounds = tuple([each.byte_bounds for each in layouts])
        own = launch.shortest(), *makers, family.address, family.note_writing
        return CachedForward(*own, _Device.of(family, layout), options, call.kernel, bounds)

    def overlaps(self, addresses: Addresses) -> bool:
        """Whether an input's first or last byte lies inside out, or the other way round. addresses: of q, k, v, out."""
        q, k, v, (low, high) = self.bounds
        at_q, at_k, at_v, at = addresses
        low, high = at + low, at + high
        return (
            (low < at_q + q[1] and at_q + q[0] < high)
            or (low < at_k + k[1] and at_k + k[0] < high)
            or (low < at_v + v[1] and at_v + v[0] < high)
        )

    def run(self, q: Any, addresses: Addresses, out: Any = None) -> tuple[Any, Any]:
        """o, and lse or None. addresses: of q, k, v and, if given, out."""
        start, make_o, make_lse, address, note_writing, device, _, _, _ = self
        if out is None:
            o = make_o(q)
            addresses += (address(o),)
        else:
            o = out
            if note_writing is not None:
                note_writing(o)
        if make_lse is None:
            lse, every = None, addresses + NO_LSE_OR_OPTIONS
        else:
            lse = make_lse(q)
            every = addresses + (address(lse),) + NO_OPTIONS  # faster than (*addresses, ...)
        if device is None:
            start(every)
        else:
            start(every, *device.about(q, addresses[0]))
        return o, lse


class CachedBackward(NamedTuple):
    """Runs a repeated call of attention_backward()."""

    start: Callable[..., None]
    makers: tuple[Callable[[Any], Any] | None, ...]  # they allocate dq, dk and dv; None if not wanted
    address: Callable[[Any], int]
    device: _Device | None

    @staticmethod
    def of(launch: Launch, q: Any, layout: Layout, shapes: tuple[Made | None, ...]) -> "CachedBackward":
        """shapes: of dq, dk and dv, None for those that are not wanted."""
        family = arrays.fast_paths[type(q)]
        makers = tuple([what and family.maker(layout, *what) for what in shapes])
        return CachedBackward(launch.shortest(), makers, family.address, _Device.of(family, layout))

    def run(self, q: Any, inputs: Addresses, incoming: Addresses) -> tuple[Any, Any, Any]:
        """dq, dk, dv, None for those that are not wanted. inputs: the addresses of q, k and v; incoming: of o, lse and
        do."""
        start, makers, address, device = self
        make_dq, make_dk, make_dv = makers
        dq, dk, dv = make_dq and make_dq(q), make_dk and make_dk(q), make_dv and make_dv(q)
        o, lse, do = incoming
        every = (
            *inputs, o, lse, *NO_OPTIONS, do, 0, 0 if dq is None else address(dq), 0 if dk is None else address(dk),
            0 if dv is None else address(dv), *NO_GRADIENTS,
        )  # fmt: skip
        if device is None:
            start(every)
        else:
            start(every, *device.about(q, inputs[0]))
        return dq, dk, dv
