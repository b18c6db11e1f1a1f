"""GPUs by name, for a machine that is not here: NVIDIA's data sheets and the CUDA Programming Guide."""

from .target import Target

# Opted-in shared memory of one block, KB, by compute capability (CUDA Programming Guide).
SHARED_KB = {
    (7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227,
    (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip

# name: (compute capability, multiprocessors)
GPUS = {
    "V100": ((7, 0), 80), "T4": ((7, 5), 40), "RTX 2080 Ti": ((7, 5), 68),
    "A100": ((8, 0), 108), "A30": ((8, 0), 56),
    "RTX 3090": ((8, 6), 82), "RTX 3080": ((8, 6), 68),
    "A40": ((8, 6), 84), "RTX A6000": ((8, 6), 84), "A10": ((8, 6), 72),
    "RTX 4090": ((8, 9), 128), "RTX 4080": ((8, 9), 76), "L40S": ((8, 9), 142), "L4": ((8, 9), 58),
    "RTX 6000 Ada": ((8, 9), 142),
    "H100": ((9, 0), 132), "H100 PCIe": ((9, 0), 114), "H200": ((9, 0), 132), "GH200": ((9, 0), 132),
    "B200": ((10, 0), 148), "RTX 5090": ((12, 0), 170), "RTX 5080": ((12, 0), 84),
}  # fmt: skip


def gpu(name: str) -> Target:
    """The GPU of this name; upper and lower case, spaces, "-" and NVIDIA's own name before it make no difference."""
    found = {_plain(known): known for known in GPUS}.get(_plain(name))
    if found is None:
        raise ValueError(
            f"GPU {name!r} is not known here; known are {', '.join(GPUS)}. Others: --cc and --multiprocessors"
        )
    cc, multiprocessors = GPUS[found]
    return Target(False, cc=cc, shared_bytes=SHARED_KB[cc] * 1024, multiprocessors=multiprocessors, name=found)


def _plain(name: str) -> str:
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    return letters.removeprefix("nvidia").removeprefix("geforce")
