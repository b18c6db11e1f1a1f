"""Finds Python that a kernel cannot run, in a function's bytecode. This is done before any rung runs the function, so
that it is an error on every rung alike."""

import dis
import functools
import inspect
import linecache
import re
import types
from collections.abc import Iterator
from typing import Any

INT64 = (-(2**63), 2**63 - 1)
_NO_TEXT = "it makes a string, which a kernel does not know"
_NO_DICT = "it makes a dict, which a kernel does not know"
_NO_SET = "it makes a set, which a kernel does not know: write a tuple"
_RETURNS_NUMBERS = "it is a generator or a coroutine; it is to return a number"
_NO_DEL = "it deletes a name, which a kernel cannot"
# {Python instruction: why a kernel cannot run it}
_REFUSED = {
    "RAISE_VARARGS": "it raises, and a kernel cannot",
    "LOAD_ASSERTION_ERROR": "it asserts, and a kernel cannot",
    "LOAD_COMMON_CONSTANT": "it asserts, and a kernel cannot",
    "PUSH_EXC_INFO": "it catches exceptions, and a kernel raises none",
    "SETUP_FINALLY": "it catches exceptions, and a kernel raises none",
    "SETUP_WITH": "it uses with, which a kernel does not know",
    "BEFORE_WITH": "it uses with, which a kernel does not know",
    "IMPORT_NAME": "it imports; do so outside of it",
    "STORE_SUBSCR": "it writes to an array; it is to return what it computes",
    "STORE_ATTR": "it sets an attribute; it is to return what it computes",
    "STORE_GLOBAL": "it sets a global; it is to return what it computes",
    "UNPACK_EX": "it unpacks into a starred name, which a kernel does not know: name each part",
    **dict.fromkeys(("GEN_START", "RETURN_GENERATOR", "YIELD_VALUE"), _RETURNS_NUMBERS),
    **dict.fromkeys(("DELETE_FAST", "DELETE_DEREF", "DELETE_GLOBAL", "DELETE_SUBSCR", "DELETE_ATTR"), _NO_DEL),
    **dict.fromkeys(("BUILD_MAP", "BUILD_CONST_KEY_MAP", "DICT_MERGE", "MAP_ADD"), _NO_DICT),
    **dict.fromkeys(("BUILD_SET", "SET_ADD"), _NO_SET),
    **dict.fromkeys(("FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING"), _NO_TEXT),
}
_NAMED_CALLS = ("CALL_FUNCTION_KW", "KW_NAMES", "CALL_KW")
# The instruction after one of these can only be reached by a jump.
_ENDS = (
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
    *("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
)


def instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Each instruction with its line."""
    lines = {start: line for start, _, line in code.co_lines() if line}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        yield instruction, line


def inner_codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of the functions that are defined inside."""
    return [x for x in code.co_consts if isinstance(x, types.CodeType)]


def place(code: types.CodeType, line: int) -> str:
    """A line of a function, for messages."""
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_name} ({code.co_filename}, line {line}" + (f": {text})" if text else ")")


@functools.lru_cache(maxsize=1000)
def wrong_in(code: types.CodeType) -> str | None:
    """The first thing in this function that a kernel cannot do, with its line; None if there is none."""
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return f"{place(code, code.co_firstlineno)}: it takes **{_arguments(code)[-1]}, and a kernel passes no names"
    if code.co_kwonlyargcount and code.co_flags & inspect.CO_VARARGS:
        return f"{place(code, code.co_firstlineno)}: it takes parameters by name behind *{_arguments(code)[-1]}"
    if any(inner.co_kwonlyargcount for inner in inner_codes(code)):
        return (
            f"{place(code, code.co_firstlineno)}: it defines a function inside that takes parameters by name: let it "
            "take them by position"
        )
    every = list(instructions(code))
    before: Any = None
    for now, line in every:
        why = _REFUSED.get(now.opname) or _wrong_at(code, before, now)
        if why:
            return f"{place(code, line)}: {why}"
        before = now
    for check in (_text, _lists, _names_of_inner, _unset):
        found = check(code, every)
        if found:
            return f"{place(code, found[1])}: {found[0]}"
    return next(filter(None, map(wrong_in, inner_codes(code))), None)


Every = list[tuple[dis.Instruction, int]]
Found = tuple[str, int] | None  # why, and the line


def _arguments(code: types.CodeType) -> tuple[str, ...]:
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]


def _wrong_at(code: types.CodeType, before: Any, now: dis.Instruction) -> str | None:
    """The fault of an instruction, given the one before it; None if it has none."""
    last = before.opname if before else ""
    none = last in ("LOAD_CONST", "RETURN_CONST") and before.argval is None
    if now.opname == "RETURN_CONST" and now.argval is None or now.opname == "RETURN_VALUE" and none:
        return "it returns None here, or comes to its end without return; every way through it returns a number"
    if now.opname == "STORE_DEREF" and now.argval in code.co_freevars:
        return f"it sets {now.argval} of the function around it; it is to return what it computes"
    if now.opname == "GET_ITER" and last == "LOAD_CONST" and len(set(map(_shape, before.argval))) > 1:
        return MIXED
    if now.opname == "IS_OP" and not none:
        return "it asks with `is`, which means the same object: write =="
    if now.opname == "UNARY_INVERT" and (last in _TRUTHS or last == "LOAD_CONST" and type(before.argval) is bool):
        return NO_INVERSE
    if now.opname in ("LOAD_CONST", "RETURN_CONST"):
        return wrong_with(now.argval)
    return None


MIXED = "it loops over a tuple of whole numbers and others: write 1.0 for 1"
_TRUTHS = ("COMPARE_OP", "CONTAINS_OP", "UNARY_NOT")
NO_INVERSE = "it inverts the bits of True or False, which gives -2 or -1: write not"


def _shape(constant: Any) -> Any:
    return tuple(map(_shape, constant)) if isinstance(constant, tuple) else type(constant)


def wrong_with(constant: Any) -> str | None:
    """Why a kernel cannot have this constant; text is left to _text."""
    if isinstance(constant, tuple):
        return next(filter(None, map(wrong_with, constant)), None)
    if isinstance(constant, frozenset):
        return _NO_SET
    if isinstance(constant, int) and not INT64[0] <= constant <= INT64[1]:
        return f"{constant} is no whole number of 64 bits: {INT64[0]} to {INT64[1]}"
    if isinstance(constant, complex):
        return f"{constant} is complex, and a kernel knows real numbers only"
    return "it uses ..., which a kernel does not know" if constant is ... else None


def _text(code: types.CodeType, every: Every) -> Found:
    for number, (now, line) in enumerate(every):
        if now.opname not in ("LOAD_CONST", "RETURN_CONST") or not isinstance(now.argval, str | bytes):
            continue
        if number + 1 < len(every) and every[number + 1][0].opname == "MAKE_FUNCTION":  # Python 3.10: a function's name
            continue
        infinite = str(now.argval).strip("+- ").lower() in ("inf", "infinity", "nan")
        instead = f": write math.{str(now.argval).strip('+- ').lower()[:3]}" if infinite else ""
        return f"{now.argval!r} is text, which a kernel does not know{instead}", line
    return None


def _lists(code: types.CodeType, every: Every) -> Found:
    """Finds a list. A call with a starred argument also makes one, but turns it into the tuple of its arguments."""
    made = [line for now, line in every if now.opname == "BUILD_LIST"]
    tuples = [1 for now, _ in every if now.opname == "LIST_TO_TUPLE" or "LIST_TO_TUPLE" in now.argrepr]
    if len(made) > len(tuples):
        return "it makes a list, which a kernel does not know: write a tuple, or pass an array in aux=", made[0]
    return None


def _names_of_inner(code: types.CodeType, every: Every) -> Found:
    if inner_codes(code):
        for now, line in every:
            if now.opname in _NAMED_CALLS:
                return "it defines a function inside, and passes an argument by name: pass it by position", line
    return None


def _unset(code: types.CodeType, every: Every) -> Found:
    """Finds a name that is read although some path through the function has not set it."""
    at = {now.offset: number for number, (now, _) in enumerate(every)}
    known: dict[int, frozenset[str]] = {}  # for each instruction the names that are set on every path to it
    left = [(0, frozenset(_arguments(code)))]
    while left:
        number, names = left.pop()
        if number >= len(every) or known.get(number) is not None and known[number] <= names:
            continue
        names = known[number] = known.get(number, names) & names
        now = every[number][0]
        after = names | set(_touched(now, "STORE"))
        if now.opcode in dis.hasjrel or now.opcode in dis.hasjabs:
            left.append((at[now.argval], after))
        if now.opname not in _ENDS:
            left.append((number + 1, after))
    own, cells = {*code.co_varnames} - {*code.co_cellvars}, {*code.co_cellvars}
    for number, names in sorted(known.items()):
        now, line = every[number]
        set_here = _touched(now, "STORE") if now.opname.startswith("STORE") else ()  # it sets, and then reads
        missing = [name for name in _touched(now, "LOAD") if name not in (*names, *set_here)]
        missing = [name for name in missing if name in (cells if "DEREF" in now.opname else own)]
        if missing:
            return f"{missing[0]} is not set on every way to here: give it a value before", line
    return None


def _touched(now: dis.Instruction, what: str) -> tuple[str, ...]:
    """The names of variables that an instruction sets ("STORE") or reads ("LOAD"); some do both."""
    done = re.findall("(LOAD|STORE)_(?:FAST|DEREF)(?!_AND_CLEAR)", now.opname)
    names = now.argval if isinstance(now.argval, tuple) else (now.argval,)
    return tuple(name for each, name in zip(done, names, strict=False) if each == what)
