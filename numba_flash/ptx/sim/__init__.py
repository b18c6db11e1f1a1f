"""Stand-ins for `ptx` under Numba's simulator, and how a kernel is launched there.

A file per family, as in ptx, with the same functions. What an instruction computes is a NumPy function over
(lanes, registers); what it does to memory and to other threads goes through scheduler.py (threads take turns),
warp.py (lanes come together), order.py (who may have seen what), shared_memory.py and global_memory.py.

What a GPU would answer with a hang, a wrong number or an illegal access raises errors.InstructionError with the thread
and its line. Not seen: races in global memory, races by index of elements of fewer than 4 bytes, and reads by several
lanes of one warp but the last when one of them is written over too early. Blocks run one after the other, those of a
cluster together.
"""
