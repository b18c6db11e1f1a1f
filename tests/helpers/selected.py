"""What select makes of a problem of gradients for a GPU that is not here, in the order of the launches."""

from unittest import mock

from helpers.machines import HOPPER
from numba_flash.api.explain import BackwardExplanation
from numba_flash.select import backward_kernels, backward_tiles
from numba_flash.select.backward import select_backward


def explained(problem, target=HOPPER, kernel="auto"):
    """The kernel, its Configs and the number of blocks of each; str() of it is for people."""
    family = "numpy" if target.arrays_on_host else "cupy"
    return BackwardExplanation.of(problem, target, select_backward(problem, target, kernel, family))


def configs_of(kernel, problem, target=HOPPER):
    return explained(problem, target, kernel).configs


def kernels_of(kernel, problem, target=HOPPER):
    return [config.kernel for config in configs_of(kernel, problem, target)]


def configs_with(rows, kernel, problem, target=HOPPER):
    """The same where each of these tables has one row only, {its name: the row}, or none where that is None."""
    tables = {name: () if row is None else (row,) for name, row in rows.items()}
    with mock.patch.dict(backward_tiles.TABLES, tables):
        backward_kernels.configs_of.cache_clear()
        found = configs_of(kernel, problem, target)
    backward_kernels.configs_of.cache_clear()
    return found
