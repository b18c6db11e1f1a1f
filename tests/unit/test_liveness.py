"""liveness.py, by which kernels compile faster, finds what Numba's own analysis finds."""

import types

import compiler
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_flash import compiled, liveness, toolchain
from numba_flash.config import SeedConfig

pytestmark = compiler.needed


@pytest.fixture(scope="module")
def numbas():
    toolchain.cuda()
    if liveness.analysis() is None:
        pytest.skip("this numba-cuda keeps its analysis elsewhere")
    return liveness.analysis().compute_live_map


BLOCKS = range(6)
NAMES = st.dictionaries(st.sampled_from(BLOCKS), st.sets(st.sampled_from("abcdef")))


# Loops, blocks that nothing leads to, names that are used and never defined.
@given(st.sets(st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS))), NAMES, NAMES)
def test_in_any_graph(numbas, edges, used, defined):
    used, defined = ({block: names.get(block, set()) for block in BLOCKS} for names in (used, defined))
    cfg = types.SimpleNamespace(
        successors=lambda block: [(b, None) for a, b in edges if a == block],
        predecessors=lambda block: [(a, None) for a, b in edges if b == block],
    )
    blocks = dict.fromkeys(BLOCKS)
    assert liveness.compute_live_map(cfg, blocks, used, defined) == numbas(cfg, blocks, used, defined)


def test_in_a_kernel(numbas, monkeypatch):
    sizes, ours = [], liveness.compute_live_map

    def compared(*arguments):
        found = ours(*arguments)
        assert found == numbas(*arguments)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(liveness, "compute_live_map", compared)
    compiled.to_ptx(SeedConfig("v2", "float16", 8, 8, 16, 16, softcap=True), (9, 0))
    assert max(sizes) > 20, "nothing has been compared"
    assert liveness.analysis().compute_live_map is numbas, "it is not Numba's again"
