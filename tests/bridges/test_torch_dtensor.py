"""attention of DTensors, in four processes over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("torch.distributed.tensor", reason="needs torch.distributed.tensor")

PROGRAM = Path(__file__).with_name("on_a_mesh.py")
CASES = ("batch", "heads", "both", "heads over all", "rows first", "options", "broadcast", "compiled", "replicated")
FUNCTIONS = ("functions", "functions of heads", "functions, packed")
FUNCTIONS += ("functions, compiled",) * (torch.__version__ >= (2, 13))
REFUSED = (
    "NotImplementedError: q is placed as S(2)",
    "ValueError: k must be placed as (Shard(dim=0), Replicate()), like q",
    "TypeError: all arrays must be of one kind, but k is Tensor beside DTensors",
    "NotImplementedError: dropout_p of DTensors",
    "nothing",
    "NotImplementedError: mask_mod reads the number of the head",
    "NotImplementedError: k has 2 heads, which cannot be shared out evenly to 4 devices",
    "NotImplementedError: q has 3 batch entries, which are not shared out evenly to 2 devices",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the four processes found: {case: "ok" or what was raised}."""
    folder = tmp_path_factory.mktemp("mesh")
    done = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("case", [*CASES, "packed", *FUNCTIONS])
def test_parts_are_parts_of_the_whole(case, results):
    """o, lse and every gradient, also those that are sums over devices."""
    assert [found[case] for found in results] == ["ok"] * 4


def test_refused(results):
    for found in results:
        assert all(text.startswith(start) for text, start in zip(found["refused"], REFUSED, strict=True)), found[
            "refused"
        ]
