import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.changelog import (
    Change,
    Entry,
    LoggedEntry,
    changes,
    changes_of_texts,
    load_changelog,
    parse_changelog,
    select,
    select_entries,
)
from workflow.config import ChangelogSelection
from workflow.contract import InputError

LOG = Path("perf-changelog.yaml")


def item(key: str, pull: int, description: str = "Measure.", more: str = "") -> str:
    link = f"https://example.org/team/sweeps/pull/{pull}"
    return f"- config-keys:\n  - {key}\n  description:\n  - {description}\n  pr-link: {link}\n{more}"


OLD = "\n".join([item("a", 1), item("b", 2), item("c", 3)])


def told(base: str, head: str) -> list[tuple[str, str]]:
    found = changes_of_texts((Path("old.yaml"), base.encode()), (LOG, head.encode()))
    return [(change.kind, (change.new or change.old).entry.config_keys[0]) for change in found]


def logged(index: int, key: str, pull: int) -> LoggedEntry:
    data = {"config-keys": (key,), "description": ("x",), "pr-link": f"https://example.org/t/s/pull/{pull}"}
    return LoggedEntry(index, index + 1, LOG, Entry.model_validate(data))


# ------------------------------------------------------------------------------------------------------------ events
def test_an_appended_entry_is_the_change_and_keeps_its_place():
    (change,) = changes_of_texts((Path("old.yaml"), OLD.encode()), (LOG, (OLD + "\n" + item("d", 4)).encode()))
    assert (change.kind, change.new.index, change.new.line) == ("added", 3, 19)
    assert change.new.entry == parse_changelog((OLD + "\n" + item("d", 4)).encode(), LOG)[3].entry
    assert (change.new.link_line, change.new.description_lines) == (23, (22,))


def test_X1_blank_lines_quoting_and_comments_are_no_changes():
    pretty = "# a comment\n" + OLD.replace("\n- config", "\n\n\n- config").replace("- Measure.", "- 'Measure.'")
    assert told(OLD, pretty) == []
    assert told(pretty, OLD) == []
    assert told(OLD, pretty + "\n" + item("d", 4)) == [("added", "d")]


def test_X1_an_edited_entry_says_what_it_was_and_plans_nothing():
    (change,) = changes(
        parse_changelog(OLD.encode(), LOG), parse_changelog(OLD.replace("pull/2", "pull/22").encode(), LOG)
    )
    assert change.kind == "edited"
    assert "pull/2' and is 'https://example.org/team/sweeps/pull/22'" in change.message
    assert "an edit plans nothing, plan it with --config changelog.entries=1" in change.message


def test_lines_added_to_the_last_entry_are_an_edit_although_only_lines_were_added():
    assert told(OLD, OLD + "  evals-only: true\n") == [("edited", "c")]


def test_X2_a_withdrawn_entry_is_an_event_and_no_crash():
    without = "\n".join([item("a", 1), item("c", 3)])
    (change,) = changes_of_texts((Path("old.yaml"), OLD.encode()), (LOG, without.encode()))
    assert change.kind == "withdrawn"
    assert change.message == (
        "old.yaml:7 (entry 1, https://example.org/team/sweeps/pull/2): "
        "withdrawn; its results are kept and it plans nothing"
    )


def test_a_reverted_and_reworked_entry_is_new_work():
    reworked = "\n".join([item("a", 1), item("b", 2), item("c", 9, "Measure it anew.")])
    assert told(OLD, reworked) == [("withdrawn", "c"), ("added", "c")]


def test_a_moved_entry_plans_nothing():
    assert told(OLD, "\n".join([item("b", 2), item("c", 3), item("a", 1)])) == [("moved", "a")]


def test_X5_an_entry_without_a_blank_line_before_it_is_accepted():
    assert told(OLD, OLD + item("d", 4)) == [("added", "d")]


def test_a_new_entry_may_use_an_anchor_of_an_old_one():
    anchored = OLD.replace("config-keys:\n  - c", "config-keys: &keys\n  - c")
    again = item("x", 4).replace("\n  - x", " *keys")
    assert told(anchored, anchored + again) == [("added", "c")]


def test_a_mistake_in_a_new_entry_is_raised_with_its_line():
    with pytest.raises(InputError, match=r"perf-changelog\.yaml:\d+: 3\.pr_link: unknown key"):
        told(OLD, OLD + item("d", 4, more="  pr_link: x\n"))


def test_the_first_entry_of_a_log_is_a_change():
    assert told("", item("a", 1)) == [("added", "a")]


@given(st.lists(st.integers(0, 5), max_size=7), st.lists(st.integers(0, 5), max_size=7))
def test_events_account_for_every_entry_of_both_versions(old, new):
    base = [logged(i, f"k{n}", n + 1) for i, n in enumerate(old)]
    head = [logged(i, f"k{n}", n + 1) for i, n in enumerate(new)]
    found = changes(base, head)
    kinds = [change.kind for change in found]
    assert len(base) + kinds.count("added") - kinds.count("withdrawn") == len(head)
    assert (found == ()) == (old == new)
    assert all((change.old is None) == (change.kind == "added") for change in found)
    assert all((change.new is None) == (change.kind == "withdrawn") for change in found)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=4), st.booleans())
def test_the_short_way_for_appended_entries_agrees_with_the_long_one(old, more, blank):
    base = "".join(item(f"k{n}", n + 1) for n in old)
    head = base + ("\n" if blank else "") + "".join(item(f"k{n}", n + 1) for n in more)
    short = changes_of_texts((LOG, base.encode()), (LOG, head.encode()))
    whole = parse_changelog(head.encode(), LOG)
    assert short == tuple(Change("added", None, entry) for entry in whole[len(old) :])


# --------------------------------------------------------------------------------------------------------- selection
@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ("newest", [3]),
        ("last 2", [2, 3]),
        ("last 99", [0, 1, 2, 3]),
        (0, [0]),
        ("1", [1]),
        (-1, [3]),
        ("#12", [1, 2]),
        ("dsv4-*", [0, 3]),
        ("dsv4-b200", [0, 3]),
        ("kimi-mi355x", [1]),
    ],
)
def test_entries_are_selected_by_hand(wanted, indices):
    log = [logged(0, "dsv4-b200", 1), logged(1, "kimi-*", 12), logged(2, "glm", 12), logged(3, "dsv4-*", 13)]
    assert [entry.index for entry in select_entries(log, ChangelogSelection(entries=wanted))] == indices


@pytest.mark.parametrize("wanted", ["last 0", 4, -5, "#2", "#99", "nothing-*"])
def test_a_selection_of_nothing_says_what_is_allowed(wanted):
    log = [logged(0, "dsv4-b200", 1), logged(1, "kimi-*", 12), logged(2, "glm", 12), logged(3, "dsv4-*", 13)]
    with pytest.raises(InputError, match=r"no entry .* is selected by .*newest, last N, an index from -4 to 3"):
        select_entries(log, ChangelogSelection(entries=wanted))


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q", "-b", "trunk")
    (tmp_path / "log.yaml").write_text(OLD)
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("tag", "before")
    return tmp_path


def since(folder, base):
    return select(folder, ChangelogSelection(file="log.yaml", base=base))


def test_the_entries_since_a_revision_are_selected(checkout):
    (checkout / "log.yaml").write_text(OLD.replace("Measure.", '"Measure."', 1) + "\n" + item("d", 4) + item("e", 5))
    selection = since(checkout, "before")
    assert [entry.entry.config_keys[0] for entry in selection.entries] == ["d", "e"]
    assert selection.messages == ()


def test_a_change_that_only_withdraws_selects_nothing_and_says_so(checkout):
    (checkout / "log.yaml").write_text(item("a", 1) + item("b", 2))
    selection = since(checkout, "HEAD")
    assert selection.entries == ()
    assert [line.split("; ")[-1] for line in selection.messages] == ["its results are kept and it plans nothing"]


def test_no_change_an_unknown_revision_and_no_checkout_are_said(checkout, tmp_path_factory):
    with pytest.raises(InputError, match="no entry changed since before"):
        since(checkout, "before")
    with pytest.raises(InputError, match=r"git knows no revision 'nowhere'.*shallow"):
        since(checkout, "nowhere")
    with pytest.raises(InputError, match="git knows no revision '--output=x'"):
        since(checkout, "--output=x")
    with pytest.raises(InputError, match=r"revision 'before' has no file other\.yaml"):
        select(checkout, ChangelogSelection(file="other.yaml", base="before"))
    bare = tmp_path_factory.mktemp("bare")
    with pytest.raises(InputError, match="no git checkout"):
        since(bare, "HEAD")


# ------------------------------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n", "no list of entries"),
        ("", "no list of entries"),
        ("- config-keys: [a]\n  description: [x]\n", "perf-changelog.yaml:1: 0.pr-link: missing key"),
        (item("a", 1) + "  pr_link: x\n", "did you mean 'pr-link'?"),
        (item("a", 1).replace("  - a\n", ""), "config-keys"),
        (item("a", 1) + "  scenario-type: [agentic]\n", "agentic-coding"),
        (item("a", 1) + "  append-only: true\n  all-evals: true\n", "append-only cannot be combined"),
    ],
)
def test_X7_what_is_no_log_is_said_with_its_place(text, words):
    with pytest.raises(InputError) as caught:
        parse_changelog(text.encode(), LOG)
    assert words in str(caught.value)


def test_the_real_log_is_read_in_order(shared):
    log = load_changelog(shared / "inferencex" / "perf-changelog.yaml")
    assert [entry.index for entry in log] == list(range(len(log)))
    assert [entry.line for entry in log] == sorted({entry.line for entry in log})
    assert len(log) > 700
