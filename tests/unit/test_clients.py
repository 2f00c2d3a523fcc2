"""The replay clients: the settings of each, and the version that its lock pins."""

from pathlib import Path

import pytest

from workflow.clients import OWN_SETTINGS, identity, settled
from workflow.config import Replay
from workflow.contract import InputError


@pytest.fixture
def locks(project):
    return {path.stem: path for path in Path(project, "configs/environments").glob("*.txt")}


@pytest.mark.parametrize("client", OWN_SETTINGS)
def test_the_version_is_the_one_that_the_lock_pins(locks, client):
    version = settled(Replay(client=client), locks).client_version
    assert f"\n{client}=={version}\n" in locks[client].read_text()


def test_another_version_than_the_pinned_one_is_refused(locks):
    assert settled(Replay(client_version="0.13.0"), locks).client_version == "0.13.0"
    with pytest.raises(
        InputError, match=r"^replay\.client_version: 0\.12\.0 is asked for, and .*aiperf.txt pins 0\.13\.0"
    ):
        settled(Replay(client_version="0.12.0"), locks)


def test_a_lock_that_does_not_pin_the_client(tmp_path):
    lock = tmp_path / "aiperf.txt"
    lock.write_text("aiperf-tools==0.13.0\n# aiperf==0.13.0\n")
    with pytest.raises(InputError, match=r"aiperf\.txt: aiperf is not pinned here; allowed: a line aiperf==<version>"):
        settled(Replay(), {"aiperf": lock})


def test_a_client_without_a_lock_names_those_that_have_one(locks):
    with pytest.raises(InputError, match=r"^replay\.client: no lock file agentx-harness\.txt.*allowed: aiperf$"):
        settled(Replay(client="agentx-harness"), {"aiperf": locks["aiperf"], "llamacpp": locks["llamacpp"]})


def test_the_fork_has_inferencexs_warm_up_unless_it_is_told_otherwise(locks):
    replay = settled(Replay(client="agentx-harness"), locks)
    assert (replay.warmup_requests_per_lane, replay.idle_gap_cap_s) == (10, 300.0)
    replay = settled(Replay(client="agentx-harness", warmup_requests_per_lane=None, idle_gap_cap_s=60.0), locks)
    assert (replay.warmup_requests_per_lane, replay.idle_gap_cap_s) == (None, 60.0)


def test_a_setting_of_another_client_is_refused_with_the_way_out(locks):
    with pytest.raises(InputError) as caught:
        settled(Replay(warmup_requests_per_lane=5), locks)
    assert str(caught.value) == (
        "replay.warmup_requests_per_lane: client aiperf has no such setting; leave it out, or replay with "
        "`client: agentx-harness`"
    )


def test_what_a_client_does_not_have_is_not_in_the_identity_of_its_points(locks):
    """Else every point that was measured before the fork came would have another id, and be bought again."""
    later = {*OWN_SETTINGS["agentx-harness"], "idle_gap_cap_s"}
    assert not later & identity(settled(Replay(), locks)).keys()
    assert later <= identity(settled(Replay(client="agentx-harness"), locks)).keys()
