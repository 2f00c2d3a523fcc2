import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.arms import planned
from workflow.contract import InputError, Strict
from workflow.serving import CacheFacts, Situation, fill, flags_of, gpu_family, lowered, parse_options, without_flags

FLAG = st.from_regex(r"--[a-z]{2,8}", fullmatch=True)
VALUE = st.from_regex(r"[a-z0-9{][a-z0-9.:{}]{0,6}", fullmatch=True)
WORDS = st.lists(st.tuples(FLAG, st.lists(VALUE, max_size=2)), max_size=8)


def argv_of(words):
    return tuple(word for flag, values in words for word in (flag, *values))


@given(WORDS, FLAG)
def test_a_dropped_flag_takes_its_values_and_nothing_else_with_it(words, flag):
    kept = without_flags(argv_of(words), (flag,))
    assert kept == argv_of([(name, values) for name, values in words if name != flag])


def test_flags_are_read_in_both_spellings_and_negative_numbers_are_values():
    argv = ("vllm", "serve", "--a=1", "--b", "-1", "--c", "--d", "x", "y")
    assert flags_of(argv) == {"": ("vllm", "serve"), "--a": ("1",), "--b": ("-1",), "--c": (), "--d": ("x", "y")}


def test_a_flag_is_lowered_in_both_spellings_and_a_missing_one_is_left_alone():
    derate = {"--m": 0.02, "--absent": 1.0}
    assert lowered(("--m", "0.95", "--n=1", "--m=0.9"), derate) == ("--m", "0.93", "--n=1", "--m=0.88")


def test_a_placeholder_without_a_value_is_named_with_those_that_have_one():
    with pytest.raises(InputError, match=r"<port:router> has no value; allowed: engine"):
        fill("http://127.0.0.1:<port:router>", {"engine": 1}, {})


def test_the_budget_is_decimal_and_the_models_own_host_memory_is_taken_out_of_it():
    row = planned("minimaxm3-h100-vllm", "mooncake").row
    situation = Situation(row=row, cache=CacheFacts(host_reserve_gib=414), options={})
    assert situation.tier_bytes == 1_731_000_000_000 - 414 * 2**30
    assert situation.tier_bytes_per_rank == situation.tier_bytes // 8


@pytest.mark.parametrize(("dp_attn", "engines", "world"), [(False, 1, 8), (True, 8, 1)])
def test_dp_attention_has_a_scheduler_per_rank(dp_attn, engines, world):
    situation = Situation(row=planned("dsv4-b200-vllm", dp_attn=dp_attn).row, cache=CacheFacts(), options={})
    assert (situation.engines, situation.world_size) == (engines, world)


@pytest.mark.parametrize(
    ("runner", "family"), [("cluster:b200-dgxc", "b200"), ("cluster:mi355x-amds", "mi355x"), ("b200-nscale", "b200")]
)
def test_the_gpu_is_the_first_word_of_a_runner(runner, family):
    assert gpu_family(runner) == family


def test_an_unknown_backend_option_is_an_error_that_lists_the_known_ones():
    class Known(Strict):
        lazy: bool = False

    situation = Situation(row=planned("dsv4-b200-vllm").row, cache=CacheFacts(), options={"lasy": True})
    with pytest.raises(InputError, match=r"backends\.vllm-simple\.lasy.*allowed: lazy"):
        parse_options(Known, situation, "vllm-simple")
