"""Device functions that two or more kernels use unchanged."""
