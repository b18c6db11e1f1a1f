"""Device functions that two or more kernels use unchanged. They import nothing of the other rooms of kernels/."""
