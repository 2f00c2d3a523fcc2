"""A table in a file reads as it was written, however it was cut into blocks, parts and files."""

import struct
import tempfile
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow.contract import InputError
from workflow.readers import columns as module
from workflow.readers.columns import Columns, Scratch

TYPES = {"at": "i8", "code": "i4", "value": "f8"}
rows = st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(0, 4), st.floats(allow_nan=False)), max_size=20)


def filled(wanted, scratch=None):
    made = Columns(TYPES, scratch or Scratch())
    for row in wanted:
        made.add(*row)
    made.flush()
    return made


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_rows_come_back_by_columns(tables, block, part, one_file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ROWS", block)
        patch.setattr(module, "PART_ROWS", part)
        shared = Scratch() if one_file else None
        joined, *others = (filled(wanted, shared) for wanted in tables)
        for other in others:
            joined.append(other)
        everything = [row for wanted in tables for row in wanted]
        assert len(joined) == len(everything)
        for place, name in enumerate(TYPES):
            assert joined[name].tolist() == [row[place] for row in everything]
        parts = list(joined.parts("value", "at"))
        assert [(value, at) for pair in parts for value, at in zip(*pair, strict=True)] == [
            (value, at) for at, _, value in everything
        ]
        assert all(0 < len(value) <= part for value, _ in parts)
        joined.recode("code", np.array([4, 3, 2, 1, 0], np.int32))
        assert joined["code"].tolist() == [4 - code for _, code, _ in everything]
        assert joined["at"].tolist() == [at for at, _, _ in everything]


def test_a_number_that_its_column_cannot_hold_adds_no_row():
    made = filled([(1, 2, 3.0)])
    with pytest.raises(struct.error):
        made.add(1, 2**31, 3.0)
    made.flush()
    assert made["code"].tolist() == [2]


def test_a_temporary_file_that_was_cut_off_gives_no_numbers(monkeypatch):
    with tempfile.TemporaryFile() as file:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda: file)
        made = filled([(1, 2, 3.0), (4, 5, 6.0)])
        file.truncate(2 * 8 + 4)
        assert made["at"].tolist() == [1, 4]
        with pytest.raises(InputError, match="a temporary file was cut off: 4 bytes at 16, 8 were written"):
            made["code"]


@pytest.mark.filterwarnings("error")
def test_a_temporary_file_without_room_is_one_message(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "r+b"))
    with pytest.raises(InputError, match="No space left on device; try again where there is more room"):
        filled([(1, 2, 3.0)])


def test_blocks_that_another_process_wrote_are_found_in_the_same_file():
    scratch = Scratch()
    here = Columns(TYPES, scratch)
    here.find(filled([(1, 2, 3.0), (4, 5, 6.0)], scratch).written())
    assert here["value"].tolist() == [3.0, 6.0]
