"""The types of a user's function where Numba compiles it: numbers that know what to compute in, and arrays of them."""

from typing import Any, NamedTuple

from numba.core import types
from numba.core.datamodel import models
from numba.core.extending import register_model
from numba.core.typeconv import Conversion


class Base(NamedTuple):
    """What real numbers are computed in. quick: as functions/quick.py has it, on a GPU."""

    type: Any
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.type}{', quick' * self.quick}"


BASES = {"float32": Base(types.float32), "float64": Base(types.float64), "for 16 bits": Base(types.float32, True)}
KINDS = ("whole", "real", "dual")


class Number(types.Type):
    def __init__(self, kind: str, base: Any):
        self.kind, self.base = kind, base
        super().__init__(name=f"{kind}({base})")

    def unify(self, typingctx: Any, other: Any) -> Any:
        """The type of a variable that is this on one way and `other` on another."""
        kind = kind_of(other)
        return None if kind is None else Number(max(self.kind, kind, key=KINDS.index), self.base)

    def can_convert_from(self, typingctx: Any, other: Any) -> Any:
        kind = kind_of(other)
        fits = kind is not None and KINDS.index(kind) <= KINDS.index(self.kind)
        return Conversion.safe if fits else None


def kind_of(t: Any) -> str | None:
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
        # Types of equal names are one type to Numba. float16 lies in memory as uint16 on a CPU and as float16 on a GPU.
        super().__init__(name=f"table({dtype} as {element}, {ndim}, {base}{', recorded' * recorded})")


@register_model(Number)
class _NumberModel(models.StructModel):
    def __init__(self, manager: Any, t: Number):
        members = [("x", types.int64 if t.kind == "whole" else t.base.type)]
        super().__init__(manager, t, members + [("d", t.base.type)] * (t.kind == "dual"))


@register_model(Table)
class _TableModel(models.StructModel):
    def __init__(self, manager: Any, t: Table):
        sizes = types.UniTuple(types.int64, t.ndim)
        members = [("data", types.CPointer(t.element)), ("shape", sizes), ("strides", sizes)]
        # owed, owed_strides: where the sum for the first element is, and for the others; state: where READS are
        owed = [("owed", types.int64), ("owed_strides", sizes), ("state", types.CPointer(types.int64))]
        super().__init__(manager, t, members + owed * t.recorded)


# Three int64 numbers: how many numbers were read, which of them has the derivative 1, where what is owed to it goes.
READS = 3


def words(t: Any) -> str:
    if isinstance(t, Number):
        return "int" if t.kind == "whole" else "float"
    return "an aux array" if isinstance(t, Table) else str(types.unliteral(t))


def result_of(kinds: tuple[str, ...], base: Any) -> Number:
    return Number("dual" if "dual" in kinds else "real", base)
