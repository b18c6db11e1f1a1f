"""Measures of the package's structure. Each has a bound, so that what was made simple stays simple.

A bound only falls. Where the goal is not reached, it is what holds today. Who makes a count smaller lowers its bound.
"""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from numba_flash.select import backward_tiles, tiles

PACKAGE = Path(__file__).resolve().parents[2] / "numba_flash"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PUBLIC = ("api", "compat", "reference.py", "distributed/operation.py", "distributed/kvcache.py")


def names(*rooms):
    """Files of some rooms, or of the whole package, below the package."""
    every = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return [name for name in every if not rooms or name.split("/")[0] in rooms]


@functools.cache
def lines_of(name):
    return len((PACKAGE / name).read_text().splitlines())


@functools.cache
def parsed(name):
    return ast.parse((PACKAGE / name).read_text())


def trees(*rooms, without=()):
    return {name: parsed(name) for name in names(*rooms) if not name.startswith(without)}


@functools.cache
def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def is_kernel(function):
    """Whether it is launched: @cuda.jit, and not @cuda.jit(device=True)."""
    return "cuda.jit" in [ast.unparse(decorator) for decorator in function.decorator_list]


def own_lines(function):
    """How many, without its docstring and without the functions in it."""
    lines = set(range(function.lineno, function.end_lineno + 1))
    if ast.get_docstring(function) is not None:
        lines -= set(range(function.body[0].lineno, function.body[0].end_lineno + 1))
    for inner in functions(function):
        if inner is not function:
            lines -= set(range(inner.lineno - len(inner.decorator_list), inner.end_lineno + 1))
    return len(lines)


def parameters(function):
    of = function.args
    return len(of.posonlyargs + of.args + of.kwonlyargs) + bool(of.vararg) + bool(of.kwarg)


def sums_and_products(pattern, found):
    """Where they match; of those that lie in each other, the largest."""
    for name, tree in found.items():
        ahead = [tree]
        while ahead:
            node = ahead.pop()
            if isinstance(node, ast.BinOp) and re.search(pattern, ast.unparse(node)):
                yield f"{name}:{node.lineno}"
            else:
                ahead += ast.iter_child_nodes(node)


def barrier_addresses():
    return list(sums_and_products(r"(full|empty|bars|barriers)\b.*\+ 8 \*", trees("kernels")))


def lse_rows():
    """(b * heads + h) * rows; the same with m_tiles is a place for each tile of queries."""
    return list(sums_and_products(r"heads \+ \w+\) \* (?!m_tiles)", trees("kernels", without="kernels/steps/")))


def isinstance_of_config():
    every = ((name, node) for name, tree in trees(without="config/").items() for node in ast.walk(tree))
    calls = ((name, node) for name, node in every if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    ours = ((name, node) for name, node in calls if node.func.id == "isinstance")
    return [f"{name}:{node.lineno}" for name, node in ours if re.search(r"Config\b", ast.unparse(node.args[1]))]


def many_parameters():
    every = ((name, of) for name, tree in trees(without=PUBLIC).items() for of in functions(tree))
    return [f"{name}:{of.lineno} {of.name} {parameters(of)}" for name, of in every if parameters(of) > 12]


def long_files():
    return [f"{name} {lines_of(name)}" for name in names() if lines_of(name) > 450]


CPU_KERNELS = ("cpu/kernel.py", "cpu/backward_kernel.py")  # one loop over keys each, of which nothing can be left out


def long_functions():
    every = (
        (name, of)
        for name, tree in trees(without=CPU_KERNELS).items()
        for of in functions(tree)
        if of.end_lineno > of.lineno + 79
    )
    found = ((name, of) for name, of in every if not is_kernel(of) and own_lines(of) > 80)
    return [f"{name}:{of.lineno} {of.name} {own_lines(of)}" for name, of in found]


def lines_before_functions():
    """Lines of kernels/ between `def make` and the first function in it, without a docstring: what is unpacked and
    renamed there."""
    count = 0
    for tree in trees("kernels").values():
        for make in (node for node in tree.body if isinstance(node, FUNCTIONS) and node.name.startswith("make")):
            inner = [node.lineno - len(node.decorator_list) for node in make.body if isinstance(node, FUNCTIONS)]
            words = make.body[0] if ast.get_docstring(make) is not None else None
            begin = make.lineno if words is None else words.end_lineno
            count += min(inner, default=make.end_lineno) - begin - 1
    return count


def tile_rows():
    return sum(len(rows) for of in (tiles.TABLES, backward_tiles.TABLES) for rows in of.values())


class Measure(NamedTuple):
    name: str
    found: Callable[[], int | list[str]]  # how many, or where
    bound: int
    goal: int
    reason: str


MEASURES = (
    Measure("lines of kernels", lambda: sum(map(lines_of, names("kernels"))), 16_883, 14_500, "a person can read them"),
    Measure(
        "lines of select, config and abi",
        lambda: sum(map(lines_of, names("select", "config", "abi"))),
        5_156,
        4_200,
        "a choice is easier to read than what is chosen",
    ),
    Measure("tile rows", tile_rows, 192, 185, "each is compiled for every GPU, and has to be measured"),
    Measure("functions of over 12 parameters", many_parameters, 0, 0, "arguments that belong together have a name"),
    Measure("files of over 450 lines", long_files, 0, 0, "a file has one idea"),
    Measure("functions of over 80 own lines", long_functions, 0, 0, "a function that is no kernel fits on two screens"),
    Measure("barrier addresses by hand", barrier_addresses, 4, 0, "a ring of barriers is an object: wgmma/pipeline.py"),
    Measure("lse rows by hand", lse_rows, 0, 0, "steps/sequence.py and steps/lse_delta.py say where rows are"),
    Measure("isinstance of a Config", isinstance_of_config, 0, 0, "a Config says itself what its kernel needs"),
    Measure(
        "lines before the first function of make",
        lines_before_functions,
        700,
        730,
        "a kernel begins with what it does",
    ),
)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name.replace(" ", "-"))
def test_measure(measure):
    found = measure.found()
    count = found if isinstance(found, int) else len(found)
    assert count <= measure.bound, f"{count} {measure.name}, at most {measure.bound}: {measure.reason}. {found}"
    if measure.bound > measure.goal:  # a few lines fewer are no reason to change the number
        lower = max(count, measure.goal)
        assert count >= 0.98 * measure.bound, f"{count} {measure.name}: lower the bound from {measure.bound} to {lower}"


# Of each finder one example that counts, and what is beside it that does not.
FINDERS = {
    "kernels/one.py": '''
def make(config):
    """Words."""
    tile_m = config.tile_m
    tile_n = config.tile_n

    @cuda.jit
    def kernel(x):
        mbarrier.wait(base + at.x_full + 8 * stage, 0)
        first = row + 8 * stage
        lse = arrays.lse[(b * sizes.heads + h) * sizes.seqlen_q + row]
        turns = (b * heads + h) * m_tiles + tile
        return isinstance(config, (Mma, WgmmaConfig)) and isinstance(config, int)
''',
    "config/two.py": "isinstance(self, MmaConfig)",
}


def test_the_finders_themselves(monkeypatch):
    made = {name: ast.parse(text) for name, text in FINDERS.items()}
    monkeypatch.setitem(globals(), "names", lambda *rooms: list(made))
    monkeypatch.setitem(globals(), "parsed", made.get)
    assert barrier_addresses() == ["kernels/one.py:9"]
    assert lse_rows() == ["kernels/one.py:11"]
    assert isinstance_of_config() == ["kernels/one.py:13"]
    assert lines_before_functions() == 3
    (make, kernel), _ = map(functions, made.values())
    assert is_kernel(kernel) and not is_kernel(make)
    assert own_lines(make) == 4 and own_lines(kernel) == 6
    every = ast.parse("def f(a, /, b, *c, d, **e): pass").body[0]
    assert parameters(every) == 5
