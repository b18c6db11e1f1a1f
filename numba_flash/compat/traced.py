"""Traces a score_mod or mask_mod of torch's operations, as flex_attention takes it, into a plain Python function.

It is called once, with stand-ins for its numbers. Each operation on them becomes a line of Python:

    def alibi(score, b, h, q_idx, kv_idx):              x0 = aux0[h]
        return score + slopes[h] * (kv_idx - q_idx)     x1 = k_pos - q_pos
                                                        x2 = x0 * x1
                                                        x3 = score + x2

So a captured tensor becomes an array of aux, and a captured number a constant. The function is called anew for each
call of flex_attention, because what it captures may have changed.
"""

import contextlib
import functools
import linecache
import math
import zlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..bridges.torch_functions import key_of
from . import traced_operations  # noqa: F401 - fills the table of operations
from .traced_values import OPERATIONS, Lines, Value

ARGUMENTS = dict(score_mod=("score", "b", "h", "q_pos", "k_pos"), mask_mod=("b", "h", "q_pos", "k_pos"))


class Reads(TorchFunctionMode):
    """Catches bias[h, q_idx]: torch.compile overlooks the stand-ins in this tuple."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            return OPERATIONS["getitem"](*args)
        return function(*args, **(kwargs or {}))


def write_down(lines: Lines, name: str, function: Any) -> str:
    """Calls a score_mod or mask_mod with stand-ins. -> the body of a plain function that computes the same"""
    lines.of_function = []
    kinds = dict(score="real")
    try:
        given = [Value(lines, x, kinds.get(x, "whole"), torch.int64) for x in ARGUMENTS[name]]
        for value, size in zip(given[-4:], lines.sizes, strict=True):
            value.span = (0, size - 1) if size else None
        with Reads() if torch.compiler.is_compiling() else contextlib.nullcontext():
            result = lines.value(function(*given))
    except (TypeError, IndexError, NotImplementedError) as error:
        code = getattr(function, "__code__", None)
        where = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise type(error)(f"{name}{where}: {error}") from error
    text = result.as_real if name == "score_mod" else result.as_truth
    return "".join(f"    {line}\n" for line in (*lines.of_function, f"return {text}"))


@functools.lru_cache(256)
def compiled(name: str, tables: int, body: str) -> Any:
    """The plain function, the same one for the same text, so that its kernel is compiled once."""
    taken = ", ".join((*ARGUMENTS[name], *(f"aux{number}" for number in range(tables))))
    text = f"def {name}({taken}):\n{body}"
    file = f"<{name} of flex_attention, {zlib.crc32(text.encode()):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)  # messages show the line
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), {"math": math}, made)
    return made[name]


def key(name: str, tables: int, body: str) -> str:
    """The key under which a graph finds the compiled plain function."""
    return key_of(name, compiled(name, tables, body))


key._dynamo_marked_constant = True  # type: ignore[attr-defined]
