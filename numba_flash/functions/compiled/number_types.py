"""The types of a function where Numba compiles it: numbers that know their computing type, and arrays of them."""

from typing import Any, NamedTuple

from numba.core import types
from numba.core.datamodel import models
from numba.core.extending import register_model
from numba.core.typeconv import Conversion


class Base(NamedTuple):
    """The type in which real numbers are computed. quick: a GPU uses approximate instructions (functions/quick.py)."""

    type: Any
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.type}{', quick' * self.quick}"


BASES = {"float32": Base(types.float32), "float64": Base(types.float64), "for 16 bits": Base(types.float32, True)}
KINDS = ("whole", "real", "dual")
Within = tuple[int, int]
INT32, ANY = ((-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64))
# In loops, and behind an if, a whole number is known to lie within one of these.
STEPS = ((0, 2**8), (-(2**8), 2**8), (0, 2**28), (-(2**28), 2**28), INT32, ANY)


class Number(types.Type):
    """within: the least and the largest value of a whole number; it is an int32 if both fit into one. side: "query" or
    "key" for a position itself, not for a result computed from it. A query's position also holds q_pos - k_pos; the one
    of side "position", on a CPU, does not."""

    def __init__(self, kind: str, base: Any, within: Within = ANY, side: str = ""):
        self.kind, self.base, self.within, self.side = kind, base, within, side
        known = "" if within == ANY else f", {within[0]} to {within[1]}"
        super().__init__(name=f"{kind}({base}{known}{side and f', {side}'})")

    @property
    def narrow(self) -> bool:
        return self.kind == "whole" and fits(self.within, INT32)

    def unify(self, typingctx: Any, other: Any) -> Any:
        """The type of a variable that has this type on one path and `other` on another."""
        kind = kind_of(other)
        if kind is None:
            return None
        if is_truth(self) and is_truth(other):
            return Truth(self.base)
        if (self.kind, kind) == ("whole", "whole"):
            return Number("whole", self.base, _around(self.within, within_of(other)))
        return Number(max(self.kind, kind, key=KINDS.index), self.base)

    def can_convert_from(self, typingctx: Any, other: Any) -> Any:
        kind = kind_of(other)
        if kind is None or KINDS.index(kind) > KINDS.index(self.kind):
            return None
        if self.side or isinstance(self, Truth) and not is_truth(other):
            return None
        return Conversion.safe if self.kind != "whole" or fits(within_of(other), self.within) else None


class Truth(Number):
    """True or False, for instance of a comparison. In arithmetic it is 1 or 0, in memory a boolean."""

    def __init__(self, base: Any):
        super().__init__("whole", base, (0, 1))
        self.name = f"truth({base})"


def is_truth(t: Any) -> bool:
    return isinstance(t, Truth) or types.unliteral(t) == types.boolean


def constant_of(t: Any) -> int | None:
    """The only value of a whole number's type; None if it has several."""
    least, largest = within_of(t)
    return least if kind_of(t) == "whole" and least == largest else None


def fits(within: Within, other: Within) -> bool:
    return other[0] <= within[0] and within[1] <= other[1]


def _around(one: Within, two: Within) -> Within:
    """The narrowest step that holds both. For a variable that grows in a loop Numba repeats type inference, one step
    wider each time; so there are few steps."""
    return next((wide for wide in STEPS if fits(one, wide) and fits(two, wide)), ANY)


def within_of(t: Any) -> Within:
    """The range of a whole number's type, plain or ours."""
    if isinstance(t, Number):
        return t.within
    if isinstance(t, types.IntegerLiteral):
        return (t.literal_value, t.literal_value)
    t = types.unliteral(t)
    if isinstance(t, types.Integer):
        return t.minval, t.maxval
    return (0, 1) if t == types.boolean else ANY


def is_narrow(t: Any) -> bool:
    return kind_of(t) == "whole" and fits(within_of(t), INT32)


def kind_of(t: Any) -> str | None:
    """Whether a type, plain or ours, is of whole or of real numbers; None for other types."""
    if isinstance(t, Number):
        return t.kind
    t = types.unliteral(t)
    if isinstance(t, types.Integer | types.Boolean):
        return "whole"
    return "real" if isinstance(t, types.Float) else None


class Table(types.Type):
    """An aux array, or a part of it. recorded: it is told which of the numbers read has the derivative 1, and reports
    where that number's gradient is added up. narrow: an element's distance from the first is an int32. checked: a read
    outside is reported, and reads the first element."""

    def __init__(
        self,
        dtype: str,
        element: Any,
        ndim: int,
        base: Any,
        recorded: bool = False,
        narrow: bool = False,
        checked: bool = False,
    ):
        self.dtype, self.element, self.ndim, self.base = dtype, element, ndim, base
        self.recorded, self.narrow, self.checked = recorded, narrow, checked
        # Types of equal names are one type to Numba. float16 lies in memory as uint16 on a CPU and as float16 on a GPU.
        words = f"{', recorded' * recorded}{', narrow' * narrow}{', checked' * checked}"
        super().__init__(name=f"table({dtype} as {element}, {ndim}, {base}{words})")


@register_model(Number)
class _NumberModel(models.StructModel):
    def __init__(self, manager: Any, t: Number):
        number = t.base.type if t.kind != "whole" else types.int32 if t.narrow else types.int64
        others = [("d", number)] * (t.kind == "dual") + [("ahead", number)] * (t.side == "query")
        super().__init__(manager, t, [("x", number), *others])


register_model(Truth)(models.BooleanModel)


@register_model(Table)
class _TableModel(models.StructModel):
    def __init__(self, manager: Any, t: Table):
        sizes = types.UniTuple(types.int64, t.ndim)
        members = [("data", types.CPointer(t.element)), ("shape", sizes), ("strides", sizes)]
        # terms, term_strides: the index of the first element's sum, and strides to the others'; state: READS' address
        terms = [
            ("terms", types.int64),
            ("term_strides", sizes),
            ("state", types.CPointer(types.int64)),
        ]
        outside = [("outside", types.CPointer(types.int32))]  # becomes 1 at a read outside
        super().__init__(manager, t, members + terms * t.recorded + outside * t.checked)


# Three int64 numbers: how many numbers were read, which of them has the derivative 1, where its gradient goes.
READS = 3


def words(t: Any) -> str:
    if isinstance(t, Number):
        return "bool" if is_truth(t) else "int" if t.kind == "whole" else "float"
    if isinstance(t, types.BaseTuple):
        return "tuple"
    return "aux array" if isinstance(t, Table) else str(types.unliteral(t))


def result_of(kinds: tuple[str, ...], base: Any) -> Number:
    return Number("dual" if "dual" in kinds else "real", base)
