"""The dtype in a DLPack capsule: NumPy and cuda.core know no bfloat16 there."""

import ctypes
from typing import Any


class DLDataType(ctypes.Structure):
    """Of dlpack.h."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


INT, BFLOAT = 0, 4  # codes of it


def as_bfloat16(capsule: Any) -> Any:
    """A DLPack capsule of int16 as one of bfloat16."""
    dtype_of(capsule).code = BFLOAT
    return capsule


def dtype_of(capsule: Any) -> DLDataType:
    """The dtype in a DLPack capsule, which may be written: 20 bytes from the beginning of the DLTensor, which is that
    of the capsule or, since version 1.0, 32 bytes behind it."""
    # Prototypes of our own: ctypes.pythonapi's functions are shared by everyone in the process.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer_of = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    name = name_of(capsule)
    tensor = pointer_of(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
    return DLDataType.from_address(tensor + 20)
