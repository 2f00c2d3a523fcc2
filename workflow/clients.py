"""What the replay clients differ in before one is started: the settings that only one takes, the version it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow.config import Replay
from workflow.contract import InputError
from workflow.environments import pinned_version

OWN_SETTINGS: Mapping[str, tuple[str, ...]] = {"aiperf": (), "agentx-harness": ("warmup_requests_per_lane",)}
"""Client -> the settings that no other client takes."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "aiperf": {},
    # InferenceX's values.
    "agentx-harness": {"warmup_requests_per_lane": 10, "idle_gap_cap_s": 300.0},
}
"""Client -> settings that are not null where they are left out."""


def identity(replay: Replay) -> dict[str, Any]:
    """Return what of a replay a measurement depends on.

    A setting that the client does not have is no part of it, nor is one that came later and is not used: a point that
    was measured before the setting existed is still the same point.
    """
    unused = {name for client, own in OWN_SETTINGS.items() if client != replay.client for name in own}
    if replay.idle_gap_cap_s is None:
        unused.add("idle_gap_cap_s")
    return replay.model_dump(mode="json", exclude=unused)


def settled(replay: Replay, locks: Mapping[str, Path]) -> Replay:
    """Return a replay that leaves nothing open: the client's own settings and the version that its lock pins.

    Raises InputError for a setting of another client, for a client without a lock, and for a version that the lock
    does not pin: it would be installed and then refused, on a node.
    """
    own, defaults = OWN_SETTINGS[replay.client], DEFAULTS[replay.client]
    for client, settings in OWN_SETTINGS.items():
        for name in settings:
            if name not in own and getattr(replay, name) is not None:
                raise InputError(
                    f"client {replay.client} has no such setting",
                    key=f"replay.{name}",
                    do=f"leave it out, or replay with `client: {client}`",
                )
    if replay.client not in locks:
        raise InputError(
            f"no lock file {replay.client}.txt, so nobody knows how to install the client",
            key="replay.client",
            allowed=", ".join(sorted(OWN_SETTINGS.keys() & locks.keys())),
        )
    lock = locks[replay.client]
    pinned = pinned_version(lock, replay.client)
    if replay.client_version not in (None, pinned):
        raise InputError(
            f"{replay.client_version} is asked for, and {lock} pins {pinned}",
            key="replay.client_version",
            do="leave it out, or pin the other version there",
        )
    given = replay.model_fields_set
    return replay.model_copy(
        update={"client_version": pinned, **{name: value for name, value in defaults.items() if name not in given}}
    )
