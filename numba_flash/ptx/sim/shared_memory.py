"""A block's shared memory by address, and what is on its way to it or reads it.

For every 4 bytes: whether a copy is under way to them, whether an instruction that runs on its own still
reads them, who wrote them last and who has read them since, and whether the writer has fenced them for the
asynchronous proxy. An access that would be luck on a GPU raises.

Whether any of an array is true is asked of its bytes (registers.some). Where a word or four are all there is, bytes of
Python's are faster again. So some arrays are there as both.
"""

import sys

import numpy as np

try:
    from numba.cuda import types
    from numba.cuda.np import numpy_support
except ImportError:  # without numba-cuda
    from numba import types
    from numba.np import numpy_support

from .errors import InstructionError
from .indexed import SMALLEST, Indexed
from .order import NEVER, NOBODY, NONE_YET
from .registers import some

BASE = 1024  # where dynamic shared memory begins: aligned for everything, and no small number is an address
STATIC_BYTES = 48 * 1024  # room behind it for cuda.shared.array of a fixed size
ALL = ["all words"]  # in place of a list of words
GARBAGE = 0xFF  # its bytes at first: NaN in every float, so that nobody takes it for zeros


class SharedMemory:
    """A block's shared memory. A kernel gets it as `cuda.shared`, by way of turns.SharedOfBlock."""

    def __init__(self, dynamic_bytes, order, first_thread):
        self._dynamic_bytes = dynamic_bytes
        self.order = order
        self._first_thread = first_thread  # the block's, in the cluster
        self._static = -(-(BASE + dynamic_bytes) // BASE) * BASE
        self._next_static = self._static
        self._arrays = {}
        self._dynamic_end = BASE + dynamic_bytes
        self._places = [(BASE, self._dynamic_end)]  # of dynamic shared memory, then of each array: begin, end
        size = self._static + STATIC_BYTES
        self._bytes = bytearray([GARBAGE]) * size
        self.data = np.frombuffer(self._bytes, np.uint8)
        self._begin = self.data.ctypes.data
        self.bits, self.doubles = self.data.view(np.uint32), self.data.view(np.float64)
        self.lines = self.data.reshape(-1, 16)  # the units that a swizzle moves
        words = size // 4
        self._copying, self._reading, self._read_since = bytearray(words), bytearray(words), bytearray(words)
        self.copying = np.frombuffer(self._copying, bool)
        self.reading = np.frombuffer(self._reading, np.uint8)
        self.writer = np.full(words, NOBODY, np.int16)
        self.written = np.zeros(words, np.int32)  # in which epoch of the writer
        self.fenced = np.zeros(words, np.int32)  # in which of its epochs it fenced, or NEVER
        # For each warp its last read since, a number in _reads, or 0; earlier ones of other lanes are forgotten.
        self.readers = np.zeros((-(-order.threads // 32), words), np.int32)
        self._was_read = np.frombuffer(self._read_since, bool)  # whether there is one
        self._writer, self._written, self._fenced = (memoryview(x) for x in (self.writer, self.written, self.fenced))
        self._known = order.numbers
        self._readers = [memoryview(row) for row in self.readers]
        self._reads = [None]  # (a thread, its epoch), or (slice of threads, their epochs when they read together)
        self._latest = {}  # first thread of a warp: (the epochs of all, the number of that in _reads)

    def array(self, shape, dtype, alignment=None):
        """cuda.shared.array: dynamic shared memory for shape 0, else an array for this line of the kernel."""
        dtype = numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else np.dtype(dtype)
        if shape == 0:
            count = self._dynamic_bytes // dtype.itemsize
            return self._checked(self.data[BASE : BASE + count * dtype.itemsize].view(dtype))
        caller = sys._getframe(2)  # behind turns.SharedOfBlock
        key = caller.f_code, caller.f_lineno
        if key not in self._arrays:
            size = int(np.prod(shape)) * dtype.itemsize
            begin = self._next_static
            if begin + size > len(self.data):
                raise InstructionError(f"arrays of {STATIC_BYTES} bytes is all that cuda.shared.array can give")
            self._next_static = -(-(begin + size) // BASE) * BASE
            self._places.append((begin, begin + size))
            self._arrays[key] = self._checked(self.data[begin : begin + size].view(dtype).reshape(shape))
        return self._arrays[key]

    def _checked(self, array):
        return Indexed(self, array) if array.dtype.itemsize >= SMALLEST else array

    def address(self, array):
        at = array.ctypes.data - self._begin
        if not BASE <= at <= len(self.data):
            raise InstructionError("shared.address of an array that is not the block's shared memory")
        return at

    # Which words an access touches.

    def words(self, address, count, alignment):
        """The slice of `count` bytes, checked for bounds and alignment."""
        last = address + count
        if not (BASE <= address and last <= self._dynamic_end) and not self._in_an_array(address, last):
            places = ", ".join(f"{begin:#x} to {end:#x}" for begin, end in self._places if end > begin)
            raise InstructionError(f"{count} bytes at shared address {address:#x}, but shared memory is {places}")
        if address % alignment:
            raise InstructionError(f"shared address {address:#x} is no multiple of {alignment}")
        return slice(address >> 2, (last + 3) >> 2)

    def _in_an_array(self, begin, end):
        """Whether these bytes belong to one array of cuda.shared.array."""
        return any(first <= begin and end <= last for first, last in self._places)

    # Accesses. words: a slice or an array of numbers.

    def read(self, words, threads, asynchronous=False):
        """These threads together may read these words now, or an error says why not.

        threads: a number or a slice of them. asynchronous: through the asynchronous proxy (wgmma, a TMA store).
        """
        if some(self.copying[words]):
            raise InstructionError(
                f"{self._first(words, self.copying[words])} is read before it arrived: wait for the copy"
            )
        alone = isinstance(threads, int)
        known = self.order.known[threads] if alone else self.order.known_to(threads)
        writer = self.writer[words]
        since = (self.fenced if asynchronous else self.written)[words]
        late = known[writer] < since
        if some(late):
            where, by = self._first(words, late), self._by(writer[late].flat[0])
            if asynchronous and (since[late] == NEVER).any():
                raise InstructionError(
                    f"{where}, written by {by}, is read by the asynchronous proxy: fence.proxy_async is missing"
                )
            raise InstructionError(f"{where}, written by {by}, is read with no barrier in between")
        if not asynchronous:  # those have an end that is waited for
            warp = (threads if alone else threads.start) // 32
            self.readers[warp, words] = self._reads_of(threads) if alone else self._read_by(threads)
            self._was_read[words] = True

    def read_few(self, words, thread):
        """`read` of a word or four by one thread: most reads there are, and NumPy is slow with so little."""
        known, readers, number = self._known, self._readers[thread // 32], self.order.reads_as[thread]
        if number == NONE_YET:
            number = self._reads_of(thread)
        for word in range(words.start, words.stop):
            if readers[word] != number:  # equal: it has read it, and nobody has written since
                if self._copying[word] or known[thread, self._writer[word]] < self._written[word]:
                    self.read(words, thread)  # raises the error
                readers[word] = number
                self._read_since[word] = 1

    def read_word(self, word, thread):
        """`read` of one word by a thread's index, which simulated kernels do most of all."""
        number = thread.number
        if self._copying[word] or thread.known[self._writer[word]] < self._written[word]:
            self.read(slice(word, word + 1), number)  # raises the error
        reads = self.order.reads_as[number]
        thread.reads[word] = reads if reads != NONE_YET else self._reads_of(number)
        self._read_since[word] = 1

    def _reads_of(self, thread):
        """The number in _reads of all that a thread reads by itself in its epoch."""
        number = self.order.reads_as[thread]
        if number == NONE_YET:
            number = self.order.reads_as[thread] = len(self._reads)
            self._reads.append((thread, self._known[thread, thread]))
        return number

    def readers_of(self, thread):
        """For each word, the number of its latest read by the thread's warp."""
        return self._readers[thread // 32]

    def _read_by(self, threads):
        epochs = self.order.own[threads]
        seen = epochs.tobytes()
        before, number = self._latest.get(threads.start, (None, 0))
        if before != seen:
            number = len(self._reads)
            self._reads.append((threads, epochs.copy()))
            self._latest[threads.start] = seen, number
        return number

    def store(self, address, values, thread):
        """A thread's store of bytes, at a multiple of their number."""
        count = len(values)
        words = self.words(address, count, count)
        if self._bytes[address : address + count] != values or not self._stored_by_others(words, thread.number):
            self.write(words, thread)
            self._bytes[address : address + count] = values

    def store_by_index(self, words, values, thread):
        """A thread's store by index. After another's, with no barrier in between, it must store the same."""
        number, at = thread.number, 4 * words.start
        end = at + len(values)
        for word in words:
            writer = self._writer[word]
            if self._known[number, writer] < self._written[word]:
                if self._bytes[at:end] == values:
                    return self.store(at, values, thread)
                where, by = f"shared address {4 * word:#x}", self._by(writer)
                raise InstructionError(f"{where}, written by {by}, is written over with no barrier in between")
        self.write(slice(words.start, words.stop), thread)
        self._bytes[at:end] = values
        return None

    def add_to(self, words, thread):
        """A thread's atomic operation. After another's, that other's stays the one that a reader must know of."""
        if some(self._late(words, thread.number)):
            self._free(words, thread.number)
        else:
            self.write(words, thread)

    def _late(self, words, thread):
        """Which of the words have a last write of which the thread has not heard."""
        return self.order.known[thread, self.writer[words]] < self.written[words]

    def _stored_by_others(self, words, thread):
        """Whether others stored these words meanwhile: doing the same beside them is harmless.

        Two warpgroups may each set the same rows to zero, fence, and go on with a barrier of their own.
        """
        if some(self.copying[words]):
            return False
        writers, epochs = self.writer[words], self.written[words]
        unseen = self.order.known[thread, writers] < epochs
        if some(unseen):
            np.maximum.at(self.order.known[thread], writers[unseen], epochs[unseen])
        return bool(some(unseen) or np.count_nonzero(self.reading[words]))

    def write(self, words, thread):
        """A thread writes these words with ordinary stores."""
        number = thread.number
        now = self._known[number, number]
        few = range(words.start, words.stop) if isinstance(words, slice) else words.ravel().tolist()
        if len(few) > 4:
            self._free(words, number)
            self.writer[words], self.written[words], self.fenced[words] = number, now, NEVER
        else:
            for word in few:
                if self._copying[word] or self._reading[word] or self._read_since[word]:
                    self._free(words, number)
                self._writer[word], self._written[word], self._fenced[word] = number, now, NEVER
        if thread.unfenced is not ALL:
            thread.unfenced.extend(few)
            if len(thread.unfenced) > 4096:  # who never fences
                thread.unfenced = ALL

    def start_copy(self, words, thread):
        """A copy to these words is under way, from a thread's instruction."""
        self._free(words, thread.number)
        self.copying[words] = True

    def copied(self, words, writer, epoch):
        """A transfer of TMA has arrived: known to the asynchronous proxy, and to threads by its mbarrier."""
        self.copying[words] = False
        self.writer[words] = writer
        self.written[words] = self.fenced[words] = epoch

    def fence(self, thread):
        """Orders a thread's earlier writes before accesses of the asynchronous proxy."""
        if not thread.unfenced:
            return
        words = np.arange(len(self.writer)) if thread.unfenced is ALL else np.array(thread.unfenced)
        mine = words[(self.writer[words] == thread.number) & (self.fenced[words] == NEVER)]
        self.fenced[mine] = self.order.now(thread.number)
        thread.unfenced = []

    def _free(self, words, thread):
        """This thread may have these words written over, or an error says who still needs them."""
        if isinstance(words, slice):
            first, last = words.start, words.stop
            if last - first <= 4:
                for word in range(first, last):
                    if not self._is_free(word, thread):
                        break
                else:
                    return
            copying, reading = (
                self._copying.find(1, first, last) >= 0,
                self._reading.count(0, first, last) < last - first,
            )
            was_read = self._read_since.find(1, first, last) >= 0
        else:
            copying, reading, was_read = (
                np.count_nonzero(x[words]) for x in (self.copying, self.reading, self._was_read)
            )
        if copying:
            raise InstructionError(
                f"{self._first(words, self.copying[words])} is written while a copy to it is under way"
            )
        if reading:
            where = self._first(words, self.reading[words] > 0)
            raise InstructionError(f"{where} is written while wgmma or a TMA store still reads it: wait for its group")
        if not was_read:
            return
        numbers = self.readers[:, words]
        known = self.order.known[thread]
        for number in set(numbers.ravel().tolist()) - {0}:
            readers, epochs = self._reads[number]
            # Lanes that read together were all done when the first of them came to a barrier.
            alone = isinstance(epochs, int)
            seen = self._known[thread, readers] >= epochs if alone else some(known[readers] >= epochs)
            if not seen:
                first = (readers if alone else readers.start) - self._first_thread
                who = f"thread {first}" if alone else f"warp {first // 32}"
                where = self._first(words, (numbers == number).any(axis=0))
                raise InstructionError(f"{where}, read by {who}, is written over with no barrier in between")
        self.readers[:, words] = 0
        self._was_read[words] = False

    def _is_free(self, word, thread):
        """Whether this thread may have a word written over; then those who have read it are forgotten."""
        if self._copying[word] or self._reading[word]:
            return False
        if self._read_since[word]:
            for readers in self._readers:
                if readers[word]:
                    by, epochs = self._reads[readers[word]]
                    if epochs.__class__ is not int or self._known[thread, by] < epochs:
                        return False
            for readers in self._readers:
                readers[word] = 0
            self._read_since[word] = 0
        return True

    def _first(self, words, which):
        """The first of the words in question, as an address."""
        numbers = np.arange(len(self.copying))[words]
        return f"shared address {4 * int(numbers[which].flat[0]):#x}"

    def _by(self, writer):
        return f"thread {writer - self._first_thread}" if writer < self.order.threads else "TMA"
