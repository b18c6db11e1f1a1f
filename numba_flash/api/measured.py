"""Measured speeds. scripts/results_to_docs writes this file from scripts/results; never edit it by hand."""

GPU = "H200"
MULTIPROCESSORS = 132  # multiprocessors of that GPU
# {kernel: {head_dim: TFLOP/s}}, wgmma and mma in 16 bits, v1 and v2 in float32
TFLOPS = {
    "wgmma": {64: 481.2, 128: 636.5, 256: 651.3},
    "mma": {64: 287.2, 128: 333.4, 256: 289.8},
    "v1": {16: 4.138, 32: 3.074, 64: 2.301, 128: 2.242, 256: 1.672},
    "v2": {16: 8.47, 32: 13.7, 64: 11.0, 128: 12.89, 256: 6.702},
}
CALL_MICROSECONDS = 13.95  # host time of a call; no launch is quicker
CPU_GFLOPS = 37.09  # speed of the cpu kernel in float32, per thread
