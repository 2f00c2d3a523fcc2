"""A table that grows by rows, lies in a temporary file, and is read by columns.

The kernel keeps such a file in its cache while there is room and on disk where there is none. A process needs memory
for the columns that it looks at, while it looks at them.
"""

import contextlib
import errno
import os
import struct
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.contract import InputError

Column = npt.NDArray[Any]

CODES: Mapping[str, str] = {"i4": "i", "i8": "q", "f8": "d"}
"""Type of a column as numpy names it -> as `struct` does."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

BLOCK_ROWS = 1 << 14
"""Rows that are held until they are written as one block: its first column, then its second, and so on."""

PART_ROWS = 1 << 16
"""Rows that are looked at together where a step needs several columns."""


class Scratch:
    """A file without a name, where temporary files go. It is closed when the last table in it is gone."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - no block is as long as the tables live
        weakref.finalize(self, self._file.close)

    def write(self, data: Iterable[bytes], offset: int | None = None) -> int:
        """Write pieces one behind the other, at the end or at an offset; return where they begin.

        Raises InputError: no room for them.
        """
        begin = self._file.seek(0, os.SEEK_END) if offset is None else self._file.seek(offset)
        try:
            for piece in data:
                self._file.write(piece)
            self._file.flush()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # What it still holds has no room either when it is closed.
            with contextlib.suppress(OSError):
                self._file.close()
            raise InputError(
                f"a temporary file has no room: {error.strerror}",
                file=tempfile.gettempdir(),
                do="try again where there is more room for temporary files",
            ) from None
        return begin

    def read(self, offset: int, into: Column) -> None:
        """Fill an array from an offset; raises InputError: the file ends before."""
        self._file.seek(offset)
        found = self._file.readinto(into.data)
        if found != into.nbytes:
            raise InputError(
                f"a temporary file was cut off: {found} bytes at {offset}, {into.nbytes} were written",
                file=tempfile.gettempdir(),
                do="try again where nothing else changes temporary files",
            )


class Columns:
    """Rows of numbers in a file, which several tables may share."""

    def __init__(self, types: Mapping[str, str], scratch: Scratch) -> None:
        """Begin without a row; `types` is name -> key of CODES, in the order of a row."""
        self._row = np.dtype(list(types.items()))
        self._pack = struct.Struct("=" + "".join(CODES[kind] for kind in types.values())).pack
        self._scratch = scratch
        self._held = bytearray()
        self._held_bytes = BLOCK_ROWS * self._row.itemsize
        self._blocks: list[tuple[Scratch, int, int]] = []

    def __len__(self) -> int:
        return sum(rows for _, _, rows in self._blocks)

    def __getitem__(self, name: str) -> Column:
        """Read a column, which raises what `read` raises; what becomes of the array does not change the table."""
        return self.read(name, 0, len(self))

    def add(self, *row: float) -> None:
        """Add a row; it can be read after a flush.

        Raises struct.error, and adds nothing: too large for its column; InputError: no room for temporary files.
        """
        self._held += self._pack(*row)
        if len(self._held) >= self._held_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are held; raises InputError: no room for them."""
        rows = np.frombuffer(self._held, self._row)
        if rows.size:
            offset = self._scratch.write(rows[name].tobytes() for name in self._row.fields or ())
            self._blocks.append((self._scratch, offset, rows.size))
            self._held = bytearray()

    def written(self) -> list[tuple[int, int]]:
        """Return (offset, rows) of the blocks in the table's own file: what `find` needs in another process."""
        return [(offset, rows) for _, offset, rows in self._blocks]

    def find(self, written: Sequence[tuple[int, int]]) -> None:
        """Take over blocks that another process wrote into the same file."""
        self._blocks += [(self._scratch, offset, rows) for offset, rows in written]

    def append(self, other: "Columns") -> None:
        """Put the rows of a table with the same columns behind those of this one; they stay in their file."""
        self._blocks += other._blocks

    def recode(self, name: str, codes: npt.NDArray[np.int32]) -> None:
        """Write `codes[number]` in place of each number of a column; raises InputError: no room for them."""
        at = 0
        for scratch, offset, rows in self._blocks:
            changed = codes[self.read(name, at, at + rows)]
            scratch.write([changed.tobytes()], offset + rows * self._place(name))
            at += rows

    def read(self, name: str, start: int, stop: int) -> Column:
        """Read rows [start, stop) of a column; raises InputError: the temporary file was cut off."""
        found = np.empty(stop - start, self._row[name])
        at = 0
        for scratch, offset, rows in self._blocks:
            first, last = max(start, at), min(stop, at + rows)
            if first < last:
                place = offset + rows * self._place(name) + (first - at) * found.itemsize
                scratch.read(place, found[first - start : last - start])
            at += rows
        return found

    def _place(self, name: str) -> int:
        """Return the bytes of the columns in front of this one, a row."""
        fields = self._row.fields
        assert fields is not None
        return int(fields[name][1])

    def parts(self, *names: str) -> Iterator[tuple[Column, ...]]:
        """Read columns side by side, PART_ROWS rows at a time."""
        for start in range(0, len(self), PART_ROWS):
            stop = min(start + PART_ROWS, len(self))
            yield tuple(self.read(name, start, stop) for name in names)
