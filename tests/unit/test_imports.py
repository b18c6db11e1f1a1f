"""What importing costs, and that a module imports only what lies below it."""

import ast
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import numba_flash

PACKAGE = Path(numba_flash.__file__).parent

# The rooms, from the top down. A module imports its own floor and those below it. A new file stands on the floor of
# its folder.
FLOORS = (
    ("__main__", "debug"),
    ("compat", "testing", "mods", "distributed"),
    ("api",),
    ("bridges",),
    ("dispatch",),
    ("gpu", "cpu"),
    ("kernels",),
    ("ptx",),
    ("select",),
    ("config",),
    ("abi",),
    ("problem",),
    ("arrays", "reference"),
    ("functions",),
    ("machine",),
)

ALLOWED_IN_KERNELS = ("collections", "functools", "math", "types", "typing", "numpy", "numba")
ALLOWED_ROOMS = (
    "kernels.",
    "functions.",
    "ptx",
    "problem.ranges",
    "problem.groups",
    "config.",
    "abi.",
    "arrays.dtypes",
)
FRAMEWORKS = ("torch", "jax", "transformers", "cupy", "tensorflow")


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
FILES |= {path.stem: path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
MODULES = sorted(FILES)


def imports(module):
    """(of the package, of others): every import statement, also inside functions."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            inside = module.split(".") + ["__init__"] * (FILES[module].name == "__init__.py")
            package = inside[: -node.level]
            base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                ours.add(name if name in MODULES else base)
    return ours - {""}, others


def floor(module):
    """The number of the floor that the module's room is on."""
    found = [number for number, rooms in enumerate(FLOORS) if module.partition(".")[0] in rooms]
    assert found, f"{module} stands on no floor: put it into a room"
    return found[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    ours, others = imports(module)
    for other in ours:
        assert floor(module) <= floor(other), f"{module} imports {other}, which stands above it"
    assert not any(name.startswith("numba_flash") for name in others), "imports of the package are relative"


def test_there_is_no_circle():
    """Modules can be sorted so that each imports only later ones."""
    left = {module: imports(module)[0] for module in MODULES}
    while left:
        free = [module for module, needs in left.items() if not needs & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_kernels_import_only_what_kernels_are_made_of():
    for module in MODULES:
        if module.startswith("kernels."):
            ours, others = imports(module)
            assert all(name.startswith(ALLOWED_ROOMS) for name in ours), (module, ours)
            assert all(name.split(".")[0] in ALLOWED_IN_KERNELS for name in others), (
                module,
                others,
            )


# The rooms of kernels/, from the bottom up. Those of kernels stand beside each other.
ROOMS_OF_KERNELS = (("steps",), ("score",), ("recompute",), ("softmax", "simt", "mma", "wgmma"))


def test_rooms_of_kernels_import_those_below_them():
    """The disk cache's key of a kernel has the sources of its own room, and of those below all kernels."""
    floors = {room: number for number, rooms in enumerate(ROOMS_OF_KERNELS) for room in rooms}
    for module in MODULES:
        if module.startswith("kernels."):
            own = module.split(".")[1]
            for name in imports(module)[0]:
                other = name.split(".")[1] if name.startswith("kernels.") else own
                if own in floors:  # else a file of no room, such as kernels/attributes.py
                    assert other == own or floors[other] < floors[own], (module, name)


def test_only_the_lower_floors_know_numba():
    # __main__: `doctor` looks at what is installed
    allowed = "__main__ kernels functions.compiled ptx machine gpu dispatch arrays cpu".split()
    for module in MODULES:
        if not module.startswith(tuple(allowed)):
            assert not any(name.split(".")[0] in ("numba", "llvmlite") for name in imports(module)[1]), module


def test_gpu_knows_no_kernel_and_select_no_cuda():
    """A kernel's facts are its Config's, so that a new kernel is no line of gpu/."""
    for module in MODULES:
        ours, others = imports(module)
        if module.startswith("gpu."):
            rooms = ("gpu", "machine", "functions", "abi", "config.forward", "kernels.steps.elements")
            assert all(name.startswith(rooms) for name in ours), (module, ours)
        if module.startswith(("select.", "abi.", "config.")):
            assert not any(name.startswith(("cuda", "numba")) for name in others), (module, others)


def test_only_bridges_compat_and_distributed_import_frameworks():
    for module in MODULES:
        if not module.startswith(("bridges.", "compat.", "distributed.")):
            for name in imports(module)[1]:
                assert name.split(".")[0] not in FRAMEWORKS, (module, name)


def test_ptx_knows_nothing_of_attention():
    words = ("attention", "query", "softmax", "causal", "key_tile", "seqlen", "head_dim")
    for path in (PACKAGE / "ptx").rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not [name for name in names if any(word in name.lower() for word in words)], path


def python(*arguments, **environment):
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return run.stdout


def test_importing_loads_nothing_heavy():
    heavy = "numba llvmlite cupy torch jax scipy ml_dtypes cuda array_api_compat hypothesis platformdirs".split()
    code = f"import sys, numba_flash; dir(numba_flash); print([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


def test_host_calls_load_no_cuda_and_no_framework():
    code = (
        "import sys, numpy as np, numba_flash; x = np.ones((1, 1, 2, 4)); "
        "numba_flash.attention(x, x, x, kernel='reference'); "
        "print([m for m in ('cupy', 'torch', 'jax', 'hypothesis', 'scipy') if m in sys.modules])"
    )
    assert python("-c", code).strip() == "[]"


# What a plain forward on tensor cores does without, by a word of the module's name.
NOT_PLAIN = (
    "backward gradients functions. caller_functions block_mask mask_bits tile_states softmax reference simt float32 "
    "config.mma_forward assembler host_copies kernels. cpu bridges compat testing debug mods explain"
).split()
MOST_MODULES = 55  # each takes a tenth of a millisecond and more of a process's first call


def test_a_plain_forward_loads_little(tmp_path):
    """From the import to the look into the disk cache, for a GPU that is not here."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from numba_flash import attention\n"
        "from helpers.machines import HOPPER, problem\n"
        "from numba_flash.dispatch.launch import make_launch\n"
        "from numba_flash.gpu.compiled import read_cache\n"
        "from numba_flash.select.forward import select\n"
        "made = problem(128); choice = select(made, HOPPER, 'auto', 'cupy'); make_launch(choice, made, HOPPER)\n"
        "assert choice.kernel == 'wgmma' and read_cache(choice.config, 'sm_90a') is None\n"
        "print(*[name for name in sys.modules if name.startswith('numba_flash')])"
    )
    found = python("-c", code, NUMBA_FLASH_CACHE_DIR=str(tmp_path)).split()
    assert "numba_flash.config.wgmma_forward" in found
    more = [name for name in found if any(word in name.removeprefix("numba_flash.") for word in NOT_PLAIN)]
    assert not more, "these came in with a plain forward"
    assert len(found) <= MOST_MODULES, sorted(found)


def test_importing_takes_less_than_a_tenth_of_a_second(tmp_path):
    # processor time, which does not count what else a busy machine does meanwhile
    code = (
        "import numpy, time; start = time.process_time(); import numba_flash; "
        "numba_flash.attention; print(time.process_time() - start)"
    )
    # and with bytecode at hand, as installers and Python itself leave it, also where this run is told to write none
    bytecode = dict(PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE="")
    first, *others = [float(python("-c", code, **bytecode)) for _ in range(6)]
    assert list(tmp_path.rglob("api/forward.*.pyc")), "no bytecode was written, so that compiling is what was measured"
    assert statistics.median(others) < 0.1, (first, others)


def test_the_public_names_are_there():
    for name in numba_flash.__all__:
        assert getattr(numba_flash, name) is not None and name in dir(numba_flash)
    with pytest.raises(AttributeError, match="nonsense"):
        numba_flash.nonsense  # noqa: B018
    assert all(getattr(numba_flash, name).__doc__ for name in numba_flash.__all__)
