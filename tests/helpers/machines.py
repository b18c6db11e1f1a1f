"""Machines that are not here, and problems without data: for what is decided before anything runs."""

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 then
import numpy as np

from numba_flash.arrays import read
from numba_flash.machine.target import Target
from numba_flash.problem.forward import Problem
from numba_flash.problem.options import OPTION_NAMES, PACKED_ARRAYS, Options, Packed

KB = 1024
TURING = Target(False, cc=(7, 5), shared_bytes=64 * KB, multiprocessors=40, name="T4")
A100 = Target(False, cc=(8, 0), shared_bytes=163 * KB, multiprocessors=108, name="A100")
AMPERE = Target(False, cc=(8, 6), shared_bytes=99 * KB, multiprocessors=82, name="RTX 3090")
ADA = Target(False, cc=(8, 9), shared_bytes=99 * KB, multiprocessors=128, name="RTX 4090")
HOPPER = Target(False, cc=(9, 0), shared_bytes=227 * KB, multiprocessors=132, name="H200")
B200 = Target(False, cc=(10, 0), shared_bytes=227 * KB, multiprocessors=148, name="B200")
RTX_5090 = Target(False, cc=(12, 0), shared_bytes=99 * KB, multiprocessors=170, name="RTX 5090")
TENSOR_MACHINES = (A100, AMPERE, ADA, HOPPER, B200, RTX_5090)


def empty(*shape, dtype="float16", strides=None):
    """An array that is never touched, so that it may be as large as it likes; strides in elements."""
    if strides is None:
        return np.empty(shape, dtype)
    one = np.empty(1, dtype)
    return np.lib.stride_tricks.as_strided(one, shape, [n * one.itemsize for n in strides])


def problem(head_dim=64, head_dim_v=None, dtype="float16", seqlen=4096, *, seqlen_k=None, heads=2, heads_kv=None,
            q=None, k=None, v=None, **options):  # fmt: skip
    """One of batch 1. q, k, v: arrays in their place; options: those of Problem.of, arrays where it takes layouts."""
    heads_kv = heads if heads_kv is None else heads_kv
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    given = dict(
        q=empty(1, heads, seqlen, head_dim, dtype=dtype) if q is None else q,
        k=empty(1, heads_kv, seqlen_k, head_dim, dtype=dtype) if k is None else k,
        v=empty(1, heads_kv, seqlen_k, head_dim_v or head_dim, dtype=dtype) if v is None else v,
    )
    arguments = {name: read(name, x).layout if isinstance(x, np.ndarray) else x for name, x in options.items()}
    named = {name: arguments.pop(name) for name in (*OPTION_NAMES, *PACKED_ARRAYS) if name in arguments}
    operands = {name: read(name, x).layout for name, x in given.items()}
    return Problem.of(**operands, options=Options.of(**named), **arguments)


def packed_problem(
    head_dim=64, dtype="float16", rows=4096, *, sequences=4, heads=2, heads_kv=None, bounds=(), **options
):
    """Packed sequences of unknown lengths. bounds: max_seqlen_q and max_seqlen_k."""
    q = empty(rows, heads, head_dim, dtype=dtype)
    k = empty(rows, heads_kv or heads, head_dim, dtype=dtype)
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), empty(sequences + 1, dtype="int32"))
    return problem(q=q, k=k, v=k, layout=Packed(*bounds), **ends, **options)
