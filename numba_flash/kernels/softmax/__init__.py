"""One kernel for each way to compute a softmax: safe, online, in blocks."""
