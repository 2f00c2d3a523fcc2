"""Whether a measured point may be published, and why not. Pure: evidence and limits in, findings out."""

from collections.abc import Iterator

from workflow.contract import Finding, Reason
from workflow.definitions import Value
from workflow.evidence import Context, Evidence


def judge(evidence: Evidence, values: dict[str, Value], context: Context) -> list[Finding]:
    """Return one finding a reason, the run's own first; a reason that the run found already is not repeated."""
    found = list(context.run_findings)
    seen = {finding.code for finding in found}
    for finding in _findings(evidence, values, context):
        if finding.code not in seen:
            seen.add(finding.code)
            found.append(finding)
    return found


def _findings(evidence: Evidence, values: dict[str, Value], context: Context) -> Iterator[Finding]:
    records, limits = evidence.records, context.limits
    if records.succeeded == 0:
        yield Finding(code=Reason.NO_REQUESTS, detail=f"{records.failed} failed, {records.cancelled} cancelled")
    share = values["error_share"]
    if share.value is not None and share.value > limits.error_share:
        detail = f"{records.failed} of {share.denominator:.0f} requests failed: {share.value:.2%}"
        yield Finding(code=Reason.ERROR_SHARE, detail=f"{detail}, limit {limits.error_share:.2%}")
