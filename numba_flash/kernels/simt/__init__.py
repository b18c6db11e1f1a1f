"""The kernels of the two FlashAttention papers, a thread for each query row."""
