"""Caches of torch tensors: written in place, in every dtype, and without gradients."""

import numpy as np
import pytest

import numba_flash
from numba_flash.compat import flash_attn, flashinfer

torch = pytest.importorskip("torch", reason="needs torch")


def pool(dtype, pages=8, page=4, heads=2, dim=16):
    torch.manual_seed(0)
    return [torch.randn(pages, page, heads, dim).to(dtype) for _ in range(2)]


TABLE = torch.tensor([[3, 1, 0], [7, 2, 5]], dtype=torch.int32)
LENGTHS = torch.tensor([6, 9], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_step_of_generation(dtype):
    k_cache, v_cache = pool(dtype)
    q, k, v = (torch.randn(2, 1, heads, 16).to(dtype) for heads in (4, 2, 2))
    version = k_cache._version
    o = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, block_table=TABLE)
    assert isinstance(o, torch.Tensor) and o.dtype == dtype and o.shape == q.shape
    assert k_cache._version > version  # autograd sees that it was written
    for b, length in enumerate(LENGTHS.tolist()):
        page = TABLE[b, length // 4]
        assert torch.equal(k_cache[page, length % 4], k[b, 0]) and torch.equal(v_cache[page, length % 4], v[b, 0])
        rows = [x[TABLE[b].long()].flatten(0, 1)[: length + 1].transpose(0, 1)[None] for x in (k_cache, v_cache)]
        alone = numba_flash.attention(q[b][:, :, None].transpose(0, 2).transpose(1, 2).reshape(1, 4, 1, 16), *rows)
        assert torch.equal(alone[0, :, 0], o[b, 0])  # the bits of a contiguous cache


def test_numbers_in_the_place_of_lengths_are_made_where_q_is():
    k_cache, v_cache = pool(torch.float32, pages=2, page=10)
    q = torch.randn(2, 1, 4, 16)
    whole = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache)
    assert torch.equal(whole, flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=10))


def test_flashinfer_takes_tensors():
    cache = pool(torch.float32)
    indptr, last = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    indices, q = torch.tensor([3, 1, 7, 2, 5], dtype=torch.int32), torch.randn(2, 4, 16)
    o, lse = flashinfer.batch_decode_with_paged_kv_cache(q, tuple(cache), indptr, indices, last, return_lse=True)
    expected = flash_attn.flash_attn_with_kvcache(q[:, None], *cache, cache_seqlens=LENGTHS, block_table=TABLE)
    assert torch.equal(o, expected[:, 0]) and lse.shape == (2, 4)


def test_there_are_no_gradients():
    k_cache, v_cache = pool(torch.float32)
    q = torch.randn(2, 4, 1, 16, requires_grad=True)
    given = dict(seqlens_k=LENGTHS, page_table=TABLE, layout="bshd")
    with pytest.raises(NotImplementedError, match=r"attention_kvcache has no gradients .*torch.no_grad"):
        numba_flash.attention_kvcache(q.transpose(1, 2), k_cache, v_cache, **given)
    with torch.no_grad():
        o = numba_flash.attention_kvcache(q.transpose(1, 2), k_cache, v_cache, **given)
    assert not o.requires_grad


def test_jax_reads_a_cache_and_cannot_append():
    jax = pytest.importorskip("jax", reason="needs jax")
    k_cache, v_cache = (jax.numpy.asarray(x.numpy()) for x in pool(torch.float32))
    q = jax.numpy.ones((2, 1, 4, 16))
    where = dict(seqlens_k=jax.numpy.asarray(LENGTHS.numpy()), page_table=jax.numpy.asarray(TABLE.numpy()))
    o = numba_flash.attention_kvcache(q, k_cache, v_cache, layout="bshd", **where)
    copies = [np.array(x) for x in (q, k_cache, v_cache)]
    expected = numba_flash.attention_kvcache(*copies, layout="bshd", **{name: np.array(x) for name, x in where.items()})
    assert np.array_equal(o, expected)
    new = jax.numpy.ones((2, 1, 2, 16))
    with pytest.raises(ValueError, match="k_cache is read-only"):
        numba_flash.attention_kvcache(q, k_cache, v_cache, k_new=new, v_new=new, layout="bshd", **where)
