"""LLVM code for numbers, made by Python's operators. rules.py computes with these values in a compiled function."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing import signature

from .. import on_cpu, quick
from ..rules import Pair
from .number_types import Number, Truth, is_narrow, is_truth


class Value:
    """A value of the code that is being made, with Python's operators; Python's own numbers are constants."""

    def __init__(self, code: "Code", value: Any, whole: bool = False):
        self.code, self.value, self.whole = code, value, whole  # whole: it was a whole number

    def _constant(self, other: Any) -> Any:
        return other.value if isinstance(other, Value) else ir.Constant(self.value.type, float(other))

    def _do(self, what: str, other: Any, turned: bool = False) -> "Value":
        one, two = self.value, self._constant(other)
        operands = (two, one) if turned else (one, two)
        return Value(self.code, getattr(self.code.builder, what)(*operands, flags=self.code.flags))

    def _ask(self, what: str, other: Any) -> "Value":
        compare = self.code.builder.fcmp_unordered if what == "!=" else self.code.builder.fcmp_ordered
        return Value(self.code, compare(what, self.value, self._constant(other)))

    def __neg__(self) -> "Value":
        return self._do("fsub", -0.0, turned=True)  # NVVM has no fneg

    def __and__(self, other: Any) -> "Value":
        return Value(self.code, self.code.builder.and_(self.value, other.value))

    def __or__(self, other: Any) -> "Value":
        return Value(self.code, self.code.builder.or_(self.value, other.value))

    def __xor__(self, other: Any) -> "Value":
        return Value(self.code, self.code.builder.xor(self.value, other.value))

    def __add__(self, other: Any) -> "Value":
        return self._do("fadd", other)

    def __sub__(self, other: Any) -> "Value":
        return self._do("fsub", other)

    def __rsub__(self, other: Any) -> "Value":
        return self._do("fsub", other, turned=True)

    def __mul__(self, other: Any) -> "Value":
        return self._do("fmul", other)

    def __truediv__(self, other: Any) -> "Value":
        if self.code.is_quick and not self.whole:  # quotients of integers, such as distances, must be exact
            return self * quick.reciprocal(Value(self.code, self._constant(other)), self.code)
        return self._do("fdiv", other)

    def __rtruediv__(self, other: Any) -> "Value":
        return Value(self.code, self._constant(other)) / self

    def __lt__(self, other: Any) -> "Value":
        return self._ask("<", other)

    def __gt__(self, other: Any) -> "Value":
        return self._ask(">", other)

    def __eq__(self, other: Any) -> "Value":  # type: ignore[override]
        return self._ask("==", other)

    def __ne__(self, other: Any) -> "Value":  # type: ignore[override]
        return self._ask("!=", other)

    __radd__, __rmul__, __hash__ = __add__, __mul__, None  # type: ignore[assignment]


class Code:
    """Makes code; it is `f` of rules.py. flags: LLVM's fast-math flags; contract: a product and a sum may be rounded
    once together (fma)."""

    def __init__(self, context: Any, builder: Any, base: Any, flags: tuple[str, ...] = ()):
        self.context, self.builder, self.base = context, builder, base
        self.flags = flags or ("contract",) * base.quick
        self.zero, self.one = self.number(0), self.number(1)
        self.largest = self.number(float(np.finfo(str(base.type)).max))

    def number(self, x: float) -> Value:
        return Value(self, ir.Constant(self.context.get_value_type(self.base.type), float(x)))

    def __getattr__(self, name: str) -> Callable[..., Value]:
        """A function of math: the target's own code, or on a CPU code that LLVM can vectorise."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in on_cpu.FUNCTIONS and not self.on_gpu:
            return functools.partial(self._on_cpu, name)
        if name in quick.FUNCTIONS and self.is_quick:
            return lambda x: quick.FUNCTIONS[name](x, self)
        return functools.partial(self._by_target, name)

    def _on_cpu(self, name: str, x: Value) -> Value:
        """Computes it by polynomials. Products and sums may be rounded once together, which halves the instructions."""
        fused = Code(self.context, self.builder, self.base, ("contract",))
        return Value(self, on_cpu.FUNCTIONS[name](Value(fused, x.value), fused).value)

    def _by_target(self, name: str, *values: Value) -> Value:
        own = signature(self.base.type, *[self.base.type] * len(values))
        made = self.context.get_function(getattr(math, name), own)
        return Value(self, made(self.builder, [v.value for v in values]))

    def each(self, d: Value, function: Callable[[Value], Value]) -> Value:
        """Applies `function` to a derivative by one number. numbers.py has derivatives by several numbers."""
        return function(d)

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        return Value(self, self.builder.select(condition.value, x.value, y.value))

    def fmod(self, x: Value, y: Value) -> Value:
        if self.on_gpu:  # a GPU's frem is built from approximate divisions
            return self._by_target("fmod", x, y)
        return Value(self, self.builder.frem(x.value, y.value))

    @property
    def on_gpu(self) -> bool:
        return "nvptx" in self.builder.module.triple

    @property
    def is_quick(self) -> bool:
        return self.base.quick and self.on_gpu

    def approx(self, name: str, x: Value) -> Value:
        """An approximate GPU instruction, right to some units of float32's last place."""
        kind = x.value.type
        words, registers = f"{name}.approx.ftz.f32 $0, $1;", "=f,f"
        made = self.builder.asm(ir.FunctionType(kind, [kind]), words, registers, [x.value], False)
        return Value(self, made)

    def _by_intrinsic(self, name: str, x: Value) -> Value:
        """One instruction, by LLVM's name for it, or by that of libdevice, where NVVM does not know LLVM's."""
        kind, module = x.value.type, self.builder.module
        if self.on_gpu:
            library = f"__nv_{name}" + ("f" if self.base.type is types.float32 else "")
            declared = cgutils.get_or_insert_function(module, ir.FunctionType(kind, [kind]), library)
        else:
            declared = module.declare_intrinsic(f"llvm.{name}", [kind])
        return Value(self, self.builder.call(declared, [x.value]))

    # Bits of a number, for on_cpu.py.

    @property
    def bytes(self) -> int:
        return 4 if self.base.type is types.float32 else 8

    def _format(self) -> tuple[Any, int, int]:
        """The integer type as wide as a real number, its bits of mantissa, and its exponent's bias."""
        return (ir.IntType(32), 23, 127) if self.bytes == 4 else (ir.IntType(64), 52, 1023)

    def power_of_2(self, n: Value) -> Value:
        """2^n for a whole number n; the result is in the range of normal numbers."""
        kind, mantissa, bias = self._format()
        exponent = self.builder.add(self.builder.fptosi(n.value, ir.IntType(32)), ir.Constant(ir.IntType(32), bias))
        bits = self.builder.shl(exponent if self.bytes == 4 else self.builder.zext(exponent, kind), kind(mantissa))
        return Value(self, self.builder.bitcast(bits, self.zero.value.type))

    def parts(self, x: Value) -> tuple[Value, Value]:
        """x, a normal number above 0, as m * 2^n with m in [1/2, 1)."""
        (kind, mantissa, bias), builder = self._format(), self.builder
        bits = builder.bitcast(x.value, kind)
        exponent = builder.sub(builder.and_(builder.lshr(bits, kind(mantissa)), kind(2 * bias + 1)), kind(bias - 1))
        half = builder.or_(builder.and_(bits, kind(2**mantissa - 1)), kind((bias - 1) << mantissa))
        real = self.zero.value.type
        exponent = exponent if self.bytes == 4 else builder.trunc(exponent, ir.IntType(32))
        return Value(self, builder.bitcast(half, real)), Value(self, builder.sitofp(exponent, real))

    floor = functools.partialmethod(_by_intrinsic, "floor")
    ceil = functools.partialmethod(_by_intrinsic, "ceil")
    trunc = functools.partialmethod(_by_intrinsic, "trunc")
    rint = functools.partialmethod(_by_intrinsic, "rint")
    fabs = functools.partialmethod(_by_intrinsic, "fabs")
    sqrt = functools.partialmethod(_by_intrinsic, "sqrt")

    def of(self, t: Any, value: Any) -> Pair:
        """A number of any type as a Pair for rules.py."""
        if isinstance(t, Truth):
            return Pair(Value(self, self.builder.uitofp(value, self.zero.value.type), whole=True))
        if isinstance(t, Number):
            members = cgutils.create_struct_proxy(t)(self.context, self.builder, value=value)
            if t.kind == "whole":
                return Pair(Value(self, self.builder.sitofp(members.x, self.zero.value.type), whole=True))
            return Pair(Value(self, members.x), Value(self, members.d) if t.kind == "dual" else None)
        whole = isinstance(types.unliteral(t), types.Integer)
        return Pair(Value(self, self.context.cast(self.builder, value, t, self.base.type), whole))

    def whole(self, t: Any, value: Any, narrow: bool = False) -> Any:
        """A whole number of any type as an int64, or as an int32 if it is one."""
        if not isinstance(t, Number):
            return self.context.cast(self.builder, value, t, types.int32 if narrow else types.int64)
        if isinstance(t, Truth):
            return self.builder.zext(value, ir.IntType(32 if narrow else 64))
        x = cgutils.create_struct_proxy(t)(self.context, self.builder, value=value).x
        if narrow or not t.narrow:
            return x
        extend = self.builder.zext if t.within[0] >= 0 else self.builder.sext
        return extend(x, ir.IntType(64))

    def resized(self, x: Any, kind: Any) -> Any:
        """A signed whole number as another integer type, into which it fits."""
        if x.type == kind:
            return x
        return (self.builder.sext if kind.width > x.type.width else self.builder.trunc)(x, kind)

    def wholes(self, sig: Any, args: Any) -> list[Any]:
        """Whole numbers in the type of an operation on them: int32 if they and the result are int32."""
        types_of = (sig.return_type, *sig.args)
        narrow = all(is_narrow(t) for t in types_of if not is_truth(t))
        return [self.whole(t, value, narrow) for t, value in zip(sig.args, args, strict=True)]

    def truth(self, t: Any, value: Any) -> Any:
        """Whether a number of any type is not 0."""
        if is_truth(t):
            return value
        if not isinstance(t, Number):
            return self.context.is_true(self.builder, types.unliteral(t), value)
        x = cgutils.create_struct_proxy(t)(self.context, self.builder, value=value).x
        if t.kind == "whole":
            return self.builder.icmp_signed("!=", x, ir.Constant(x.type, 0))
        return self.builder.fcmp_unordered("!=", x, self.zero.value)

    def difference(self, sig: Any, args: Any) -> Any:
        """q_pos - k_pos, which all scores of a diagonal share; None for other numbers."""
        sides = [getattr(t, "side", "") for t in sig.args]
        if sorted(sides) != ["key", "query"]:
            return None
        at = sides.index("query")
        ahead = cgutils.create_struct_proxy(sig.args[at])(self.context, self.builder, value=args[at]).ahead
        return self.builder.sub(ir.Constant(ahead.type, 0), ahead, flags=("nsw",)) if at else ahead

    def made(self, t: Any, x: Any, d: Any = None) -> Any:
        """A number of type t."""
        if is_truth(t):
            return x
        members = cgutils.create_struct_proxy(t)(self.context, self.builder)
        members.x = self.resized(x, ir.IntType(32)) if t.narrow else x
        if t.kind == "dual":
            members.d = self.zero.value if d is None else d
        return members._getvalue()

    def given(self, t: Any, pair: Pair) -> Any:
        return self.made(t, pair.x.value, pair.d and pair.d.value)
