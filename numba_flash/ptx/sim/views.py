"""The bits of a number as another type, x.view(np.float32), in a fifth of the time that NumPy takes.

A method of NumPy's numbers cannot be replaced. So in a kernel's functions a function of this file is called instead
(resumable.py), during a launch.
"""

import ast
from typing import Any

import numpy as np

KINDS = (np.float32, np.float64, np.uint32, np.int32, np.uint64, np.int64)


def _viewer(kind: Any) -> Any:
    size = np.dtype(kind).itemsize
    rooms = {other: np.empty(1, other) for other in KINDS if np.dtype(other).itemsize == size}
    places = {other: (room, room.view(kind)) for other, room in rooms.items()}

    def view(x: Any) -> Any:
        place = places.get(x.__class__)
        if place is None:  # an array
            return x.view(kind)
        place[0][0] = x
        return place[1][0]

    return view


NAMES = {f"__view_{kind.__name__}": _viewer(kind) for kind in KINDS}  # globals that the code reads


class Views(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(x, "view"), [ast.Attribute(ast.Name("np"), kind)]) if f"__view_{kind}" in NAMES:
                name = ast.copy_location(ast.Name(f"__view_{kind}", ast.Load()), node.func)
                return ast.copy_location(ast.Call(name, [x], []), node)
        return node
