"""config.yaml: merged files, overrides, errors that point at their line."""

import pytest

from workflow.config import Config, Limits, load_config
from workflow.contract import InputError


def test_defaults_are_inferencex_ones():
    replay = Config().replay
    assert (replay.duration_s, replay.random_seed) == (3600.0, 42)
    assert (replay.start_ratio_min, replay.start_ratio_max, replay.warmup_grace_s) == (0.25, 0.75, 1800.0)
    assert Limits().error_share == 0.01


def test_an_unknown_key_names_file_line_and_what_was_meant(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("replay:\n  trace_set: x\n  duraton_s: 5\n")
    with pytest.raises(InputError) as caught:
        load_config([path], {})
    message = str(caught.value)
    assert message.startswith(f"{path}:3: replay.duraton_s: unknown key 'duraton_s'")
    assert "did you mean 'duration_s'" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("limits:\n  error_share: 1.5\n", 2, "less than or equal to 1"),
        ("limits:\n  error_share: '0.1'\n", 2, "valid number"),
        ("replay:\n  client: locust\n", 2, "'aiperf'"),
        ("replay:\n  start_ratio_min: 0.9\n", 1, "start_ratio_min must not be above"),
        ("masters: local.yaml\n", 1, "valid array"),
        ("- a\n", 1, "not a mapping"),
    ],
)
def test_a_value_that_is_not_allowed_is_shown_with_its_line(tmp_path, text, line, says):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config([path], {})
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


def test_later_files_and_overrides_win_key_by_key(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("replay: {duration_s: 60, grace_s: 7}\n")
    second.write_text("replay: {duration_s: 30}\n")
    config = load_config([first, second], {"replay": {"random_seed": 7}, "partial": True, "entries": "last 2"})
    assert (config.replay.duration_s, config.replay.grace_s, config.replay.random_seed) == (30.0, 7.0, 7)
    assert config.changelog.entries == "last 2"
    assert config.partial


def test_a_wrong_override_says_that_it_came_from_the_command_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{}\n")
    with pytest.raises(InputError, match=r"^--config: replay\.speed: unknown key 'speed'"):
        load_config([path], {"replay": {"speed": 2}})


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml: no such file"):
        load_config([tmp_path / "none.yaml"], {})


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False), (True, True)])
def test_partial_is_switched_on_as_a_shell_user_writes_it(word, value):
    """`snakemake --config partial=true` hands over the text `true`."""
    assert load_config([], {"partial": word}).partial is value
