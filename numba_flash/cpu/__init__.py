"""The CPU kernel: LLVM vectors on all cores."""
