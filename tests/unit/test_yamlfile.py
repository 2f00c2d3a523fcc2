from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from workflow import yamlfile
from workflow.contract import InputError

PATH = Path("some.yaml")

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.characters(codec="ascii"), max_size=8))
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc~1", max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def said(text: bytes) -> str:
    with pytest.raises(InputError) as caught:
        yamlfile.parse(text, PATH)
    return str(caught.value)


@given(DATA)
def test_data_reads_as_a_plain_loader_reads_it_eagerly_and_lazily(data):
    text = yaml.safe_dump(data).encode()
    assert yamlfile.parse(text, PATH) == yaml.safe_load(text) == data
    lazy = yamlfile.parse_lazily(text, PATH)
    if isinstance(lazy, yamlfile.Sections):
        lazy = dict(lazy)
    elif isinstance(lazy, yamlfile.Items):
        lazy = list(lazy)
    assert lazy == data


def test_equal_texts_keep_their_type_and_quoted_ones_are_strings():
    text = b"[1x, 1, 1x, '1', 1, yes, 'yes', y, ~, '~', 1.5, '1.5', 1_000]"
    assert yamlfile.parse(text, PATH) == ["1x", 1, "1x", "1", 1, True, "yes", "y", None, "~", 1.5, "1.5", 1000]


def test_every_key_and_item_knows_its_line():
    data = yamlfile.parse(b"a:\n- x\n- y: 1\n  z: 2\nb: 3\n", PATH)
    assert yamlfile.line_of(data, ("a", 1, "z")) == 4
    assert yamlfile.line_of(data, ("a", 1, "nowhere")) == 3
    lazy = yamlfile.parse_lazily(b"a:\n- x\n- y: 1\n  z: 2\nb: 3\n", PATH)
    assert lazy.lines == {"a": 1, "b": 5}
    assert yamlfile.line_of(lazy, ("a", 1, "z")) == 4


def test_a_lazy_file_builds_only_what_is_asked_for():
    lazy = yamlfile.parse_lazily(b"good: 1\nbad: 2026-02-31\n", PATH)
    assert lazy["good"] == 1
    with pytest.raises(InputError, match=r"some\.yaml: not YAML: day is out of range"):
        lazy["bad"]


def test_a_merge_key_may_be_overridden_and_is_no_duplicate():
    text = b"base: &base {tp: 8, ep: 1}\nline: {<<: *base, ep: 8}\n"
    assert yamlfile.parse(text, PATH)["line"] == {"tp": 8, "ep": 8}
    assert yamlfile.parse_lazily(text, PATH)["line"] == {"tp": 8, "ep": 8}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (b"a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a' again; first on line 1; keep one of the two"),
        (b"x:\n- {a: 1, a: 2}\n", 2, "duplicate key 'a'"),
        (b"a:\n\tb: 1\n", 2, "the line holds a tab: indent with spaces"),
        (b"a: 1\nb: x\0y\n", 2, "NUL byte; remove it"),
        (b"a: 1\nb: [1\nc: 2\n", 3, "not YAML"),
        (b"a: *missing\n", 1, "undefined alias"),
        (b"--- 1\n--- 2\n", 2, "another document"),
    ],
)
def test_X7_a_bad_file_is_one_message_with_its_line(text, line, words):
    message = said(text)
    assert message.startswith(f"some.yaml:{line}: ")
    assert words in message
    with pytest.raises(InputError, match=message[:12]):
        yamlfile.parse_lazily(text, PATH)


@pytest.mark.parametrize(
    "text", [b"a: 1\r\nb: [2]\r\n", b"a: 1\nb: [2]", b"a: 1\nb: [2]\n", b"\xef\xbb\xbfa: 1\nb: [2]\n"]
)
def test_X7_line_ends_and_a_missing_final_newline_are_tolerated(text):
    assert yamlfile.parse(text, PATH) == {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    "text", [b"a: \xc3\x28\n", b"a: 2026-02-31\n", b"? {a: 1}\n: 2\n", b"a: &x\n  b: *x\n", b"a: !!python/x y\n"]
)
def test_nothing_but_an_input_error_leaves_the_parser(text):
    assert "some.yaml" in said(text)


def test_missing_files_and_folders_are_said(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "none" / "x.yaml"):
        with pytest.raises(InputError, match="no such file"):
            yamlfile.load(path)


def test_the_collector_runs_again_after_a_bad_file():
    import gc  # noqa: PLC0415 - state of this test only

    assert gc.isenabled()
    said(b"a: [")
    assert gc.isenabled()
