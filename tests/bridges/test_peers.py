"""What moves tokens between GPUs, without GPUs: letters, planes, and elements of 16 bytes. test_context_parallel.py has
the protocol, between processes."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from numba_flash.distributed import groups  # noqa: E402
from numba_flash.distributed.peer_memory import MOST_PITCH, in_planes  # noqa: E402
from numba_flash.distributed.peers import ALIGNED, letters  # noqa: E402

VIEWS = {
    "contiguous": lambda x: x,
    "some tokens": lambda x: x[:, :, 2:5],
    "some heads": lambda x: x[:, 1:3],
    "tokens first": lambda x: x.transpose(1, 2),
    "tokens first, some heads": lambda x: x.transpose(1, 2)[:, :, 1:],
    "one batch entry": lambda x: x[:1, :, 1:4],
    "every second element": lambda x: x[..., ::2],
    "one element": lambda x: x[1:, 3:, 5:, 7:],
    "a row": lambda x: x[0, 0, 0],
}


def base(dtype=torch.int16):
    return torch.arange(2 * 4 * 6 * 8).to(dtype).view(2, 4, 6, 8)


@pytest.mark.parametrize("name", VIEWS)
def test_planes_are_the_elements_in_their_order(name):
    x, flat = VIEWS[name](base()), base().flatten()
    width, rows, pitch, offsets = in_planes(x)
    first, size = x.storage_offset(), x.element_size()
    starts = [(plane + row * pitch) // size for plane in offsets for row in range(rows)]
    found = torch.cat([flat[first + start : first + start + width // size] for start in starts])
    assert torch.equal(found, x.flatten())
    assert rows == 1 or pitch >= width


def test_rows_far_apart_are_planes():
    """A copy engine has a limit."""
    x = torch.empty_strided((3, 8), (MOST_PITCH, 1), dtype=torch.int16, device="meta")
    assert in_planes(x) == (16, 1, 16, [0, 2 * MOST_PITCH, 4 * MOST_PITCH])


def test_letters_fit_and_have_everything():
    room = 4 * ALIGNED
    arrays = [torch.arange(n, dtype=torch.int32).view(1, n, 1) for n in (3, 700, 64, 0, 256, 1)]
    found = letters(arrays, room)
    for letter in found:
        places = [(at, at + x.numel() * 4) for at, x in letter]
        assert places[0][0] == 0 and places[-1][1] <= room
        assert all(a[1] <= b[0] and b[0] % ALIGNED == 0 for a, b in itertools.pairwise(places))
    parts = torch.cat([x.flatten() for letter in found for _, x in letter])
    assert torch.equal(parts, torch.cat([x.flatten() for x in arrays]))
    assert letters([torch.empty(2, 0, 3)], room) == letters([], room) == []


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_by_16_bytes(name, dtype, monkeypatch):
    x, to = VIEWS[name](base(dtype)), VIEWS[name](torch.zeros_like(base(dtype)))
    asked = []
    monkeypatch.setattr(groups, "_of_16_bytes", lambda x, real=groups._of_16_bytes: asked.append(real(x)) or asked[-1])
    groups.copy(to, x)
    assert torch.equal(to, x)
    assert all(asked) == (name not in ("every second element", "one element"))


def test_copies_of_other_dtypes_and_unaligned_rows():
    x = torch.arange(33.0)[1:]
    to = torch.zeros(32)
    groups.copy(to, x)
    half = torch.zeros(32, dtype=torch.float16)
    groups.copy(half, x)
    assert torch.equal(to, x) and torch.equal(half, x.half())
