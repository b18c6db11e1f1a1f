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

# From the top down. A module may import any that stands in a later line, or later in its own.
ORDER = """
    __main__ demo debug
    compat.flash_attn compat.torch bridges.transformers bridges.torch bridges.jax
    testing_exact testing explaining merging ladder
    gradients api copies launch_backward launch enqueue counters
    sim.launch
    cpu_backward cpu cpu_backward_kernel cpu_backward_sums cpu_kernel cpu_backward_panel cpu_panel cpu_elements
    simd_row simd_panel simd_backward simd_scores simd cpu_cache cpu_backward_plan cpu_plan
    compiled assembler
    kernels.v2_backward_dkdv kernels.v2_backward_dq kernels.v2_backward_dbias kernels.v2_backward_dalibi kernels.delta
    kernels.mma_backward_dkdv kernels.mma_backward_dq kernels.mma_backward_rows
    kernels.wgmma_backward_dkdv kernels.wgmma_backward_dq
    kernels.v1 kernels.v2 kernels.mma_forward kernels.wgmma_forward
    kernels.softmax_safe kernels.softmax_online kernels.softmax_blocked
    kernels.steps.wgmma_supply kernels.steps.wgmma_places
    kernels.steps.wgmma_backward_producer kernels.steps.wgmma_backward_state
    kernels.steps.output_rows kernels.steps.gradient_rows kernels.steps.fragment_products kernels.steps.score_gradients
    kernels.steps.repair_rows kernels.steps.repair_keys kernels.steps.repair_queries kernels.steps.fragment_scores
    kernels.steps.fragment_outputs kernels.steps.row_facts kernels.steps.notes
    kernels.steps.fragment_softmax kernels.steps.async_tiles
    kernels.steps.ds_rows kernels.steps.rows kernels.steps.weights
    kernels.steps.integers kernels.steps.scores kernels.steps.tiles kernels.steps.elements
    kernels.steps.plain kernels.steps.inlined
    ptx ptx.approx ptx.bar ptx.cluster ptx.cp_async ptx.cvt ptx.elect ptx.fence ptx.ld_st ptx.ldmatrix ptx.mbarrier
    ptx.memory ptx.minmax ptx.mma ptx.setmaxnreg ptx.shared ptx.shfl ptx.special ptx.stmatrix ptx.tma ptx.vote ptx.wgmma
    sim.approx sim.bar sim.cp_async sim.cvt sim.elect sim.fence sim.ld_st sim.ldmatrix sim.memory
    sim.minmax sim.mma sim.setmaxnreg sim.shared sim.shfl sim.special sim.stmatrix sim.tma sim.vote sim.wgmma
    sim.mbarrier sim.cluster sim.turns sim.block sim.warp sim.global_memory sim.shared_memory sim.order
    sim.register_limits sim.registers
    sim.errors ptx.asm ptx.fragments
    select_backward select makespan arguments_backward arguments target backward_problem problem
    arrays config_backward config_seed_backward config_wgmma_backward config ranges reference toolchain tensor_maps
    context forked cache_folder
""".split()

# Imports that point up: an array of a framework that records asks for its bridge, in the middle of a call.
UPWARD = {("api", "bridges.torch"), ("api", "bridges.jax")}
FRAMEWORKS = ("torch", "jax", "transformers", "cupy", "tensorflow")

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" and "demo" not in path.parts
)


def tree(module):
    return ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())


def imports(module):
    """(of the package, of others): every import statement, also inside functions."""
    ours, others = set(), set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            others |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level]
            base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                ours.add(name if name in (*MODULES, "demo") else base)
    return ours - {""}, others


def test_every_module_has_its_place():
    assert set(MODULES) <= set(ORDER), "say in ORDER where the new module stands"
    assert set(ORDER) - {"demo", "ptx"} <= set(MODULES), "ORDER names modules that are gone"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    ours, others = imports(module)
    for other in {other for other in ours if (module, other) not in UPWARD}:
        assert ORDER.index(module) < ORDER.index(other), f"{module} imports {other}, which stands above it"
    assert not any(name.startswith("numba_flash") for name in others), "imports of the package are relative"


def test_kernels_import_only_what_kernels_are_made_of():
    for module in MODULES:
        if module.startswith("kernels."):
            ours, others = imports(module)
            assert all(name.startswith(("kernels.steps", "ptx", "ranges")) for name in ours), (module, ours)
            assert all(name.split(".")[0] in ("functools", "math", "numpy", "numba") for name in others), (
                module,
                others,
            )


def test_only_the_lower_floors_know_numba():
    # __main__: `doctor` looks at what is installed
    allowed = "__main__ kernels. ptx. sim. toolchain compiled launch target copies arrays cpu simd".split()
    for module in MODULES:
        if not module.startswith(tuple(allowed)):
            assert not any(name.split(".")[0] in ("numba", "llvmlite") for name in imports(module)[1]), module


def test_only_bridges_and_compat_import_frameworks():
    for module in MODULES:
        if not module.startswith(("bridges.", "compat.")):
            for name in imports(module)[1]:
                assert name.split(".")[0] not in FRAMEWORKS, (module, name)


def test_ptx_knows_nothing_of_attention():
    words = ("attention", "query", "softmax", "causal", "key_tile", "seqlen", "head_dim")
    for path in [*(PACKAGE / "ptx").glob("*.py"), PACKAGE / "sim" / "shared.py"]:
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


def test_importing_takes_less_than_a_tenth_of_a_second(tmp_path):
    # processor time, which does not count what else a busy machine does meanwhile
    code = (
        "import numpy, time; start = time.process_time(); import numba_flash; "
        "numba_flash.attention; print(time.process_time() - start)"
    )
    # and with bytecode at hand, as installers and Python itself leave it, also where this run is told to write none
    bytecode = dict(PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE="")
    first, *others = [float(python("-c", code, **bytecode)) for _ in range(6)]
    assert list(tmp_path.rglob("api.*.pyc")), "no bytecode was written, so that compiling is what was measured"
    assert statistics.median(others) < 0.1, (first, others)


def test_the_public_names_are_there():
    for name in numba_flash.__all__:
        assert getattr(numba_flash, name) is not None and name in dir(numba_flash)
    with pytest.raises(AttributeError, match="nonsense"):
        numba_flash.nonsense  # noqa: B018
    assert all(getattr(numba_flash, name).__doc__ for name in numba_flash.__all__)
