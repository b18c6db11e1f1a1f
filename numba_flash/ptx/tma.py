"""cp.async.bulk.tensor: whole boxes of a tensor between global and shared memory, by one thread (PTX ISA 9.7.9.27).

cc 9.0. A tensor map (128 bytes, made on the host, see tensor_maps.py) says where the tensor lies, its extents and
strides, the box that one instruction moves and how the box is swizzled in shared memory. Coordinates are
elements, innermost dimension first; what a box has outside of the tensor reads as zero and is not written.
Shared addresses are multiples of 128 (swizzled boxes: of 1024). `tensor_map` is a generic address.

A load counts its bytes, the whole box, on an mbarrier; a wait there makes them visible. It is ordered with
nothing else: who read the old contents must have arrived at a barrier that the loading thread waited for.
A store is waited for by groups of the thread that issued it, like cp.async; data written by ordinary stores
needs fence.proxy_async in the writing threads and a barrier before it.
"""

import functools

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm

_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {}], [$2];"
_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group [$0, {}], [$1];"
_ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{} [$0], [$1], $2;"
_i32, _i64, _void = types.int32, types.int64, types.void


@intrinsic
def load_2d(typingctx, target, tensor_map, barrier, c0, c1):
    """Box at (c0, c1) -> shared address `target`; its bytes count on the mbarrier `barrier`."""
    return asm.scalars(_LOAD.format(2, asm.braces(3, 2)), _void(_i32, _i64, _i32, _i32, _i32))


@intrinsic
def load_3d(typingctx, target, tensor_map, barrier, c0, c1, c2):
    """Box at (c0, c1, c2) -> shared address `target`; its bytes count on the mbarrier `barrier`."""
    return asm.scalars(_LOAD.format(3, asm.braces(3, 3)), _void(_i32, _i64, _i32, _i32, _i32, _i32))


@intrinsic
def load_4d(typingctx, target, tensor_map, barrier, c0, c1, c2, c3):
    """Box at (c0, c1, c2, c3) -> shared address `target`; its bytes count on the mbarrier `barrier`."""
    return asm.scalars(_LOAD.format(4, asm.braces(3, 4)), _void(_i32, _i64, _i32, _i32, _i32, _i32, _i32))


@intrinsic
def load_5d(typingctx, target, tensor_map, barrier, c0, c1, c2, c3, c4):
    """Box at (c0, c1, c2, c3, c4) -> shared address `target`; its bytes count on the mbarrier `barrier`."""
    return asm.scalars(_LOAD.format(5, asm.braces(3, 5)), _void(_i32, _i64, _i32, _i32, _i32, _i32, _i32, _i32))


@intrinsic
def load_bytes(typingctx, target, source, barrier, count):
    """cp.async.bulk: `count` bytes at global address `source` -> shared address `target`; they count on `barrier`.

    No tensor map: the bytes lie side by side (PTX ISA 9.7.9.25.4.1). Both addresses and count: multiples of 16.
    """
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $3, [$2];"
    return asm.scalars(text, _void(_i32, _i64, _i32, _i32))


@intrinsic
def store_bytes(typingctx, target, source, count):
    """cp.async.bulk: `count` bytes at shared address `source` -> global address `target`; of the thread's open group.

    Both addresses and count: multiples of 16 (PTX ISA 9.7.9.25.4.1).
    """
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    return asm.scalars(text, _void(_i64, _i32, _i32))


@intrinsic
def add_bytes(typingctx, target, source, count):
    """cp.reduce.async.bulk: float32 numbers at global address `target` += those at shared address `source`, one by one.

    Otherwise as store_bytes (PTX ISA 9.7.9.25.4.2). Each addition is atomic; those of several copies have no order.
    """
    return asm.scalars(_ADD.format("f32"), _void(_i64, _i32, _i32))


@intrinsic
def add_bytes_f64(typingctx, target, source, count):
    """The same for float64 numbers."""
    return asm.scalars(_ADD.format("f64"), _void(_i64, _i32, _i32))


@intrinsic
def store_2d(typingctx, tensor_map, source, c0, c1):
    """Box at shared address `source` -> the tensor at (c0, c1); belongs to the thread's open group."""
    return asm.scalars(_STORE.format(2, asm.braces(2, 2)), _void(_i64, _i32, _i32, _i32))


@intrinsic
def store_3d(typingctx, tensor_map, source, c0, c1, c2):
    """Box at shared address `source` -> the tensor at (c0, c1, c2); belongs to the thread's open group."""
    return asm.scalars(_STORE.format(3, asm.braces(2, 3)), _void(_i64, _i32, _i32, _i32, _i32))


@intrinsic
def store_4d(typingctx, tensor_map, source, c0, c1, c2, c3):
    """Box at shared address `source` -> the tensor at (c0, c1, c2, c3); belongs to the thread's open group."""
    return asm.scalars(_STORE.format(4, asm.braces(2, 4)), _void(_i64, _i32, _i32, _i32, _i32, _i32))


@intrinsic
def store_5d(typingctx, tensor_map, source, c0, c1, c2, c3, c4):
    """Box at shared address `source` -> the tensor at (c0, ..., c4); belongs to the thread's open group."""
    return asm.scalars(_STORE.format(5, asm.braces(2, 5)), _void(_i64, _i32, _i32, _i32, _i32, _i32, _i32))


@intrinsic
def commit_group(typingctx):
    """cp.async.bulk.commit_group: this thread's stores since the last commit are a group."""
    return asm.scalars("cp.async.bulk.commit_group;", types.void())


@functools.cache
def wait_group_read(newest):
    """-> a function that waits until all but this thread's `newest` newest groups have read their shared memory."""

    @intrinsic
    def wait(typingctx):
        return asm.scalars(f"cp.async.bulk.wait_group.read {newest};", types.void())

    return wait


@functools.cache
def wait_group(newest):
    """-> a function that waits until all but this thread's `newest` newest groups are done and their writes made."""

    @intrinsic
    def wait(typingctx):
        return asm.scalars(f"cp.async.bulk.wait_group {newest};", types.void())

    return wait


@intrinsic
def prefetch(typingctx, tensor_map):
    """prefetch.tensormap: bring a tensor map near, so that the first copy does not wait for it (PTX ISA 9.7.9.16)."""
    return asm.scalars("prefetch.tensormap [$0];", types.void(types.int64))


@functools.cache
def parameter(entry):
    """-> a function () -> the generic address of kernel `entry`'s first parameter, where its tensor maps lie.

    The kernel declares that parameter as a uint64 called tensor_maps; compiled.to_ptx turns its
    declaration into bytes, since Numba has no parameter by value of that size. The parameter's name is
    made of the kernel's. Stand-in: sim.tma.parameter.
    """

    @intrinsic
    def address(typingctx):
        text = f"{{ .reg .b64 p; mov.b64 p, {entry}_param_0; cvta.param.u64 $0, p; }}"
        return asm.scalars(text, types.int64(), effect=False)

    return address
