"""LLVM vectors for the CPU rung: Numba intrinsics over plain addresses, one LLVM function each.

Numba's own loops leave the register tile and exp to chance, so the few hot loops are written here as
LLVM vectors. Conventions shared by all of them:

- An address is an int64, a stride is an int64 in bytes, a count is in elements.
- The last argument, `zero`, is np.float32(0) or np.float64(0): its type says which of the two
  precisions is meant, so one Python function serves both.
- A *panel* is `lanes(zero)` query rows side by side. Everything that belongs to a panel is stored with
  the rows innermost: q as (head_dim, lanes), scores as (keys, lanes), o as (head_dim_v, lanes). A key or a
  value is then one scalar that meets all rows of the panel, so k and v are read where the caller left
  them, nothing of them is transposed, and softmax needs no sum across a vector.
- Each intrinsic is a call to a function of its own (never inlined), which keeps its accumulators in
  registers whatever the caller looks like and is compiled once per module.
"""

# mypy: ignore-errors

import math

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

I8, I16, I32, I64, F32, F64 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.DoubleType(),
)
VOID = ir.VoidType()
LOG2_E = 1.4426950408889634


def _host_shape():
    """(vector bytes, vectors in a panel, keys in a register tile, fused multiply-add?) of the host.

    Accumulators take keys * vectors registers, next to the panel's vectors and one broadcast: 15 of 16
    registers with AVX or SSE, 27 of 32 with AVX-512 (broadcasts come from memory there) and NEON.
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    features = set(features.split(","))
    if "+avx512f" in features:
        return 64, 2, 12, True
    if "+avx" in features:
        return 32, 2, 6, "+fma" in features
    if triple.startswith(("aarch64", "arm64")):
        return 16, 4, 6, True
    return 16, 2, 6, False


VECTOR_BYTES, PANEL_VECTORS, TILE_KEYS, HAS_FMA = _host_shape()


class Shape:
    """Vector types and constants of one precision."""

    def __init__(self, numba_type):
        double = numba_type == types.float64
        self.numba = numba_type
        self.scalar = F64 if double else F32
        self.int = I64 if double else I32
        self.bytes = 8 if double else 4
        self.width = VECTOR_BYTES // self.bytes
        self.lanes = PANEL_VECTORS * self.width
        self.vector = ir.VectorType(self.scalar, self.width)
        self.int_vector = ir.VectorType(self.int, self.width)
        self.name = f"v{self.width}f{8 * self.bytes}"
        self.mantissa_bits = 52 if double else 23

    def const(self, value):
        return ir.Constant(self.vector, [value] * self.width)

    def int_const(self, value):
        return ir.Constant(self.int_vector, [value] * self.width)

    def pointer(self, b, address):
        return b.inttoptr(address, self.scalar.as_pointer())

    def load(self, b, pointer, index):
        at = b.bitcast(b.gep(pointer, [index]), self.vector.as_pointer())
        return b.load(at, align=self.bytes)

    def store(self, b, value, pointer, index):
        b.store(value, b.bitcast(b.gep(pointer, [index]), self.vector.as_pointer()), align=self.bytes)

    def splat(self, b, x):
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = b.insert_element(undefined, x, I32(0))
        return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, self.width), [0] * self.width))

    def splat_from(self, b, pointer, index):
        return self.splat(b, b.load(b.gep(pointer, [index])))

    def fma(self, b, x, y, z):
        if not HAS_FMA:  # llvm.fma would become a library call per element
            return b.fadd(b.fmul(x, y), z)
        kind = x.type
        name = f"llvm.fma.{self.name}" if kind == self.vector else f"llvm.fma.f{8 * self.bytes}"
        return b.call(declare(b, name, kind, [kind] * 3), [x, y, z])

    def max(self, b, x, y):
        """The larger one; y where they cannot be compared. One instruction, unlike llvm.maxnum."""
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def across(self, b, what, x):
        """Sum ("fadd") or maximum ("fmax") of a vector's elements, halving it each time."""
        width = self.width
        while width > 1:
            width //= 2
            low, high = (
                b.shuffle_vector(
                    x,
                    ir.Constant(x.type, ir.Undefined),
                    ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))),
                )
                for at in (0, width)
            )
            x = b.fadd(low, high) if what == "fadd" else self.max(b, low, high)
        return b.extract_element(x, I32(0))


def declare(b, name, result, arguments):
    known = b.module.globals.get(name)
    return known or ir.Function(b.module, ir.FunctionType(result, arguments), name)


def loop(b, begin, end, step, carried, body):
    """for i in range(begin, end, step): carried = body(i, carried). Leaves b after the loop."""
    before, head, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", begin, end), head, after)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(begin, before)
    phis = [b.phi(x.type) for x in carried]
    for phi, x in zip(phis, carried, strict=True):
        phi.add_incoming(x, before)
    results = body(i, list(phis))
    tail, following = b.block, b.add(i, step)
    i.add_incoming(following, tail)
    for phi, x in zip(phis, results, strict=True):
        phi.add_incoming(x, tail)
    b.cbranch(b.icmp_signed("<", following, end), head, after)
    b.position_at_end(after)
    out = [b.phi(x.type) for x in carried]
    for phi, x, y in zip(out, carried, results, strict=True):
        phi.add_incoming(x, before)
        phi.add_incoming(y, tail)
    return out


def vector_function(arguments, result=None):
    """Makes an intrinsic of `build(b, shape, *arguments)`, which writes the body of one LLVM function.

    `arguments` is one letter each: i an int64, x a number of the precision. `result` likewise, or None.
    """

    def decorate(build):
        def typed(shape, letter):
            return shape.numba if letter == "x" else types.int64

        def low(shape, letter):
            return shape.scalar if letter == "x" else I64

        def generator(shape):
            def generate(context, b, signature, values):
                name = f"numba_flash.{build.__name__}.{shape.name}"
                fn = b.module.globals.get(name)
                if fn is None:
                    to = low(shape, result) if result else VOID
                    fn = ir.Function(b.module, ir.FunctionType(to, [low(shape, a) for a in arguments]), name)
                    fn.linkage = "linkonce_odr"
                    fn.attributes.add("noinline")
                    fn.attributes.add("nounwind")
                    inner = ir.IRBuilder(fn.append_basic_block("entry"))
                    value = build(inner, shape, *fn.args)
                    inner.ret(value) if result else inner.ret_void()
                value = b.call(fn, values[:-1])
                return value if result else context.get_dummy_value()

            return generate

        # An intrinsic's Python signature is its Numba signature, and it takes no *args.
        names = ", ".join(f"a{n}" for n in range(len(arguments)))
        scope = {
            "types": types,
            "Shape": Shape,
            "generator": generator,
            "typed": typed,
            "arguments": arguments,
            "result": result,
        }
        exec(
            f"def f(typingctx, {names}, zero):\n"
            "    shape = Shape(zero)\n"
            "    to = typed(shape, result) if result else types.void\n"
            "    return to(*[typed(shape, a) for a in arguments], zero), generator(shape)\n",
            scope,
        )
        made = scope["f"]
        made.__name__, made.__doc__ = build.__name__, build.__doc__
        return intrinsic(made)

    return decorate


# Scalars at an address.


@intrinsic
def lanes(typingctx, zero):
    """Query rows of a panel, a constant of the precision."""
    return types.int64(zero), lambda context, b, sig, args: I64(Shape(sig.args[0]).lanes)


@intrinsic
def size_of(typingctx, zero):
    """Bytes of a number of the precision, a constant."""
    return types.int64(zero), lambda context, b, sig, args: I64(Shape(sig.args[0]).bytes)


@intrinsic
def load(typingctx, address, index, zero):
    """The element number `index` from an address; `zero`, of any numeric type, says what lies there."""

    def generate(context, b, sig, args):
        kind = context.get_value_type(sig.args[2])
        return b.load(b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]]))

    return zero(types.int64, types.int64, zero), generate


@intrinsic
def store(typingctx, address, index, value):
    """Write `value` as the element number `index` from an address."""

    def generate(context, b, sig, args):
        at = b.gep(b.inttoptr(args[0], args[2].type.as_pointer()), [args[1]])
        b.store(args[2], at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), generate


@intrinsic
def fetch_add(typingctx, address):
    """Add 1 to the int64 at an address in one step, seen by all threads; returns the old number."""

    def generate(context, b, sig, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), I64(1), "acq_rel")

    return types.int64(types.int64), generate


def _in_ieee_modes(context, b, run):
    """run() with the thread's floating-point modes as IEEE 754 has them, and afterwards as they were.

    A caller, or a library built with -ffast-math, may have set its threads to take subnormal numbers as 0 (a float16
    below 6.1e-5 is one while it is converted), to round in other ways, or to trap. Started threads inherit that.
    """
    triple = context.codegen().magic_tuple()[0]
    if triple.startswith(("x86_64", "amd64")):
        before, ours = cgutils.alloca_once(b, I32), cgutils.alloca_once(b, I32)
        read, write = (declare(b, f"llvm.x86.sse.{name}", VOID, [I8.as_pointer()]) for name in ("stmxcsr", "ldmxcsr"))
        before, to = (b.bitcast(memory, I8.as_pointer()) for memory in (before, ours))
        b.call(read, [before])
        b.store(I32(0x1F80), ours)
        b.call(write, [to])
        run()
        b.call(write, [before])
    elif triple.startswith(("aarch64", "arm64")):
        before = b.call(declare(b, "llvm.aarch64.get.fpcr", I64, []), [])
        write = declare(b, "llvm.aarch64.set.fpcr", VOID, [I64])
        b.call(write, [I64(0)])
        run()
        b.call(write, [before])
    else:
        run()


@intrinsic
def call(typingctx, function, frame, first, scratch):
    """Call the C function void(int64, int64, int64) at an address, which is a kernel's way in: all its arithmetic is
    in there."""

    def generate(context, b, sig, args):
        kind = ir.FunctionType(VOID, [I64] * 3)
        kernel = b.inttoptr(args[0], kind.as_pointer())
        _in_ieee_modes(context, b, lambda: b.call(kernel, args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def call_function(typingctx, function, arguments):
    """Call a C function of int64 numbers, which gives nothing, at an address; `arguments` is a tuple of them."""

    def generate(context, b, sig, args):
        numbers = cgutils.unpack_tuple(b, args[1])
        kind = ir.FunctionType(VOID, [I64] * len(numbers))
        b.call(b.inttoptr(args[0], kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), generate


@intrinsic
def float_bits(typingctx, bits):
    """The float32 with these 32 bits (the low half of an int64)."""
    return types.float32(types.int64), lambda context, b, sig, args: b.bitcast(b.trunc(args[0], I32), F32)


@intrinsic
def bits_float(typingctx, value):
    """The 32 bits of a float32 as an int64."""
    return types.int64(types.float32), lambda context, b, sig, args: b.zext(b.bitcast(args[0], I32), I64)


# exp2.


def _exp2_terms(shape):
    """Coefficients, highest first, of a polynomial for 2^f on [-1/2, 1/2]; the last is 1.

    float32: minimax of degree 6, 2e-9 off, 0.7 ulp once evaluated in float32. float64: Taylor, 4e-18 off.
    """
    if shape.bytes == 4:
        return (
            0.00015353561854909126,
            0.001339887448738232,
            0.009618437358480968,
            0.055503324709264806,
            0.24022647913615625,
            0.6931472028551702,
            1.0,
        )
    return tuple(math.log(2) ** k / math.factorial(k) for k in range(13, -1, -1))


def exp2_vectors(b, shape, xs):
    """2^x of each x <= 0; exactly 0 far below the smallest normal number and for -inf; NaN stays NaN.

    Several vectors go through each step together: one chain alone would wait for its own results.
    """
    # At the lower end the fraction is 0, the polynomial 1.0, and taking the whole bias off its exponent
    # leaves the bits of 0.0. Between there and the smallest normal number results are of its size or less.
    lowest = shape.const(-127.0 if shape.bytes == 4 else -1023.0)
    magic = shape.const(1.5 * 2.0**shape.mantissa_bits)  # adding it rounds to an integer, in the low bits
    xs = [shape.max(b, lowest, x) for x in xs]
    shifted = [b.fadd(x, magic) for x in xs]
    fractions = [b.fsub(x, b.fsub(rounded, magic)) for x, rounded in zip(xs, shifted, strict=True)]
    terms = _exp2_terms(shape)
    ys = [shape.const(terms[0])] * len(xs)
    for term in terms[1:]:
        ys = [shape.fma(b, y, fraction, shape.const(term)) for y, fraction in zip(ys, fractions, strict=True)]
    results = []
    for y, rounded in zip(ys, shifted, strict=True):
        exponent = b.shl(b.bitcast(rounded, shape.int_vector), shape.int_const(shape.mantissa_bits))
        results.append(b.bitcast(b.add(b.bitcast(y, shape.int_vector), exponent), shape.vector))
    return results
