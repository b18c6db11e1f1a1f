"""The kernels: one file each, behind one `make(config)`. Read simt/v1.py, then simt/v2.py."""
