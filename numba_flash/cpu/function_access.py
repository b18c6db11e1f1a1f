"""Memory access of a caller's function on the CPU: scores, places, and flags of a read outside an array."""

# mypy: ignore-errors

import functools

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..functions import compiled
from .vectors.build import VECTOR_BYTES, Shape

inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@intrinsic
def in_whole_vectors(typingctx):
    """Makes LLVM use vectors as long as those of build.py in the calling function. For most processors with AVX-512 it
    prefers half of that, which takes up to 1.3 times as long."""

    def generate(context, b, sig, args):
        width = f'"prefer-vector-width"="{8 * VECTOR_BYTES}"'
        set.add(b.function.attributes, width)  # llvmlite itself knows no attributes with a value
        return context.get_dummy_value()

    return types.void(), generate


# Scores and slopes are marked as not aliased by anything else that is read, so LLVM need not check that for each key.
@intrinsic
def read_score(typingctx, address, index, zero):
    def generate(context, b, sig, args):
        kind = context.get_value_type(sig.args[2])
        return _of_scores(b, b.load(b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]])))

    return zero(types.int64, types.int64, zero), generate


@intrinsic
def write_score(typingctx, address, index, value):
    def generate(context, b, sig, args):
        _of_scores(b, b.store(args[2], b.gep(b.inttoptr(args[0], args[2].type.as_pointer()), [args[1]])))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), generate


@intrinsic
def read_place(typingctx, address, index):
    def generate(context, b, sig, args):
        found = b.load(b.gep(b.inttoptr(args[0], ir.IntType(64).as_pointer()), [args[1]]))
        found.set_metadata("noalias", compiled.scope_of_scores(b.module))
        return found

    return types.int64(types.int64, types.int64), generate


# A flag says whether a read was outside an array. It is an int32 that LLVM keeps in a register.
FLAG = types.CPointer(types.int32)


@intrinsic
def new_flag(typingctx):
    def generate(context, b, sig, args):
        flag = cgutils.alloca_once(b, ir.IntType(32))
        b.store(ir.IntType(32)(0), flag)
        return flag

    return FLAG(), generate


@intrinsic
def lower(typingctx, flag):
    def generate(context, b, sig, args):
        b.store(ir.IntType(32)(0), args[0])
        return context.get_dummy_value()

    return types.void(FLAG), generate


@intrinsic
def new_flags(typingctx, zero):
    """A flag for each lane of a panel: LLVM would reduce all lanes into a single flag after every key."""

    def generate(context, b, sig, args):
        count = Shape(sig.args[0]).lanes
        flags = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(ir.IntType(32), count)), ir.IntType(32).as_pointer())
        for lane in range(count):
            b.store(ir.IntType(32)(0), b.gep(flags, [ir.IntType(32)(lane)]))
        return flags

    return FLAG(zero), generate


@intrinsic
def raise_too(typingctx, flags, lane, other):
    def generate(context, b, sig, args):
        place = b.gep(args[0], [args[1]])
        b.store(b.or_(b.load(place), b.load(args[2])), place)
        return context.get_dummy_value()

    return types.void(FLAG, types.int64, FLAG), generate


@intrinsic
def is_raised(typingctx, flag):
    def generate(context, b, sig, args):
        return b.icmp_unsigned("!=", b.load(args[0]), ir.IntType(32)(0))

    return types.boolean(FLAG), generate


@intrinsic
def write_flags(typingctx, address, index, flags, zero):
    """Writes whether one of them is raised, as an int64."""

    def generate(context, b, sig, args):
        found = ir.IntType(32)(0)
        for lane in range(Shape(sig.args[3]).lanes):
            found = b.or_(found, b.load(b.gep(args[2], [ir.IntType(32)(lane)])))
        b.store(b.zext(found, ir.IntType(64)), b.gep(b.inttoptr(args[0], ir.IntType(64).as_pointer()), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, FLAG, zero), generate


@inner
def as_they_are(places, zero):
    return places


@functools.cache
def in_halves():
    """-> (keep, read), like read_place, but places are stored in 32 bits. LLVM chooses the vector length by the widest
    number that the loop reads, so vectors of float32 become twice as long."""
    half = ir.IntType(32)

    @intrinsic
    def keep(typingctx, places, zero):
        def generate(context, b, sig, args):
            count = 2 * Shape(sig.args[1]).lanes
            whole, halves = (ir.VectorType(kind, count) for kind in (ir.IntType(64), half))
            memory = cgutils.alloca_once(b, ir.ArrayType(half, count))
            found = b.load(b.inttoptr(args[0], whole.as_pointer()), align=8)
            b.store(b.trunc(found, halves), b.bitcast(memory, halves.as_pointer()), align=4)
            return b.ptrtoint(memory, ir.IntType(64))

        return types.int64(types.int64, zero), generate

    @intrinsic
    def read(typingctx, address, index):
        def generate(context, b, sig, args):
            found = b.load(b.gep(b.inttoptr(args[0], half.as_pointer()), [args[1]]))
            found.set_metadata("noalias", compiled.scope_of_scores(b.module))
            return b.zext(found, ir.IntType(64))

        return types.int64(types.int64, types.int64), generate

    return keep, read


def _of_scores(b, instruction):
    instruction.set_metadata("alias.scope", compiled.scope_of_scores(b.module))
    return instruction


@intrinsic
def either(typingctx, condition, x, y):
    """x if the condition holds, otherwise y, without a branch."""
    return x(types.boolean, x, x), lambda context, b, sig, args: b.select(*args)
