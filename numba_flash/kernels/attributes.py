"""Lets a kernel read its facts where it uses them: `config.tile_m`, `walk.first_tile(...)`, `ld_st.load_v4(...)`.

A kernel closes over its Config, over NamedTuples of device functions and over modules. This rewrite replaces an
attribute of one of these by its value, before Numba drops dead branches and infers types. So `if config.write_lse:`
costs nothing, and `local.array(config.tile_m, float32)` has a constant size. In the simulator it is plain Python.

Source: Numba's rewrites (numba.cuda.core.rewrites), which are its interface for this.
"""

from types import ModuleType
from typing import Any

from numba.cuda.core import ir
from numba.cuda.core.rewrites import Rewrite, register_rewrite

from ..config.forward import LaunchFacts

PACKAGE = __name__.partition(".")[0] + "."


def is_constant(holder: Any) -> bool:
    """Whether the attributes of `holder` never change: a Config, a NamedTuple or a module of this package."""
    if isinstance(holder, ModuleType):
        return holder.__name__.startswith(PACKAGE)
    return isinstance(holder, (LaunchFacts, tuple)) and type(holder).__module__.startswith(PACKAGE)


@register_rewrite("before-inference")
class ConstantAttributes(Rewrite):
    """holder.name -> its value, for each holder that a function closes over."""

    def match(self, func_ir: Any, block: Any, typemap: Any, calltypes: Any) -> bool:
        self.func_ir, self.block, self.found = func_ir, block, {}
        for statement in block.find_insts(ir.Assign):
            expr = statement.value
            if isinstance(expr, ir.Expr) and expr.op == "getattr":
                holders = func_ir._definitions.get(expr.value.name, ())
                if len(holders) == 1 and isinstance(holders[0], (ir.Global, ir.FreeVar)):
                    holder = holders[0].value
                    if is_constant(holder):
                        self.found[statement] = getattr(holder, expr.attr)
        return bool(self.found)

    def apply(self) -> Any:
        block = self.block.copy()
        block.clear()
        for statement in self.block.body:
            if statement in self.found:
                constant = ir.Global(statement.value.attr, self.found[statement], statement.loc)
                self.func_ir._definitions[statement.target.name] = [constant]
                statement = ir.Assign(constant, statement.target, statement.loc)
            block.append(statement)
        return block


@register_rewrite("before-inference")
class UnusedHolders(Rewrite):
    """Drops a holder that nothing reads any more. Numba has no type for a Config, nor for a tuple that has a string."""

    def __init__(self, state: Any) -> None:
        self.used: set[str] = set()
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                if not isinstance(statement, ir.Del):
                    read = statement.value if isinstance(statement, ir.Assign) else statement
                    names = (read,) if isinstance(read, ir.Var) else getattr(read, "list_vars", tuple)()
                    self.used.update(variable.name for variable in names)

    def match(self, func_ir: Any, block: Any, typemap: Any, calltypes: Any) -> bool:
        self.block = block
        self.unused = {
            statement
            for statement in block.find_insts(ir.Assign)
            if isinstance(statement.value, (ir.Global, ir.FreeVar))
            and statement.target.name not in self.used
            and is_constant(statement.value.value)
        }
        return bool(self.unused)

    def apply(self) -> Any:
        block = self.block.copy()
        block.clear()
        for statement in self.block.body:
            if statement not in self.unused:
                block.append(statement)
        return block
