"""The numbers of a user's function where Numba compiles it, for a GPU or for the CPU: types, and code by rules.py.

Plain numbers would not do. Numba makes float64 of a float32 and any whole number, and of whole / whole, and Python's
constants are float64: a kernel in float32 would compute in float64, at 1/64 of the speed on most GPUs. A Number is a
whole number, a real one, or a real one with its derivative (dual), that knows the type to compute in.

The function is built anew with stand-ins for builtins and math (function.py), which this file types and lowers. Nothing
here is compiled from Python: an operation becomes LLVM instructions at once, so a function compiles in a tenth of a
second.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.datamodel import models
from numba.core.extending import intrinsic, lower_builtin, lower_cast, lower_getattr, register_model
from numba.core.typeconv import Conversion
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global

from . import on_cpu, rules
from .function import MARK, Function
from .rules import Pair

BASES = {"float32": types.float32, "float64": types.float64}
KINDS = ("whole", "real", "dual")


class Number(types.Type):
    def __init__(self, kind: str, base: Any):
        self.kind, self.base = kind, base
        super().__init__(name=f"{kind}({base})")

    def unify(self, typingctx: Any, other: Any) -> Any:
        """The type of a variable that is this on one way and `other` on another."""
        kind = _kind_of(other)
        return None if kind is None else Number(max(self.kind, kind, key=KINDS.index), self.base)

    def can_convert_from(self, typingctx: Any, other: Any) -> Any:
        kind = _kind_of(other)
        fits = kind is not None and KINDS.index(kind) <= KINDS.index(self.kind)
        return Conversion.safe if fits else None


def _kind_of(t: Any) -> str | None:
    """Of a number's type, plain or not; None for other types."""
    if isinstance(t, Number):
        return t.kind
    t = types.unliteral(t)
    if isinstance(t, types.Integer | types.Boolean):
        return "whole"
    return "real" if isinstance(t, types.Float) else None


class Table(types.Type):
    """An aux array, or a part of it. recorded: it is told which of the numbers that are read has the derivative 1, and
    says where what is owed to that one is added up."""

    def __init__(self, dtype: str, element: Any, ndim: int, base: Any, recorded: bool = False):
        self.dtype, self.element, self.ndim, self.base, self.recorded = dtype, element, ndim, base, recorded
        super().__init__(name=f"table({dtype}, {ndim}, {base}{', recorded' * recorded})")


@register_model(Number)
class _NumberModel(models.StructModel):
    def __init__(self, manager: Any, t: Number):
        members = [("x", types.int64 if t.kind == "whole" else t.base)]
        super().__init__(manager, t, members + [("d", t.base)] * (t.kind == "dual"))


@register_model(Table)
class _TableModel(models.StructModel):
    def __init__(self, manager: Any, t: Table):
        sizes = types.UniTuple(types.int64, t.ndim)
        members = [("data", types.CPointer(t.element)), ("shape", sizes), ("strides", sizes)]
        # owed: the address of the sum for the first element; owed_strides: in bytes; state: the address of READS
        owed = [("owed", types.int64), ("owed_strides", sizes), ("state", types.int64)]
        super().__init__(manager, t, members + owed * t.recorded)


# Three int64 numbers: how many numbers were read, which of them has the derivative 1, where what is owed to it goes.
READS = 3


class _Value:
    """A value of the code that is being made, with Python's operators; Python's own numbers are constants."""

    def __init__(self, code: "_Code", value: Any):
        self.code, self.value = code, value

    def _constant(self, other: Any) -> Any:
        return other.value if isinstance(other, _Value) else ir.Constant(self.value.type, float(other))

    def _do(self, what: str, other: Any, turned: bool = False) -> "_Value":
        one, two = self.value, self._constant(other)
        return _Value(self.code, getattr(self.code.builder, what)(*((two, one) if turned else (one, two))))

    def _ask(self, what: str, other: Any) -> "_Value":
        compare = self.code.builder.fcmp_unordered if what == "!=" else self.code.builder.fcmp_ordered
        return _Value(self.code, compare(what, self.value, self._constant(other)))

    def __neg__(self) -> "_Value":
        return self._do("fsub", -0.0, turned=True)  # NVVM has no fneg

    def __and__(self, other: Any) -> "_Value":
        return _Value(self.code, self.code.builder.and_(self.value, other.value))

    def __xor__(self, other: Any) -> "_Value":
        return _Value(self.code, self.code.builder.xor(self.value, other.value))

    def __add__(self, other: Any) -> "_Value":
        return self._do("fadd", other)

    def __sub__(self, other: Any) -> "_Value":
        return self._do("fsub", other)

    def __rsub__(self, other: Any) -> "_Value":
        return self._do("fsub", other, turned=True)

    def __mul__(self, other: Any) -> "_Value":
        return self._do("fmul", other)

    def __truediv__(self, other: Any) -> "_Value":
        return self._do("fdiv", other)

    def __rtruediv__(self, other: Any) -> "_Value":
        return self._do("fdiv", other, turned=True)

    def __lt__(self, other: Any) -> "_Value":
        return self._ask("<", other)

    def __gt__(self, other: Any) -> "_Value":
        return self._ask(">", other)

    def __eq__(self, other: Any) -> "_Value":  # type: ignore[override]
        return self._ask("==", other)

    def __ne__(self, other: Any) -> "_Value":  # type: ignore[override]
        return self._ask("!=", other)

    __radd__, __rmul__, __hash__ = __add__, __mul__, None  # type: ignore[assignment]


class _Code:
    """Where code is made, and `f` of rules.py."""

    def __init__(self, context: Any, builder: Any, base: Any):
        self.context, self.builder, self.base = context, builder, base
        self.zero, self.one = self.number(0), self.number(1)

    def number(self, x: float) -> _Value:
        return _Value(self, ir.Constant(self.context.get_value_type(self.base), float(x)))

    def __getattr__(self, name: str) -> Callable[..., _Value]:
        """A function of math, by the target's own code for it, or on a CPU by code that it has vectors for."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in on_cpu.FUNCTIONS and not self.on_gpu:
            return lambda x: on_cpu.FUNCTIONS[name](x, self)
        return functools.partial(self._by_target, name)

    def _by_target(self, name: str, *values: _Value) -> _Value:
        own = signature(self.base, *[self.base] * len(values))
        made = self.context.get_function(getattr(math, name), own)
        return _Value(self, made(self.builder, [v.value for v in values]))

    def where(self, condition: _Value, x: _Value, y: _Value) -> _Value:
        return _Value(self, self.builder.select(condition.value, x.value, y.value))

    def fmod(self, x: _Value, y: _Value) -> _Value:
        if self.on_gpu:  # whose own frem is one of approximate divisions
            return self._by_target("fmod", x, y)
        return _Value(self, self.builder.frem(x.value, y.value))

    @property
    def on_gpu(self) -> bool:
        return "nvptx" in self.builder.module.triple

    def _by_intrinsic(self, name: str, x: _Value) -> _Value:
        """One instruction, by LLVM's name for it, or by that of libdevice, where NVVM does not know LLVM's."""
        kind, module = x.value.type, self.builder.module
        if self.on_gpu:
            library = f"__nv_{name}" + ("f" if self.base is types.float32 else "")
            declared = cgutils.get_or_insert_function(module, ir.FunctionType(kind, [kind]), library)
        else:
            declared = module.declare_intrinsic(f"llvm.{name}", [kind])
        return _Value(self, self.builder.call(declared, [x.value]))

    # Bits of a number, for on_cpu.py.

    @property
    def bytes(self) -> int:
        return 4 if self.base is types.float32 else 8

    def _format(self) -> tuple[Any, int, int]:
        """The whole number as large as one, its bits of mantissa, and what is added to its exponent."""
        return (ir.IntType(32), 23, 127) if self.bytes == 4 else (ir.IntType(64), 52, 1023)

    def power_of_2(self, n: _Value) -> _Value:
        """2^n of a whole number, as large as that of a normal one."""
        kind, mantissa, bias = self._format()
        exponent = self.builder.add(self.builder.fptosi(n.value, ir.IntType(32)), ir.Constant(ir.IntType(32), bias))
        bits = self.builder.shl(exponent if self.bytes == 4 else self.builder.zext(exponent, kind), kind(mantissa))
        return _Value(self, self.builder.bitcast(bits, self.zero.value.type))

    def parts(self, x: _Value) -> tuple[_Value, _Value]:
        """x, a normal number above 0, as m * 2^n with m in [1/2, 1)."""
        (kind, mantissa, bias), builder = self._format(), self.builder
        bits = builder.bitcast(x.value, kind)
        exponent = builder.sub(builder.and_(builder.lshr(bits, kind(mantissa)), kind(2 * bias + 1)), kind(bias - 1))
        half = builder.or_(builder.and_(bits, kind(2**mantissa - 1)), kind((bias - 1) << mantissa))
        real = self.zero.value.type
        exponent = exponent if self.bytes == 4 else builder.trunc(exponent, ir.IntType(32))
        return _Value(self, builder.bitcast(half, real)), _Value(self, builder.sitofp(exponent, real))

    floor = functools.partialmethod(_by_intrinsic, "floor")
    ceil = functools.partialmethod(_by_intrinsic, "ceil")
    trunc = functools.partialmethod(_by_intrinsic, "trunc")
    rint = functools.partialmethod(_by_intrinsic, "rint")
    fabs = functools.partialmethod(_by_intrinsic, "fabs")
    sqrt = functools.partialmethod(_by_intrinsic, "sqrt")

    def of(self, t: Any, value: Any) -> Pair:
        """A number of any type as what rules.py computes with."""
        if isinstance(t, Number):
            members = cgutils.create_struct_proxy(t)(self.context, self.builder, value=value)
            if t.kind == "whole":
                return Pair(_Value(self, self.builder.sitofp(members.x, self.zero.value.type)))
            return Pair(_Value(self, members.x), _Value(self, members.d) if t.kind == "dual" else None)
        return Pair(_Value(self, self.context.cast(self.builder, value, t, self.base)))

    def whole(self, t: Any, value: Any) -> Any:
        """A whole number of any type as an int64."""
        if isinstance(t, Number):
            return cgutils.create_struct_proxy(t)(self.context, self.builder, value=value).x
        return self.context.cast(self.builder, value, t, types.int64)

    def made(self, t: Any, x: Any, d: Any = None) -> Any:
        """A number of type t."""
        if t == types.boolean:
            return x
        members = cgutils.create_struct_proxy(t)(self.context, self.builder)
        members.x = x
        if t.kind == "dual":
            members.d = self.zero.value if d is None else d
        return members._getvalue()

    def given(self, t: Any, pair: Pair) -> Any:
        return self.made(t, pair.x.value, pair.d and pair.d.value)


def _result(kinds: tuple[str, ...], base: Any) -> Number:
    return Number("dual" if "dual" in kinds else "real", base)


def _typed(key: Any, result: Callable[..., Any]) -> None:
    """Numba asks result(*types) for the type that key(...) gives; None where it is no affair of this file's."""

    class Template(AbstractTemplate):
        prefer_literal = True

        def generic(self, args: Any, kws: Any) -> Any:
            t = None if kws else result(*args)
            return None if t is None else signature(t, *args)

    Template.key = key  # type: ignore[attr-defined]
    infer_global(key)(Template)


def _numbers(*args: Any) -> tuple[tuple[str, ...], Any] | None:
    """Kinds and the computing type, where one at least is a Number and all are numbers."""
    kinds = tuple(map(_kind_of, args))
    bases = [t.base for t in args if isinstance(t, Number)]
    if any(isinstance(t, Table) for t in args):
        raise errors.TypingError(f"{MARK}an aux array is read, as x[i], before it is computed with")
    return (kinds, bases[0]) if bases and None not in kinds else None  # type: ignore[return-value]


# Operators.


def _register_binary(name: str) -> None:
    rule, plain = rules.BINARY[name], getattr(operator, name)

    def result(a: Any, b: Any) -> Any:
        found = _numbers(a, b)
        if found is None:
            return None
        kinds, base = found
        if kinds == ("whole", "whole") and name != "truediv" and not (name == "pow" and _negative(b)):
            return Number("whole", base)
        return Number("real", base) if name == "floordiv" else _result(kinds, base)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (a, b) = _Code(context, builder, sig.return_type.base), sig.args
        if sig.return_type.kind == "whole":
            if name == "pow" and isinstance(b, types.IntegerLiteral):
                return code.made(sig.return_type, _whole_power(builder, code.whole(a, args[0]), b.literal_value))
            of_whole = context.get_function(plain, signature(types.int64, types.int64, types.int64))
            return code.made(sig.return_type, of_whole(builder, [code.whole(a, args[0]), code.whole(b, args[1])]))
        if name == "pow" and isinstance(b, types.IntegerLiteral):
            return code.given(sig.return_type, rules.whole_power(code.of(a, args[0]), b.literal_value, code))
        return code.given(sig.return_type, rule(code.of(a, args[0]), code.of(b, args[1]), code))

    for key in (plain, getattr(operator, f"i{name}")):
        _typed(key, result)
        _lowered(key, lower)


def _lowered(key: Any, lower: Any) -> None:
    """For two arguments, of which one at least is a Number."""
    for pattern in ((Number, Number), (Number, types.Any), (types.Any, Number)):
        lower_builtin(key, *pattern)(lower)


def _negative(t: Any) -> bool:
    return isinstance(t, types.IntegerLiteral) and t.literal_value < 0


def _whole_power(builder: Any, x: Any, exponent: int) -> Any:
    found = ir.Constant(x.type, 1)
    for _ in range(exponent):
        found = builder.mul(found, x)
    return found


def _register_comparing(name: str, sign: str) -> None:
    key = getattr(operator, name)
    _typed(key, lambda a, b: types.boolean if _numbers(a, b) else None)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (kinds, base), (a, b) = _numbers(*sig.args), sig.args  # type: ignore[misc]
        code = _Code(context, builder, base)
        if kinds == ("whole", "whole"):
            return builder.icmp_signed(sign, code.whole(a, args[0]), code.whole(b, args[1]))
        compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
        return compare(sign, code.of(a, args[0]).x.value, code.of(b, args[1]).x.value)

    _lowered(key, lower)


def _register_of_bits(name: str) -> None:
    def result(a: Any, b: Any) -> Any:
        found = _numbers(a, b)
        return Number("whole", found[1]) if found and found[0] == ("whole", "whole") else None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (a, b) = _Code(context, builder, sig.return_type.base), sig.args
        plain = context.get_function(getattr(operator, name), signature(types.int64, types.int64, types.int64))
        return code.made(sig.return_type, plain(builder, [code.whole(a, args[0]), code.whole(b, args[1])]))

    for key in (getattr(operator, name), getattr(operator, f"i{name.strip('_')}")):
        _typed(key, result)
        _lowered(key, lower)


def _register_unary(key: Any, rule: Any, of_whole: Callable[[Any, Any], Any]) -> None:
    _typed(key, lambda a: a if isinstance(a, Number) else None)

    @lower_builtin(key, Number)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (t,) = _Code(context, builder, sig.args[0].base), sig.args
        if t.kind == "whole":
            return code.made(t, of_whole(builder, code.whole(t, args[0])))
        return code.given(t, rule(code.of(t, args[0]), code))


def _absolute(builder: Any, x: Any) -> Any:
    return builder.select(builder.icmp_signed("<", x, ir.Constant(x.type, 0)), builder.neg(x), x)


for _name in rules.BINARY:
    _register_binary(_name)
for _name, _sign in dict(lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=").items():
    _register_comparing(_name, _sign)
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    _register_of_bits(_name)
_register_unary(operator.neg, rules.neg, lambda builder, x: builder.neg(x))
_register_unary(operator.pos, rules.pos, lambda builder, x: x)
_register_unary(abs, rules.absolute, _absolute)
_typed(operator.invert, lambda a: a if isinstance(a, Number) and a.kind == "whole" else None)


@lower_builtin(operator.invert, Number)
def _invert(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    code = _Code(context, builder, sig.return_type.base)
    return code.made(sig.return_type, builder.not_(code.whole(sig.args[0], args[0])))


def _register_truth(key: Any, sign: str) -> None:
    _typed(key, lambda a: types.boolean if isinstance(a, Number) else None)

    @lower_builtin(key, Number)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (t,) = _Code(context, builder, sig.args[0].base), sig.args
        if t.kind == "whole":
            return builder.icmp_signed(sign, code.whole(t, args[0]), ir.Constant(ir.IntType(64), 0))
        compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
        return compare(sign, code.of(t, args[0]).x.value, code.zero.value)


_register_truth(bool, "!=")
_register_truth(operator.truth, "!=")
_register_truth(operator.not_, "==")


def _cast(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    code = _Code(context, builder, toty.base)
    if toty.kind == "whole":
        return code.made(toty, code.whole(fromty, value))
    return code.given(toty, code.of(fromty, value))


for _plain in (Number, types.Integer, types.Float, types.Boolean):
    lower_cast(_plain, Number)(_cast)


# Arrays.


def scope_of_scores(module: Any) -> Any:
    """LLVM's name for memory that scores lie in, on a CPU."""
    domain = module.add_metadata(["numba_flash"])
    return module.add_metadata([module.add_metadata(["numba_flash scores", domain])])


def _load(code: _Code, t: Table, pointer: Any) -> Any:
    """An element, in the type that is computed in."""
    builder, context = code.builder, code.context
    if t.dtype == "float16" and code.on_gpu:
        half = builder.load(builder.bitcast(pointer, ir.HalfType().as_pointer()))
        value = builder.fpext(half, code.zero.value.type)
        return code.made(Number("real", t.base), value)
    value = builder.load(pointer)
    if not code.on_gpu:
        value.set_metadata("noalias", scope_of_scores(builder.module))
    if t.dtype == "bfloat16":
        bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        value, found = builder.bitcast(bits, ir.FloatType()), types.float32
        return code.made(Number("real", t.base), context.cast(builder, value, found, t.base))
    if t.dtype == "float16":  # not every CPU has an instruction for it
        return code.made(Number("real", t.base), _from_half(code, value))
    if t.dtype == "bool":
        return builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
    kind = "real" if t.dtype.startswith("float") else "whole"
    to = t.base if kind == "real" else types.int64
    return code.made(Number(kind, t.base), context.cast(builder, value, t.element, to))


def _from_half(code: _Code, bits: Any) -> Any:
    """A float16 in the type that is computed in. Times 2^112 its exponent is float32's, and subnormal numbers too."""
    builder, i32 = code.builder, ir.IntType(32)
    bits = builder.zext(bits, i32)
    magnitude = builder.shl(builder.and_(bits, i32(0x7FFF)), i32(13))
    large = builder.fmul(builder.bitcast(magnitude, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**112))
    special = builder.or_(magnitude, i32(0x7F800000))  # infinite, or NaN
    is_special = builder.icmp_unsigned(">=", magnitude, i32(0x7C00 << 13))
    size = builder.select(is_special, special, builder.bitcast(large, i32))
    found = builder.bitcast(builder.or_(builder.shl(builder.and_(bits, i32(0x8000)), i32(16)), size), ir.FloatType())
    return code.context.cast(builder, found, types.float32, code.base)


def _members(t: Any) -> list[Any]:
    """The types of a tuple's members."""
    return list(t)


def _read(t: Any, index: Any) -> Any:
    if not isinstance(t, Table):
        return None
    indices: list[Any] = _members(index) if isinstance(index, types.BaseTuple) else [index]
    if any(_kind_of(i) != "whole" for i in indices):
        raise errors.TypingError(f"{MARK}an aux array is read at whole numbers, and int() makes one of another")
    if len(indices) > t.ndim:
        raise errors.TypingError(
            f"{MARK}an aux array has {t.ndim} dimensions, and it is read at {len(indices)} numbers"
        )
    left = t.ndim - len(indices)
    if left:
        return Table(t.dtype, t.element, left, t.base, t.recorded)
    if t.recorded:
        return Number("dual", t.base)
    kind = "real" if "float" in t.dtype else "whole"
    return types.boolean if t.dtype == "bool" else Number(kind, t.base)


_typed(operator.getitem, _read)


@lower_builtin(operator.getitem, Table, types.Any)
def _getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    t, index = sig.args
    code = _Code(context, builder, t.base)
    table = cgutils.create_struct_proxy(t)(context, builder, value=args[0])
    shape, strides = (cgutils.unpack_tuple(builder, x) for x in (table.shape, table.strides))
    if isinstance(index, types.BaseTuple):
        indices = zip(_members(index), cgutils.unpack_tuple(builder, args[1]), strict=True)
    else:
        indices = zip([index], [args[1]], strict=True)
    offset, count, zero = ir.Constant(ir.IntType(64), 0), 0, ir.Constant(ir.IntType(64), 0)
    owed, owed_strides = zero, (zero,) * t.ndim
    if t.recorded:
        owed, owed_strides = table.owed, cgutils.unpack_tuple(builder, table.owed_strides)
    for axis, (kind, value) in enumerate(indices):
        at = code.whole(kind, value)
        at = builder.select(builder.icmp_signed("<", at, zero), builder.add(at, shape[axis]), at)  # from the end
        if not code.on_gpu:  # where others use the memory beyond: the nearest element
            last = builder.sub(shape[axis], ir.Constant(at.type, 1))
            at = builder.select(builder.icmp_signed(">", at, last), last, at)
            at = builder.select(builder.icmp_signed("<", at, zero), zero, at)
        offset, count = builder.add(offset, builder.mul(at, strides[axis])), axis + 1
        if t.recorded:
            owed = builder.add(owed, builder.mul(at, owed_strides[axis]))
    pointer = builder.gep(table.data, [offset])
    if count == t.ndim:
        return _recorded(code, t, _load(code, t, pointer), table.state, owed) if t.recorded else _load(code, t, pointer)
    part = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    part.data = pointer
    part.shape = cgutils.pack_array(builder, shape[count:])
    part.strides = cgutils.pack_array(builder, strides[count:])
    if t.recorded:
        part.owed, part.state = owed, table.state
        part.owed_strides = cgutils.pack_array(builder, owed_strides[count:])
    return part._getvalue()


def _recorded(code: _Code, t: Table, found: Any, state: Any, owed: Any) -> Any:
    """An element as a dual number, with READS brought up to date."""
    builder, i64 = code.builder, ir.IntType(64)
    reads = builder.inttoptr(state, i64.as_pointer())
    at = [builder.gep(reads, [i64(number)]) for number in range(READS)]
    number = builder.load(at[0])
    hit = builder.icmp_signed("==", number, builder.load(at[1]))
    builder.store(builder.add(number, i64(1)), at[0])
    builder.store(builder.select(hit, owed, builder.load(at[2])), at[2])
    x = code.of(Number("real", t.base), found).x.value
    return code.made(Number("dual", t.base), x, builder.select(hit, code.one.value, code.zero.value))


@infer_getattr
class _TableAttributes(AttributeTemplate):
    key = Table

    def resolve_shape(self, t: Table) -> Any:
        return types.UniTuple(Number("whole", t.base), t.ndim)


@lower_getattr(Table, "shape")
def _shape(context: Any, builder: Any, t: Any, value: Any) -> Any:
    code = _Code(context, builder, t.base)
    table = cgutils.create_struct_proxy(t)(context, builder, value=value)
    whole = Number("whole", t.base)
    sizes = [code.made(whole, x) for x in cgutils.unpack_tuple(builder, table.shape)]
    return context.make_tuple(builder, types.UniTuple(whole, t.ndim), sizes)


# range() and len(), which Numba does not let anything stand in for.


def _counts(*args: Any) -> Any:
    found = _numbers(*args)
    if found and found[0] != ("whole",) * len(args):
        raise errors.TypingError(f"{MARK}range() takes whole numbers, and int() makes one of another")
    return types.range_state64_type if found else None


def _range(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    code = _Code(context, builder, next(t.base for t in sig.args if isinstance(t, Number)))
    plain = context.get_function(range, signature(sig.return_type, *[types.int64] * len(args)))
    return plain(builder, list(map(code.whole, sig.args, args)))


_typed(range, _counts)
for _count in (1, 2, 3):
    for _pattern in itertools.product((Number, types.Any), repeat=_count):
        if Number in _pattern:
            lower_builtin(range, *_pattern)(_range)
_typed(len, lambda t: Number("whole", t.base) if isinstance(t, Table) else None)


@lower_builtin(len, Table)
def _length(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    table = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
    size = cgutils.unpack_tuple(builder, table.shape)[0]
    return _Code(context, builder, sig.return_type.base).made(sig.return_type, size)


# Stand-ins for other builtins and for math: functions whose only use is to be looked up by Numba.


def _stand_in(name: str, result: Callable[..., Any], lower: Any) -> Any:
    def function(*values: Any) -> Any:
        raise AssertionError("it is compiled, not called")

    function.__name__ = function.__qualname__ = name

    class Template(AbstractTemplate):
        prefer_literal = True

        def generic(self, args: Any, kws: Any) -> Any:
            if kws:
                raise errors.TypingError(f"{MARK}{name}() takes no keywords here")
            return signature(result(*args), *args)

    Template.key = function  # type: ignore[attr-defined]
    infer_global(function, types.Function(Template))
    lower_builtin(function, types.VarArg(types.Any))(lower)
    return function


def _kinds(name: str, count: int | None, args: tuple[Any, ...]) -> tuple[str, ...]:
    kinds = tuple(map(_kind_of, args))
    if None in kinds or (count is not None and len(args) != count) or not args:
        wanted = {None: "numbers", 1: "a number", 2: "two numbers"}[count]
        raise errors.TypingError(f"{MARK}{name}() takes {wanted} here, not ({', '.join(map(_words, args))})")
    return kinds  # type: ignore[return-value]


def _words(t: Any) -> str:
    if isinstance(t, Number):
        return "int" if t.kind == "whole" else "float"
    return "an aux array" if isinstance(t, Table) else str(types.unliteral(t))


@functools.cache
def stand_ins(base_name: str) -> dict[Any, Any]:
    """For each computing type its own: a constant in math.exp(0.5) does not say which it is."""
    base = BASES[base_name]

    def of_reals(name: str, count: int, rule: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            return code.given(sig.return_type, rule(*map(code.of, sig.args, args), code))

        return _stand_in(name, lambda *args: _result(_kinds(name, count, args), base), lower)

    def to_whole(name: str, by: str) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            if _kind_of(sig.args[0]) == "whole":
                return code.made(sig.return_type, code.whole(sig.args[0], args[0]))
            rounded = getattr(code, by)(code.of(sig.args[0], args[0]).x)
            return code.made(sig.return_type, builder.fptosi(rounded.value, ir.IntType(64)))

        def result(*args: Any) -> Any:
            _kinds(name, 1, args)
            return Number("whole", base)

        return _stand_in(name, result, lower)

    def asking(name: str) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            x = code.of(sig.args[0], args[0]).x
            if name == "isnan":
                return builder.fcmp_unordered("uno", x.value, x.value)
            size, inf = code.fabs(x).value, ir.Constant(x.value.type, math.inf)
            return builder.fcmp_ordered("==" if name == "isinf" else "<", size, inf)

        def result(*args: Any) -> Any:
            _kinds(name, 1, args)
            return types.boolean

        return _stand_in(name, result, lower)

    def extreme(name: str, rule: Any, sign: str) -> Any:
        def result(*args: Any) -> Any:
            kinds = _kinds(name, None, args)
            if len(kinds) < 2:
                raise errors.TypingError(f"{MARK}{name}() takes two numbers or more here")
            return Number("whole", base) if set(kinds) == {"whole"} else _result(kinds, base)

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            if sig.return_type.kind == "whole":
                values = list(map(code.whole, sig.args, args))
                found = values[0]
                for x in values[1:]:
                    found = builder.select(builder.icmp_signed(sign, x, found), x, found)
                return code.made(sig.return_type, found)
            pairs = list(map(code.of, sig.args, args))
            best = pairs[0]
            for pair in pairs[1:]:
                best = rule(best, pair, code)
            return code.given(sig.return_type, best)

        return _stand_in(name, result, lower)

    def truth() -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            return builder.fcmp_unordered("!=", code.of(sig.args[0], args[0]).x.value, code.zero.value)

        def result(*args: Any) -> Any:
            _kinds("bool", 1, args)
            return types.boolean

        return _stand_in("bool", result, lower)

    import types as python_types

    of_math = python_types.ModuleType("math")
    for name in rules.SLOPES:
        setattr(of_math, name, of_reals(name, 1, functools.partial(rules.apply, name)))
    for name, rule in rules.MATH_BINARY.items():
        setattr(of_math, name, of_reals(name, 2, rule))
    of_math.fabs = of_reals("fabs", 1, rules.fabs)  # type: ignore[attr-defined]
    for name in rules.TO_WHOLE[:3]:
        setattr(of_math, name, to_whole(name, name))
    for name in rules.ASKING:
        setattr(of_math, name, asking(name))
    for name in rules.CONSTANTS:
        setattr(of_math, name, getattr(math, name))
    return {
        "math": of_math,
        "float": of_reals("float", 1, lambda a, f: a),
        "int": to_whole("int", "trunc"),
        "round": to_whole("round", "rint"),
        "bool": truth(),
        "min": extreme("min", rules.minimum, "<"),
        "max": extreme("max", rules.maximum, ">"),
    }


# Into the function and out of it.


def as_number(kind: str, base_name: str) -> Any:
    """-> number(x): x as a Number; a dual one has the derivative 1."""
    base = BASES[base_name]

    @intrinsic
    def number(typingctx: Any, x: Any) -> Any:
        t = Number(kind, base)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            if kind == "whole":
                return code.made(t, code.whole(sig.args[0], args[0]))
            x = code.of(sig.args[0], args[0]).x.value
            return code.made(t, x, code.one.value)

        return signature(t, x), codegen

    return number


def as_table(dtype: str, ndim: int, base_name: str) -> Any:
    """-> table(pointer, sizes): the array at a pointer; sizes: its shape, and behind it its strides in elements."""
    base = BASES[base_name]

    @intrinsic
    def table(typingctx: Any, pointer: Any, sizes: Any) -> Any:
        t = Table(dtype, pointer.dtype, ndim, base)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            numbers = cgutils.unpack_tuple(builder, args[1])
            made = cgutils.create_struct_proxy(t)(context, builder)
            made.data = args[0]
            made.shape, made.strides = (
                context.make_tuple(builder, types.UniTuple(types.int64, ndim), part)
                for part in (numbers[:ndim], numbers[ndim:])
            )
            return made._getvalue()

        return signature(t, pointer, sizes), codegen

    return table


def result(option: str, base_name: str, function: Function) -> Any:
    """-> result(x): what the function gave, as a plain number of the computing type, or with its derivative."""
    base = BASES[base_name]

    @intrinsic
    def value(typingctx: Any, x: Any) -> Any:
        _check_score(option, function, x)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _Code(context, builder, base).of(sig.args[0], args[0]).x.value

        return signature(base, x), codegen

    return value


def derivative(option: str, base_name: str, function: Function) -> Any:
    """-> derivative(x): that of what the function gave."""
    base = BASES[base_name]

    @intrinsic
    def slope(typingctx: Any, x: Any) -> Any:
        _check_score(option, function, x)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = _Code(context, builder, base)
            found = code.of(sig.args[0], args[0]).d
            return code.zero.value if found is None else found.value

        return signature(base, x), codegen

    return slope


def truth_of(option: str, function: Function) -> Any:
    """-> truth(x): what a mask function gave."""

    @intrinsic
    def truth(typingctx: Any, x: Any) -> Any:
        if types.unliteral(x) != types.boolean:
            raise errors.TypingError(
                f"{MARK}{option} must return True or False, but {function.where} returns {_words(x)}"
            )
        return signature(types.boolean, x), lambda context, builder, sig, args: args[0]

    return truth


def _check_score(option: str, function: Function, x: Any) -> None:
    if _kind_of(x) is None or types.unliteral(x) == types.boolean:
        raise errors.TypingError(f"{MARK}{option} must return a number, but {function.where} returns {_words(x)}")
