"""Programs that were saved with attention in them load after `import numba_flash` alone."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numba_flash  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")


def attend(q):
    return numba_flash.attention(q, q, q, causal=True)


class Module(torch.nn.Module):
    def forward(self, q):
        return attend(q)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, q = tmp_path_factory.mktemp("saved"), torch.ones(1, 2, 5, 4)
    torch.jit.save(torch.jit.trace(attend, q), str(folder / "traced"))
    torch.export.save(torch.export.export(Module(), (q,)), folder / "exported.pt2")
    return folder


@pytest.mark.parametrize("imports", ["import numba_flash, torch", "import torch, numba_flash"])
def test_a_saved_program_loads(saved, imports):
    program = (
        f"{imports}\n"
        f"traced = torch.jit.load(r'{saved / 'traced'}')\n"
        f"exported = torch.export.load(r'{saved / 'exported.pt2'}').module()\n"
        "q = torch.randn(1, 2, 5, 4)\n"
        "expected = numba_flash.attention(q, q, q, causal=True)\n"
        "assert torch.equal(traced(q), expected) and torch.equal(exported(q), expected)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert not done.returncode, done.stderr
