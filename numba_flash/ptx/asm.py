"""How an instruction becomes a Numba function: inline PTX, on scalars or on registers of a local array.

An instruction's function returns what `scalars` or `Registers` and `emit` make: its Numba signature
and the code that places the PTX. A local array (local.py) whose every index is a constant after unrolling
lives in registers, so "registers of an array" are its elements from an offset on.
"""

from llvmlite import ir
from numba.cuda import types

f32, f64, i32, i64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
LETTERS = {f32: "f", f64: "d", i32: "r", i64: "l"}  # PTX register classes, as LLVM's constraints name them


def scalars(text, signature, effect=True):
    """An instruction on scalars. $0 is the result, if any; the parameters follow in order.

    effect: it does more than compute its result (reads memory, waits), so it must stay where it is;
    memory accesses are then not moved across it either.
    """

    def codegen(context, builder, signature, arguments):
        result = context.get_value_type(signature.return_type)
        nothing = signature.return_type == types.none or signature.return_type == types.void
        constraints = [] if nothing else ["=" + LETTERS[result]]
        constraints += [LETTERS[value.type] for value in arguments] + ["~{memory}"] * effect
        function = ir.FunctionType(ir.VoidType() if nothing else result, [value.type for value in arguments])
        value = builder.call(ir.InlineAsm(function, text, ",".join(constraints), side_effect=effect), list(arguments))
        return context.get_dummy_value() if nothing else value

    return signature, codegen


class Registers:
    """`count` elements of a local array, from a position on."""

    def __init__(self, builder, array, at, count):
        self._builder = builder
        self.pointers = [builder.gep(array, [builder.add(at, ir.Constant(at.type, i))]) for i in range(count)]

    def load(self):
        return [self._builder.load(pointer) for pointer in self.pointers]

    def store(self, values):
        for pointer, value in zip(self.pointers, values, strict=True):
            self._builder.store(value, pointer)


def start():
    """The position of an array's first element, for Registers."""
    return ir.Constant(i32, 0)


def emit(builder, text, writes, reads=(), updates=False, effect=True, unset=False):
    """Place PTX text. writes: Registers, $0 to $n-1; reads: values, from $n on.

    updates: what is written is read first, in the same physical registers (accumulators). unset: likewise, but what is
    read has no value yet.
    """
    pointers = [pointer for registers in writes for pointer in registers.pointers]
    kinds = [pointer.type.pointee for pointer in pointers]
    values = list(reads)
    constraints = ["=" + LETTERS[kind] for kind in kinds] + [LETTERS[value.type] for value in values]
    if unset:
        values += [ir.Constant(kind, ir.Undefined) for kind in kinds]
    elif updates:
        values += [value for registers in writes for value in registers.load()]
    if updates or unset:
        constraints += [str(i) for i in range(len(kinds))]
    constraints += ["~{memory}"] * effect
    result = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    function = ir.FunctionType(result if kinds else ir.VoidType(), [value.type for value in values])
    call = builder.call(ir.InlineAsm(function, text, ",".join(constraints), side_effect=effect), values)
    if len(kinds) == 1:
        builder.store(call, pointers[0])
    else:
        for i, pointer in enumerate(pointers):
            builder.store(builder.extract_value(call, i), pointer)


def braces(first, count):
    """{$first, ..., $first+count-1}: a vector of operands in PTX."""
    return "{" + ", ".join(f"${i}" for i in range(first, first + count)) + "}"
