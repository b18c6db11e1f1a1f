"""The kernels: one file each, behind one `make(config)`. Read v1.py, then v2.py."""
