"""LLVM's vectors as Numba types, and the steps of the CPU kernel that are made of them."""
