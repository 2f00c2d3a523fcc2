from workflow import definitions
from workflow.contract import Reason
from workflow.definitions import DEFINITIONS, INVALID, TIERS, definitions_table


def test_the_committed_table_is_current(project):
    assert (project / "docs" / "definitions.md").read_text() == definitions_table()


def test_a_name_says_its_unit():
    suffix = {
        "s": "_s",
        "fraction": ("_share", *(f"_{tier}" for tier in TIERS), "_of_misses", "_of_lookups", "_of_attempts"),
        "bytes": "_bytes",
        "GB/s": "_gb_per_s",
        "tokens/s/GPU": "_tok_per_s_per_gpu",
        "tokens/s/user": "_tok_per_s",
        "W": "_w",
    }
    for one in DEFINITIONS.values():
        if one.unit in suffix:
            assert one.name.endswith(suffix[one.unit]), one.name


def test_no_definition_is_written_twice_or_empty():
    names = [one.name for one in definitions._LISTED]
    assert len(names) == len(set(names)) == len(DEFINITIONS)
    assert all(one.formula and one.source for one in DEFINITIONS.values())


def test_every_reason_that_a_point_can_be_invalid_for_is_explained():
    assert set(INVALID) == set(Reason)
