"""What all KV connectors of vLLM share: the `--kv-transfer-config` value and the log lines that prove them."""

import json
from collections.abc import Mapping
from typing import Any

from workflow.serving import Argv, Proof

# "native" flags turn into the Simple connector, in silence, where this variable is set.
SIMPLE_SWITCH = "VLLM_USE_SIMPLE_KV_OFFLOAD"


def transfer_config(
    connector: str,
    extra: Mapping[str, Any] | None = None,
    *,
    module_path: str | None = None,
    failure_policy: str | None = None,
) -> Argv:
    """Return the flag with its JSON value, keys sorted.

    The explicit JSON is used and not vLLM's shortcut flags: `--kv_offloading_size` is in GiB where budgets are decimal
    GB, and the shortcuts cannot pass a backend's own keys.
    """
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    if extra:
        config["kv_connector_extra_config"] = dict(extra)
    if module_path:
        config["kv_connector_module_path"] = module_path
    if failure_policy:
        config["kv_load_failure_policy"] = failure_policy
    return ("--kv-transfer-config", json.dumps(config, sort_keys=True))


def created(connector: str) -> Proof:
    """Return the proof that vLLM created this connector and not another one (seen in 0.25.1)."""
    return Proof(
        name="connector-created",
        service="engine",
        pattern=rf"Creating v1 connector with name: {connector}\b",
        expected=True,
        says=f"vLLM created {connector}",
    )


def restored() -> Proof:
    """Return the proof that prompt tokens came from the tier (seen in 0.25.1 and 0.32.0, with every connector).

    vLLM prints this rate every ten seconds only if a connector exists; a tier that is never hit prints 0.0 %.
    """
    return Proof(
        name="tokens-restored",
        service="engine",
        pattern=r"External prefix cache hit rate: (?!0\.0%)\d",
        expected=True,
        says="prompt tokens were loaded from outside the device",
        by_use=True,
    )
