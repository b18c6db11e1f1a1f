"""The stand-ins for the numbers and tensors of a traced function: operations on them are recorded as lines."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OPERATIONS: dict[str, Callable[..., Any]] = {}  # torch's operations by name (traced_operations.py)


class Lines:
    """The lines recorded for all functions of one call, and the tensors that they read."""

    def __init__(self, device: torch.device, real: torch.dtype, sizes: tuple[int, int, int, int]):
        self.device = device
        self.sizes = sizes  # the numbers of b, h, q_pos and k_pos
        self.real = real  # the dtype in which a kernel computes real numbers
        self.tensors: list[Tensor] = []
        self.of_function: list[str] = []
        self.count = 0

    def write(self, expression: str, kind: str, whole: Any = None) -> "Value":
        """Appends a line. -> its value. whole: the dtype of a whole number."""
        name = f"x{self.count}"
        self.count += 1
        self.of_function.append(f"{name} = {expression}")
        return Value(self, name, kind, whole)

    def write_whole(self, expression: str, *of: "Value") -> "Value":
        """A line of whole numbers, whose result wraps around as one of their common dtype does."""
        whole = dtype_of(*of)
        if whole.itemsize < 8:  # a kernel computes in int64
            info = torch.iinfo(whole)
            shift = f" + {-info.min}" * (info.min < 0)
            expression = f"(({expression}){shift} & {2**info.bits - 1}){f' - {-info.min}' * (info.min < 0)}"
        return self.write(expression, "whole", whole)

    def table(self, tensor: Tensor) -> str:
        """The name of a captured tensor in aux."""
        if tensor.device != self.device:
            raise TypeError(f"it captures a tensor on {tensor.device}, and query is on {self.device}: move it there")
        known = (number for number, other in enumerate(self.tensors) if other is tensor)
        number = next(known, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return f"aux{number}"

    def value(self, x: Any) -> "Value":
        """A number, a Value, or a tensor of one number, as a Value."""
        if isinstance(x, Value):
            return x
        if isinstance(x, Row):
            raise TypeError(f"a tensor is indexed by {len(x.index)} numbers, and it has {x.tensor.ndim} dimensions")
        if torch.compiler.is_compiling() and isinstance(x, int | float) and _differs(x):
            one = torch.ones((), dtype=torch.int64 if isinstance(x, int) else self.real, device=self.device)
            x = one * x  # torch.full would make it a constant after all
        if isinstance(x, Tensor):
            if x.ndim:
                raise TypeError(
                    f"it computes with a tensor of shape {tuple(x.shape)}: read a number, as in bias[h, q_idx]"
                )
            if torch.compiler.is_compiling():
                return Row(self, x.to(self.device), ()).read()
            if x.device == self.device and (x.device.type != "cpu" or x.requires_grad):
                return Row(self, x, ()).read()
            constant = self.value(x.item())  # torch, too, treats a tensor on the host as a number
            constant.whole = readable(x.dtype)
            return constant
        if isinstance(x, bool):
            return Value(self, repr(x), "bool")
        if isinstance(x, int):
            constant = Value(self, f"({x})", "whole")
            constant.span = x, x
            return constant
        if isinstance(x, float):
            named = {math.inf: "math.inf", -math.inf: "(-math.inf)"}.get(x, "math.nan" if x != x else f"({x!r})")
            return Value(self, named, "real")
        raise TypeError(f"it computes with {x!r}, which is neither a number nor a tensor")


class Value:
    """A number that a kernel will compute. Operations on it are recorded as lines."""

    def __init__(self, lines: Lines, text: str, kind: str, whole: Any = None):
        """whole: the dtype of a whole number; None for one of Python's, which takes that of the others."""
        self.lines, self.text, self.kind, self.whole = lines, text, kind, whole
        self.span: tuple[int, int] | None = None  # least and largest value of a whole number, if both occur

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(_name_of(function))(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "requires_grad"):
            return {"shape": torch.Size(()), "ndim": 0, "requires_grad": False}[name]
        if name == "device":
            return self.lines.device
        if name == "dtype":
            return dict(real=self.lines.real, whole=self.whole or torch.int64, bool=torch.bool)[self.kind]
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(operation(name), self)

    def __bool__(self) -> bool:
        raise TypeError(
            "a number of the kernel cannot decide which line Python runs: write torch.where(condition, a, b) for if, "
            "and &, | and ~ for and, or and not"
        )

    def __index__(self) -> int:
        raise TypeError("a number of the kernel cannot be an index of a list: make it a tensor")

    __int__ = __float__ = __index__
    __hash__ = None  # type: ignore[assignment]

    @property
    def as_number(self) -> str:
        """The text for arithmetic, in which True is 1."""
        return f"(1 if {self.text} else 0)" if self.kind == "bool" else self.text

    @property
    def as_real(self) -> str:
        return self.as_number if self.kind == "real" else f"float({self.as_number})"

    @property
    def as_truth(self) -> str:
        return self.text if self.kind == "bool" else f"({self.text} != 0)"


def _differs(x: Any) -> bool:
    """Whether torch.compile's graph also serves other values of this number."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(x)


def _name_of(function: Any) -> str:
    return function.__name__.strip("_")


# torch.compile calls this and does not trace it.
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Row:
    """A tensor that is indexed, by fewer numbers than it has dimensions."""

    def __init__(self, lines: Lines, tensor: Tensor, index: tuple[str, ...]):
        self.lines, self.tensor, self.index = lines, tensor, index

    def __getitem__(self, index: Any) -> Any:
        found = Row(self.lines, self.tensor, (*self.index, *self._texts(index)))
        return found.read() if len(found.index) == self.tensor.ndim else found

    def _texts(self, index: Any) -> list[str]:
        texts: list[str] = []
        for x in index if isinstance(index, tuple) else (index,):
            if isinstance(x, slice) or x is None or x is Ellipsis:
                raise TypeError(f"a tensor is indexed by {x!r}: a kernel reads one number, as in bias[h, q_idx]")
            value = self.lines.value(x)
            if value.kind != "whole":
                raise TypeError(f"a tensor is indexed by a {value.kind} number: only whole numbers are indices")
            sizes = self.tensor.shape[len(self.index) + len(texts) :]
            for end in (value.span or (0,) * (sizes[0] == 0)) if sizes else ():  # as torch, even if a mask hides it
                if not -sizes[0] <= end < sizes[0]:
                    axis = self.tensor.ndim - len(sizes)
                    raise IndexError(f"index {end} is out of bounds for dimension {axis} with size {sizes[0]}")
            texts.append(value.text)
        if len(self.index) + len(texts) > self.tensor.ndim:
            raise TypeError(f"a tensor of {self.tensor.ndim} dimensions has more indices than that")
        return texts

    def read(self) -> Value:
        dtype = readable(self.tensor.dtype)
        kind = "bool" if dtype is torch.bool else "real" if dtype.is_floating_point else "whole"
        index = ", ".join(self.index) or "()"
        return self.lines.write(f"{self.lines.table(self.tensor)}[{index}]", kind, dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lines = next(x.lines for x in args if isinstance(x, Row))
        return [lines.value(x) for x in args]  # raises an error that names the fault


def readable(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.uint64:
        raise TypeError("it captures a tensor of uint64, and a kernel computes in int64: make it torch.int64")
    return dtype


def dtype_of(*values: Value) -> torch.dtype:
    """The dtype of a result computed from whole numbers and truths."""
    dtypes = [x.whole for x in values if x.kind == "whole" and x.whole is not None]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.int64


def operation(name: str) -> Callable[..., Any]:
    found = OPERATIONS.get(name)
    if found is None:
        raise NotImplementedError(
            f"it uses torch's {name}, which is not implemented for kernels; there are {', '.join(sorted(OPERATIONS))}"
        )
    return found


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Value, *others: Any) -> Any:
        return operation(name)(self, *others)

    return apply


_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lt le gt ge eq ne neg abs invert"
_REFLECTED = "radd rsub rmul rtruediv rfloordiv rmod rpow rand ror rxor"
for _name in f"{_OPERATORS} {_REFLECTED}".split():
    setattr(Value, f"__{_name}__", _operator(_name))
