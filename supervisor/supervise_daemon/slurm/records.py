"""What the controller says of a job, read from `scontrol -o show job`. Pure. Written against Slurm 22.05's output."""

import re
from datetime import datetime

import msgspec


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide something. Times are wall seconds, None where Slurm says None, N/A or Unknown."""

    job_id: str
    state: str
    """The base state as shown: RUNNING, COMPLETING, PENDING, TIMEOUT ..."""
    reason: str
    restarts: int
    may_requeue: bool
    preempt_time: float | None
    start_time: float | None
    end_time: float | None
    eligible_time: float | None
    priority: int
    partition: str
    excluded: str
    """ExcNodeList as Slurm writes it, empty for none."""
    batch_host: str
    dependency: str
    fields: dict[str, str]
    """Everything, as text."""

    @property
    def held(self) -> bool:
        """It waits until somebody releases it."""
        return self.state in ("PENDING", "SPECIAL_EXIT", "REQUEUE_HOLD") and (
            self.priority == 0 or "held" in self.reason.lower() or self.reason in ("JobHeldUser", "JobHeldAdmin")
        )


_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:&_.-]*)=")


def parse_jobs(text: str) -> tuple[JobRecord, ...]:
    """One record a line. Lines that are none are skipped. Values may hold spaces: a field ends where the next name begins."""
    return tuple(_record(fields) for line in text.splitlines() if "JobId" in (fields := parse_fields(line)))


def parse_fields(line: str) -> dict[str, str]:
    """`Name=value` pairs of one line. What users name freely, the job and later paths, cannot imitate a field of Slurm's own."""
    names = list(_FIELD.finditer(line))
    ends = [match.start() for match in names[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(names, ends, strict=True):
        value = line[match.end() : end].strip()
        if "Command" in fields:  # the first of the free-form fields at the end
            fields.setdefault(match[1], value)
        else:
            fields[match[1]] = value  # JobName stands before all that follows
    return fields


def _record(fields: dict[str, str]) -> JobRecord:
    return JobRecord(
        job_id=fields["JobId"],
        state=fields.get("JobState", "").split("+")[0],
        reason=fields.get("Reason", ""),
        restarts=_int(fields.get("Restarts"), 0),
        may_requeue=fields.get("Requeue") == "1",
        preempt_time=_time(fields.get("PreemptTime")),
        start_time=_time(fields.get("StartTime")),
        end_time=_time(fields.get("EndTime")),
        eligible_time=_time(fields.get("EligibleTime")),
        priority=_int(fields.get("Priority"), 1),
        partition=fields.get("Partition", ""),
        excluded="" if fields.get("ExcNodeList", "(null)") == "(null)" else fields["ExcNodeList"],
        batch_host=fields.get("BatchHost", ""),
        dependency=fields.get("Dependency", ""),
        fields=fields,
    )


def _int(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default


def _time(text: str | None) -> float | None:
    """Slurm prints local time without a zone, by the TZ of whoever asks: ours."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What of the site's settings matters to us."""

    kill_wait_s: float = 30.0
    """From the final SIGTERM to SIGKILL."""
    requeue_exit: frozenset[int] = frozenset()
    """Exit codes that Slurm itself answers with a requeue."""
    version: str = ""


def parse_site(text: str) -> Site:
    """From `scontrol show config`."""
    rows = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
    wait = re.match(r"\d+", rows.get("KillWait", ""))
    codes: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", rows.get("RequeueExit", "")):
        codes |= set(range(int(first), int(last or first) + 1))
    return Site(
        kill_wait_s=float(wait[0]) if wait else 30.0,
        requeue_exit=frozenset(codes),
        version=rows.get("SLURM_VERSION", ""),
    )
