import re

import pytest

from tests.unit.arms import planned, recipes
from workflow.contract import InputError
from workflow.recipes import Recipe, load_recipes, recipe_for, render
from workflow.serving import flags_of

BASE = """
recipe: r
serves: {model_prefix: [tiny], framework: [llamacpp], runner: ["cluster:local"], precision: [f16]}
costs: {startup_s: 1, warmup_s: 1}
"""


def recipe(tmp_path, text):
    (tmp_path / "r.yaml").write_text(BASE + text)
    return load_recipes(tmp_path)[0]


def rendered(tmp_path, text, *blocks):
    path, loaded = recipe(tmp_path, text)
    return render(path, loaded, planned("tiny").row, blocks)


def test_values_are_computed_in_order_and_conditions_add_their_part(tmp_path):
    text = """
let: {seqs: 2 * conc, sizes: "range(1, seqs + 1) | list"}
argv: [--n, "{{ seqs }}", "{{ '--never' if conc > 100 else '' }}"]
env: {A: "{{ sizes | tojson }}"}
when:
- {if: conc == 3, argv: [--three], env: {B: "1"}}
- {if: conc == 4, argv: [--four]}
"""
    found = rendered(tmp_path, text)
    assert found.argv == ("--n", "6", "--three")
    assert found.env == {"A": "[1, 2, 3, 4, 5, 6]", "B": "1"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('argv: ["{{ cnoc }}"]', "argv.0"),
        ("let: {a: cnoc}", "let.a"),
        ("when: [{if: cnoc == 1}]", "when.0.if"),
        ('env: {A: "{{ 1 // 0 }}"}', "env.A"),
        ('argv: ["{{ conc.__class__ }}"]', "argv.0"),
    ],
)
def test_a_misspelt_name_or_a_way_out_of_the_sandbox_is_an_error_at_its_key(tmp_path, text, key):
    with pytest.raises(InputError, match=re.escape(f"{key}: ")):
        rendered(tmp_path, text)


def test_a_condition_that_is_no_truth_value_is_an_error(tmp_path):
    with pytest.raises(InputError, match="an expression that is true or false"):
        rendered(tmp_path, "when: [{if: conc}]")


def test_options_keep_their_types_and_belong_to_their_backend(tmp_path):
    text = 'backends: {a: {lazy: "{{ conc == 3 }}", n: "{{ conc * 2 }}", s: "x{{ conc }}"}, b: {lazy: false}}'
    assert rendered(tmp_path, text, "a").options == {"lazy": True, "n": 6, "s": "x3"}
    assert rendered(tmp_path, text).options == {}
    assert rendered(tmp_path, text, "a", "b").options["lazy"] is False


def test_a_wrong_cache_fact_is_an_error_with_file_and_key(tmp_path):
    with pytest.raises(InputError, match=r"r\.yaml: cache\.blocks.*allowed: block_tokens"):
        rendered(tmp_path, "cache: {blocks: [1]}")


@pytest.mark.parametrize("place", ["gpu: [b200], runner: ['cluster:b200-dgxc']", ""])
def test_a_recipe_is_for_gpus_or_for_runners(tmp_path, place):
    text = BASE.replace('runner: ["cluster:local"]', place or "precision: [f16]").replace(
        "precision: [f16], precision: [f16]", "precision: [f16]"
    )
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(InputError, match="give `gpu` or `runner`"):
        load_recipes(tmp_path)


def test_no_recipe_and_two_recipes_are_errors_that_say_what_to_do(tmp_path):
    row = planned("tiny").row
    with pytest.raises(InputError, match=r"model_prefix dsv4.*write one"):
        recipe_for(planned("dsv4-b200-vllm").row, (recipe(tmp_path, ""),), "here")
    with pytest.raises(InputError, match="served by 2 recipes"):
        recipe_for(row, (recipe(tmp_path, ""),) * 2, "here")


def test_the_demos_recipe_renders_its_command():
    path, found = recipe_for(planned("tiny").row, recipes(), "here")
    assert render(path, found, planned("tiny").row).argv == ("--ctx-size", "16384", "--parallel", "2", "--threads", "2")


BACKENDS_OWN = (
    *("--kv-transfer-config", "--kv-offloading-size", "--kv_offloading_size", "--cache-ram", "--skip-server-warmup"),
    *("--enable-hierarchical-cache", "--hicache-size", "--hicache-ratio", "--hicache-write-policy"),
)


@pytest.mark.parametrize("path_and_recipe", recipes(), ids=lambda item: item[1].recipe)
def test_no_recipe_carries_a_backends_flag_or_variable(path_and_recipe):
    _, found = path_and_recipe
    parts: tuple[Recipe | object, ...] = (found, *found.when)
    for part in parts:
        assert not flags_of(part.argv).keys() & set(BACKENDS_OWN)
        assert not [name for name in part.env if name.startswith(("LMCACHE_", "MC_", "MOONCAKE_", "OFFLOAD_"))]
    assert "host_cache_size" not in (found.engine_config or "")


@pytest.mark.parametrize("path_and_recipe", recipes(), ids=lambda item: item[1].recipe)
def test_a_recipe_is_named_like_its_file(path_and_recipe):
    path, found = path_and_recipe
    assert found.recipe == path.stem
