"""Configs of kernels/simt, where a thread owns a row: what the compilers are asked to make of them."""

import dataclasses

import numpy as np

from helpers.machines import HOPPER, empty
from numba_flash import testing
from numba_flash.arrays import read
from numba_flash.config.simt_forward import V1Config, V2Config
from numba_flash.problem.backward import BackwardProblem
from numba_flash.problem.options import OPTION_NAMES, PACKED_ARRAYS, Options, uses
from numba_flash.select.backward_kernels import configs_of

PLAIN = V2Config("float32", 64, 64, 128, 16, write_lse=False)
EVERYTHING = V2Config(
    "float16", 59, 33, 64, 16, q_offset_source="seqlens_k",
    uses=uses(softcap=True, alibi_slopes="float32", bias="float16", mask="bool", seqlens_k="int32"),
)  # fmt: skip


def of_rung(kind, config, **others):
    """The same for v1 or v2."""
    return kind(**{x.name: getattr(config, x.name) for x in dataclasses.fields(config) if x.init} | others)


# v1 and v2 in every dtype, plain and with everything; a head_dim that no step divides; the smallest tile.
FORWARD = [
    *[of_rung(kind, PLAIN, dtype=dtype) for kind in (V1Config, V2Config) for dtype in testing.DTYPES],
    *[of_rung(kind, EVERYTHING) for kind in (V1Config, V2Config)],
    dataclasses.replace(
        EVERYTHING,
        dtype="bfloat16",
        q_offset_source="array",
        uses=uses(softcap=True, alibi_slopes="float32", bias="bfloat16", mask="bool", q_offset="int32"),
    ),
    V2Config("float32", 128, 128, 64, 16),
    V2Config("float64", 257, 257, 8, 4),
    V2Config("float32", 1, 1, 1, 4),
]
ALL = ("dq", "dk", "dv", "dbias", "dalibi_slopes")


def backward_problem(head_dim=64, head_dim_v=None, dtype="float32", wanted=("dq", "dk", "dv"), **options):
    """One without data: 2 heads, 300 queries, 500 keys."""
    head_dim_v = head_dim_v or head_dim
    lse_dtype = "float64" if dtype == "float64" else "float32"
    given = dict(
        do=empty(1, 2, 300, head_dim_v, dtype=dtype), q=empty(1, 2, 300, head_dim, dtype=dtype),
        k=empty(1, 2, 500, head_dim, dtype=dtype), v=empty(1, 2, 500, head_dim_v, dtype=dtype),
        o=empty(1, 2, 300, head_dim_v, dtype=dtype), lse=empty(1, 2, 300, dtype=lse_dtype),
    )  # fmt: skip
    arguments = dict(dlse=None, wanted=wanted) | given | options
    arguments = {name: read(name, x).layout if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    named = {name: arguments.pop(name) for name in (*OPTION_NAMES, *PACKED_ARRAYS) if name in arguments}
    return BackwardProblem.of(**arguments, options=Options.of(**named))


def everything(bias_shape, dtype="float16"):
    """A problem of gradients with every option that v2 had first."""
    return backward_problem(
        59, 33, dtype, ALL, causal=True, softcap=3.0, bias=empty(*bias_shape, dtype=dtype),
        mask=empty(300, 500, dtype="bool"), alibi_slopes=empty(2, dtype="float32"), seqlens_k=empty(1, dtype="int32"),
        q_offset=empty(1, dtype="int32"), dlse=empty(1, 2, 300, dtype="float32"),
    )  # fmt: skip


SUMMED = [configs_of("v2", everything(shape), HOPPER)[3] for shape in ((1, 500), ())]  # of dbias, with split sums
# Every kernel, plain and with everything; rows in registers as long as they go, and longer ones in local memory.
BACKWARD = [
    *configs_of("v2", backward_problem(), HOPPER),
    *configs_of("v2", backward_problem(128, dtype="float16"), HOPPER)[1:],
    *configs_of("v2", backward_problem(64, dtype="float64"), HOPPER)[1:],
    *configs_of("v2", everything((300, 500)), HOPPER),
    *[dataclasses.replace(config, split=False) for config in SUMMED],
    *configs_of("v2", backward_problem(576), HOPPER)[1:],
    *SUMMED,
    configs_of("v2", everything(()), HOPPER)[-1],  # dbias_sum
]


def local_bytes(config):
    """A row of sums is kept in registers, as far as they go; a longer one lies in local memory, and nothing else."""
    row = dict(v2="v_row", v2_dkdv="row", v2_dq="k_row").get(config.kernel)
    size = getattr(config, row) * (8 if config.compute_dtype == "float64" else 4) if row else 0
    return size if size > 512 else 0
