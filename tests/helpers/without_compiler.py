"""A process in which nothing can be compiled, as in a container that has a bundle: Numba is not installed in it."""

import sys

COMPILERS = ("numba", "numba_cuda", "llvmlite")


class _Without:
    """A finder of sys.meta_path that does not find the compilers."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *others):
        return None if name.partition(".")[0] in COMPILERS else self._finder.find_spec(name, *others)

    def __getattr__(self, name):
        return getattr(self._finder, name)  # what importlib.metadata asks for


def forbid():
    assert not imported()
    sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]


def imported():
    return [name for name in sys.modules if name.partition(".")[0] in COMPILERS]
