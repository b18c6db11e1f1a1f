"""Signatures of other libraries, with their layouts, defaults and alignments, computed by `numba_flash.attention`.

    from numba_flash.compat.flash_attn import flash_attn_func
    from numba_flash.compat.torch import scaled_dot_product_attention

What cannot be computed raises NotImplementedError and names the argument.
"""
