"""About how long a kernel takes in Numba's simulator."""

from ..problem.forward import Problem
from ..select.rungs import RUNGS

# The time for one score, and for each element of its products, {on tensor cores: time}; v2 and mma on one core of a
# busy server, 2026. One thread runs at a time, so only the amount of work counts.
SCORE_SECONDS, PRODUCT_SECONDS = 25e-6, {False: 2.3e-6, True: 0.8e-6}


def simulated_seconds(problem: Problem, kernel: str = "v2") -> float:
    """The time if all scores are seen; causal may halve it."""
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    of_product = PRODUCT_SECONDS[RUNGS[kernel].tensor_cores]
    return scores * (SCORE_SECONDS + of_product * (problem.head_dim + problem.head_dim_v))
