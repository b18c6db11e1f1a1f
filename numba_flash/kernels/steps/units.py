"""The units of scores.

In natural units the weight of a score is e^score. In log2 it is 2^score: the hardware's exponential is a power of 2, so
fragments hold scores times log2(e). Values in log2 are named *_log2; lse in global memory is in natural units.
"""

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def exponent_unit(config):
    """The unit of scores in fragments, "the scores' unit" elsewhere: log2(e), or 1.

    With a bias the unit is natural: the bias may be as large as float32 allows, so that log2(e) times it would
    overflow, or so large that rounding log2(e) times it would matter.
    """
    return 1.0 if config.has("bias") else LOG2_E
