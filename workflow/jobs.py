"""Slurm's jobs of points: what is queued and running, and what became of those that ended.

A job is recognised by what Slurm itself keeps about it: the checkout it was submitted from, and the comment that names
its rule and its point. Nothing has to be remembered by a head process that may die.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from workflow.contract import InputError
from workflow.failures import FailureClass
from workflow.sharing import Turns, turns_file

RULE, SHARED_RULE = "run_point", "run_shared"
"""The rules whose jobs measure: one point, or several in turn on one server."""
ALL_LOGS = Path(".snakemake/slurm_logs")
LOGS = ALL_LOGS / f"rule_{RULE}"
"""Where Snakemake's Slurm plugin keeps the logs of failed jobs: <point>/<job id>.log."""
SHARED_LOGS = ALL_LOGS / f"rule_{SHARED_RULE}"
"""<allocation>/<job id>.log."""
COMMENT = re.compile(rf"^rule_(?P<rule>{RULE}|{SHARED_RULE})_wildcards_(?P<name>\S+)$")
LIVE = frozenset({"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "RUNNING", "STOPPED", "SUSPENDED"})
QUEUED = frozenset({"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_HOLD"})
ASK_AGAIN, ASK_AGAIN_S = 3, 3.0
QUEUE_FORMAT = "%i|%T|%r|%N|%k|%Z"
ACCOUNTING_FIELDS = "JobIDRaw,State,Reason,NodeList"

Command = Callable[[list[str]], "Answer"]


@dataclass(frozen=True)
class Answer:
    """What a command of Slurm said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Job:
    """One job, as far as it concerns one point; a job for several points is one of these for each."""

    id: str
    point: str
    state: str
    """In Slurm's words, `CANCELLED by <uid>` shortened to `CANCELLED`; `UNKNOWN` if Slurm no longer knows the job."""
    reason: str | None = None
    """Why it waits or ended, in Slurm's words."""
    nodes: str | None = None
    cancelled_by_uid: int | None = None
    allocation: str | None = None
    """Of a job whose points take turns on one server."""

    @property
    def log(self) -> Path:
        """Return where Snakemake keeps the job's own log, in the checkout."""
        folder = LOGS / self.point if self.allocation is None else SHARED_LOGS / self.allocation
        return folder / f"{self.id}.log"

    @property
    def live(self) -> bool:
        """Tell whether the job will still run or runs."""
        return self.state in LIVE


# ---------------------------------------------------------------------------------------------------- asking
def ask(argv: list[str]) -> Answer:
    """Run a command of Slurm; a command that is not installed or does not answer is an answer too."""
    if shutil.which(argv[0]) is None:
        return Answer(127, "", f"{argv[0]} is not installed")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{argv[0]} did not answer within 60 s")
    return Answer(done.returncode, done.stdout, done.stderr.strip())


def queue(folder: Path, command: Command = ask) -> list[Job]:
    """Return your jobs that measure points for the checkout in `folder`, those included that ended a moment ago.

    An empty list where Slurm is not installed. Raises InputError where it is, was used from this checkout, and does
    not answer: who cannot see the jobs that run would submit them a second time.
    """
    argv = ["squeue", "--me", "--states=all", "--noheader", f"--format={QUEUE_FORMAT}"]
    answer = command(argv)
    for _ in range(ASK_AGAIN):
        # A busy controller drops a request now and then.
        if answer.code in (0, 127) or not _used(folder):
            break
        time.sleep(ASK_AGAIN_S)
        answer = command(argv)
    if answer.code == 0:
        return parse_squeue(answer.out, folder)
    if answer.code == 127 or not _used(folder):
        return []
    raise InputError(
        f"Slurm does not answer ({answer.err}), so nobody knows whether jobs of this checkout still run",
        do=f"try again; if you are sure that none does, remove {folder / ALL_LOGS}",
    )


def _used(folder: Path) -> bool:
    return (folder / LOGS).is_dir() or (folder / SHARED_LOGS).is_dir()


def parse_squeue(text: str, folder: Path) -> list[Job]:
    """Read squeue's lines in QUEUE_FORMAT; jobs of other rules, programs and folders are left out."""
    found = []
    for line in text.splitlines():
        fields = line.split("|", 5)
        if len(fields) < 6:
            continue
        number, state, reason, nodes, comment, workdir = fields
        match = COMMENT.match(comment)
        if match and Path(workdir).resolve() == folder.resolve():
            told = (_state(state), None if reason == "None" else reason, nodes or None)
            allocation = match["name"] if match["rule"] == SHARED_RULE else None
            points = (match["name"],) if allocation is None else members(folder, allocation)
            found += [Job(number, point, *told, allocation=allocation) for point in points]
    return found


def members(folder: Path, allocation: str) -> tuple[str, ...]:
    """Return the points of an allocation; none where its file is gone."""
    file = turns_file(folder / "results", allocation)
    return Turns.read(file).points if file.exists() else ()


def parse_sacct(text: str, known: Iterable[Job]) -> list[Job]:
    """Read sacct's lines of ACCOUNTING_FIELDS, separated by `|`; `known` says which points a job id is of."""
    jobs: dict[str, list[Job]] = {}
    for job in known:
        jobs.setdefault(job.id, []).append(job)
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 4 or fields[0] not in jobs:
            continue
        by = re.match(r"CANCELLED by (\d+)$", fields[1])
        found += [
            replace(
                job,
                state=_state(fields[1]),
                reason=None if fields[2] in ("", "None") else fields[2],
                nodes=fields[3] or None,
                cancelled_by_uid=int(by[1]) if by else None,
            )
            for job in jobs[fields[0]]
        ]
    return found


def _state(text: str) -> str:
    return text.split(" ", 1)[0].rstrip("+")


def logged(folder: Path) -> list[Job]:
    """Return all jobs whose log is kept, those that failed and those that run, in state UNKNOWN."""
    single = [Job(path.stem, path.parent.name, "UNKNOWN") for path in (folder / LOGS).glob("*/*.log")]
    return single + [
        Job(path.stem, point, "UNKNOWN", allocation=path.parent.name)
        for path in (folder / SHARED_LOGS).glob("*/*.log")
        for point in members(folder, path.parent.name)
    ]


def ended(folder: Path, known: Iterable[Job], command: Command = ask) -> list[Job]:
    """Return all jobs of this checkout that have ended, as far as squeue (`known`), sacct and the kept logs tell.

    sacct is asked by job id, without a window of time, and is not needed: where accounting is off or its database is
    down, what squeue and a job's own log say is enough.
    """
    jobs = {(job.id, job.point): job for job in (*logged(folder), *known)}
    # A cancelled job is asked for again: only accounting knows who did it.
    unclear = {job.id for job in jobs.values() if job.state in ("UNKNOWN", "CANCELLED")}
    if unclear:
        fields = f"--format={ACCOUNTING_FIELDS}"
        answer = command(["sacct", "-X", "--parsable2", "--noheader", fields, "--jobs", ",".join(sorted(unclear))])
        told = parse_sacct(answer.out, list(jobs.values())) if answer.code == 0 else []
        jobs.update({(job.id, job.point): job for job in told})
    return [job for job in jobs.values() if not job.live]


# ----------------------------------------------------------------------------------------------- classifying
@dataclass(frozen=True)
class Cause:
    """Why a job ended without a result."""

    failure_class: FailureClass
    message: str


_STATES = {
    "TIMEOUT": FailureClass.TIME_LIMIT,
    "DEADLINE": FailureClass.TIME_LIMIT,
    "OUT_OF_MEMORY": FailureClass.OUT_OF_MEMORY,
    "NODE_FAIL": FailureClass.NODE_FAILURE,
    "BOOT_FAIL": FailureClass.NODE_FAILURE,
    "PREEMPTED": FailureClass.PREEMPTED,
    "CANCELLED": FailureClass.CANCELLED,
}

# The first that matches counts. Slurm's daemons write these into the job's own log, so they hold where accounting is
# off and long after squeue has forgotten the job.
_LOG_LINES = (
    (FailureClass.OUT_OF_MEMORY, r"exceeded memory limit|Exceeded job memory limit|oom[-_ ]kill|Out Of Memory"),
    (FailureClass.TIME_LIMIT, r"CANCELLED AT \S+ DUE TO TIME LIMIT"),
    (FailureClass.PREEMPTED, r"CANCELLED AT \S+ DUE TO PREEMPTION"),
    (FailureClass.NODE_FAILURE, r"CANCELLED AT \S+ DUE TO NODE (\S+ )?FAILURE|Job step aborted: .*node fail"),
    (
        FailureClass.IMAGE_PULL,
        r"pyxis: .*(failed to import|image import)|enroot-import|\[ERROR\] .*(manifest|registry)|manifest unknown"
        r"|pull access denied|toomanyrequests"
        r"|FATAL: .*(pull|build).* (image|docker)|Error response from daemon: .*pull",
    ),
    (FailureClass.CANCELLED, r"CANCELLED AT \S+ \*\*\*"),
)

SCHEDULER_CLASSES = frozenset({*_STATES.values(), *(kind for kind, _ in _LOG_LINES), FailureClass.SUBMIT_REFUSED})
"""Classes that are known from Slurm rather than from the attempt itself."""


def cause_of(job: Job, log: str, own_uid: int | None = None) -> Cause | None:
    """Return why Slurm ended a job, from its state and its log; None where the job ended by itself.

    The log is asked first for memory: a job that was killed for it is FAILED, not OUT_OF_MEMORY, where Slurm has no
    control groups, and CANCELLED in some versions.
    """
    if job.state == "COMPLETED":
        return None
    lines = [(kind, match[0]) for kind, pattern in _LOG_LINES if (match := re.search(pattern, log, re.IGNORECASE))]
    # A node that is lost while it starts a job leaves the job FAILED, with this reason.
    by_state = FailureClass.NODE_FAILURE if job.reason == "JobLaunchFailure" else _STATES.get(job.state)
    if lines and lines[0][0] == FailureClass.OUT_OF_MEMORY:
        return Cause(*_said(job, lines[0][0], lines[0][1], own_uid))
    if by_state is not None:
        return Cause(*_said(job, by_state, lines[0][1] if lines else job.reason, own_uid))
    if lines:
        return Cause(*_said(job, *lines[0], own_uid))
    return None


def _said(job: Job, kind: FailureClass, evidence: str | None, own_uid: int | None) -> tuple[FailureClass, str]:
    where = f" on {job.nodes}" if job.nodes else ""
    detail = f" ({evidence})" if evidence else ""
    text = {
        FailureClass.TIME_LIMIT: "was ended at its time limit",
        FailureClass.OUT_OF_MEMORY: "was killed for its memory",
        FailureClass.NODE_FAILURE: "lost its node",
        FailureClass.PREEMPTED: "was preempted",
        FailureClass.CANCELLED: f"was cancelled {_canceller(job, own_uid)}",
        FailureClass.IMAGE_PULL: "could not fetch its container image",
    }[kind]
    return kind, f"Slurm job {job.id}{where} {text}{detail}"


def _canceller(job: Job, own_uid: int | None) -> str:
    if job.cancelled_by_uid is None:
        return "by somebody else than this sweep"
    who = "you, outside of this sweep" if job.cancelled_by_uid == own_uid else f"user {job.cancelled_by_uid}"
    return f"by {who}"


# ------------------------------------------------------------------------------------- Snakemake's own log
_SUBMITTED = re.compile(r"has been submitted with SLURM jobid (\d+)")
_STOPPED = re.compile(r"Terminating processes on user request|Cancelling snakemake on user request")
_REFUSED = re.compile(r"SLURM sbatch failed\. The error message was '(?P<said>.*?)'\.?$", re.MULTILINE | re.DOTALL)


def cancelled_by_us(head_log: str) -> set[str]:
    """Return the ids of the jobs that a head process submitted, if its user stopped it: it then cancelled them."""
    return set(_SUBMITTED.findall(head_log)) if _STOPPED.search(head_log) else set()


def refused(head_log: str, folder: Path) -> dict[str, str]:
    """Return point -> what sbatch said, for jobs that Slurm did not take, from a log of Snakemake."""
    found = {}
    for block in re.split(rf"(?m)^(?:\[[^\]]+\]\n)?Error in rule (?=(?:{RULE}|{SHARED_RULE}):)", head_log)[1:]:
        match = _REFUSED.search(block)
        output = re.search(r"results/(?:runs/([^/\s]+)/run|shared/([^/\s]+)\.done)\.json", block)
        if match and output:
            points = (output[1],) if output[1] else members(folder, output[2])
            found.update(dict.fromkeys(points, " ".join(match["said"].split())))
    return found


def newest_by_point(jobs: Iterable[Job]) -> dict[str, Job]:
    """Return point -> its newest job; Slurm counts job ids upwards."""
    found: dict[str, Job] = {}
    for job in jobs:
        if job.point not in found or _number(job.id) > _number(found[job.point].id):
            found[job.point] = job
    return found


def _number(job_id: str) -> int:
    return int(job_id.split("_", 1)[0])
