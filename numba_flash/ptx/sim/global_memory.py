"""Global memory by address: only the launch's operands can be read and written, at their true host addresses."""

import numpy as np

from .errors import InstructionError

MAPS = 0x4D41_5000_0000  # where the tensor maps seem to lie
MAP_BYTES = 128
NEAR = 1 << 16  # bytes; further away an address has nothing to do with an operand


class GlobalMemory:
    """operands: Pointers or None; tensor_maps: (operand's number, TensorMap) in the kernel's order; behind: as of
    launch.run."""

    def __init__(self, operands, tensor_maps=(), behind=False):
        self.operands, self.behind = operands, behind
        self._extents = []
        for pointer in operands:
            if pointer is not None:
                begin, data = pointer.bytes()
                self._extents.append((begin, begin + data.size, data, pointer))
        self.tensors = [
            (tensor_map, self._tensor(operands[i], tensor_map), operands[i]) for i, tensor_map in tensor_maps
        ]

    def bytes_at(self, address, count, alignment, writing=False, atomic=False):
        """A view of `count` bytes, checked for bounds, alignment and being written."""
        address = int(address)
        if address % alignment:
            raise InstructionError(f"global address {address:#x} is no multiple of {alignment}")
        for begin, end, data, pointer in self._extents:
            if begin <= address and address + count <= end and (data.flags.writeable or not writing):
                if writing and not atomic:
                    item = pointer.array.itemsize
                    pointer.store((address - begin) // item, max(count // item, 1))
                elif writing:
                    pointer.mark_written()
                elif pointer.unfinished:
                    pointer.check_waited("is read")
                return data[address - begin : address - begin + count]
        raise InstructionError(f"{count} bytes at global address {address:#x} {self._why_not(address, count)}")

    def tensor(self, address):
        """(TensorMap, array in C order, Pointer) of a tensor map's address."""
        number, rest = divmod(int(address) - MAPS, MAP_BYTES)
        if rest or not 0 <= number < len(self.tensors):
            first = f"{len(self.tensors)} maps lie at tma.parameter(...)() and each {MAP_BYTES} bytes further"
            raise InstructionError(f"there is no tensor map at address {int(address):#x}: {first}")
        return self.tensors[number]

    def _why_not(self, address, count):
        nearest = None
        for number, pointer in enumerate(self.operands):
            if pointer is None:
                continue
            begin, data = pointer.bytes()
            what = f"operand {number}, {pointer.array.dtype} {pointer.array.shape}"
            if begin <= address and address + count <= begin + data.size:
                return f"lie in {what}, which is read-only"
            behind = address - begin
            distance = -behind if behind < 0 else behind - data.size
            where = f"{-behind} bytes before" if behind < 0 else f"{behind} bytes after"
            where = f"; they begin {where} the beginning of {what} ({data.size} bytes)"
            nearest = min(nearest or (NEAR, ""), (distance, where))
        return f"lie outside of every operand{nearest[1] if nearest else ''}"

    def _tensor(self, pointer, tensor_map):
        """The tensor that a map describes, as an array whose last dimension is the map's first."""
        shape, strides = tensor_map.shape, (2, *tensor_map.strides_bytes)
        if not pointer.array.size:
            return None  # a map needs extents, an address too: no box of it may be moved
        strides = [stride if extent > 1 else 2 for extent, stride in zip(shape, strides, strict=True)]
        begin, data = pointer.bytes()
        first = pointer.address(0) - begin
        last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 2
        if last > data.size:
            raise InstructionError(
                f"{tensor_map} reaches {last - data.size} bytes past its operand of shape {pointer.array.shape}"
            )
        if pointer.address(0) % 16:
            raise InstructionError(f"the tensor of {tensor_map} begins at {pointer.address(0):#x}, no multiple of 16")
        if tensor_map.swizzle_bytes not in (0, 2 * tensor_map.box[0]):
            raise InstructionError(f"rows of the box shorter than the swizzle are not simulated: {tensor_map}")
        return np.ndarray(shape[::-1], np.uint16, data, first, strides[::-1])
