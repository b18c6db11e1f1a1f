"""Which part of the GPU compiler is missing: the tests that compile need it, and no GPU."""

import importlib.util

import pytest


def missing():
    """What is not installed, or None."""
    for package in ("numba_cuda", "cuda.core"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            return package
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        for library in ("nvvm", "nvJitLink"):
            load_nvidia_dynamic_lib(library)
    except Exception as error:
        return str(error).splitlines()[0]
    return None


needed = pytest.mark.skipif(missing() is not None, reason="needs NVVM and nvJitLink: pip install 'numba-flash[cu13]'")
