"""Stand-ins for `ptx` under Numba's simulator, and how a kernel is launched there.

A file per family, as in ptx, with the same functions. What an instruction computes is a NumPy function over
(lanes, registers); what it does to memory and to other threads goes through block.py (threads take turns),
warp.py (lanes come together), order.py (who may have seen what), shared_memory.py and global_memory.py.
"""
