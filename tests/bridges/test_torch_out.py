"""out=: torch is told what is written, and refuses it where it would refuse it of its own functions."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import numba_flash  # noqa: E402

SHAPE = (1, 2, 5, 4)


def given():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def into_o(x):
    numba_flash.attention(given(), given(), given(), out=x)


def into_o_of_a_pair(x):
    numba_flash.attention(given(), given(), given(), return_lse=True, out=(x, torch.empty(SHAPE[:3])))


def into_lse(x):
    numba_flash.attention(given(), given(), given(), return_lse=True, out=(torch.empty(SHAPE), x))


def into_softmax(x):
    numba_flash.softmax(given(), kernel="reference", out=x)


WRITERS = [(into_o, SHAPE), (into_o_of_a_pair, SHAPE), (into_lse, SHAPE[:3]), (into_softmax, SHAPE)]
each = pytest.mark.parametrize(("write", "shape"), WRITERS, ids=lambda x: getattr(x, "__name__", ""))


@each
def test_autograd_notices_what_is_written(write, shape):
    w, x = torch.ones(shape, requires_grad=True), torch.full(shape, 2.0)
    y = (w * x).sum()
    write(x)
    assert not (x == 2).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@each
def test_and_through_a_view(write, shape):
    w, whole = torch.ones(2, *shape, requires_grad=True), torch.full((2, *shape), 2.0)
    y = (w * whole).sum()
    write(whole[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@each
def test_what_was_not_saved_may_be_written(write, shape):
    w, x = torch.ones(shape, requires_grad=True), torch.full(shape, 2.0)
    write(x)
    written = x.clone()
    (w * x).sum().backward()
    assert torch.equal(w.grad, written)


@each
def test_what_has_a_gradient_is_refused(write, shape):
    leaf = torch.zeros(shape, requires_grad=True)
    with torch.no_grad():
        seen_from_there = leaf[:]
    for x in (leaf, leaf[:], leaf * 1, seen_from_there):
        before = x.detach().clone()
        with pytest.raises(NotImplementedError, match="out"):
            write(x)
        assert torch.equal(x, before)
    with torch.no_grad():  # as an optimiser writes a parameter
        version = leaf._version
        write(leaf)
        assert leaf._version > version


@each
def test_inference_tensors_have_no_version(write, shape):
    with torch.inference_mode():
        x = torch.zeros(shape)
        write(x)
        assert x.any()


def test_nothing_is_written_without_a_call():
    x = torch.empty(SHAPE)
    numba_flash.explain(given(), given(), given(), out=x)
    numba_flash.warmup(given(), given(), given(), out=x)
    assert x._version == 0
