"""A pattern of many names matches these names and no other."""

import re

from hypothesis import given
from hypothesis import strategies as st

from workflow.patterns import prefix_tree_pattern

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
