"""A pattern of many names matches these names and no other."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.patterns import prefix_tree_pattern, telling_prefixes

NAMES = st.lists(st.text("ab-.1", min_size=1, max_size=6), min_size=1, max_size=30)


@given(NAMES, st.text("ab-.1", max_size=7))
def test_exactly_the_names_match(names, other):
    pattern = re.compile(prefix_tree_pattern(names))
    assert all(pattern.fullmatch(name) for name in names)
    assert bool(pattern.fullmatch(other)) == (other in names)


def test_common_prefixes_are_written_once():
    assert prefix_tree_pattern(["tiny-c4", "tiny-c16", "tiny-c1"]) == "tiny\\-c(?:1(?:6|)|4)"


def test_no_name_gives_no_pattern():
    assert prefix_tree_pattern([]) == ""


HASHES = st.sets(st.text("0123456789abcdef", min_size=4, max_size=4), max_size=40)


@given(HASHES, HASHES)
def test_prefixes_tell_wanted_names_from_all_others(wanted, others):
    found = telling_prefixes(wanted, others - wanted)
    assert all(name.startswith(tuple(found)) for name in wanted)
    assert not any(name.startswith(tuple(found)) for name in others - wanted)
    assert len(found) <= len(wanted)


def test_names_without_others_need_no_prefix():
    assert telling_prefixes(["0a", "ff"], []) == [""]
    assert telling_prefixes(["0a", "0b", "ff"], ["01"]) == ["0a", "0b", "f"]


def test_a_name_that_another_one_begins_with_is_refused():
    with pytest.raises(ValueError, match="begins with"):
        telling_prefixes(["a"], ["ab"])
