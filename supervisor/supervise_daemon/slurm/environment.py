"""Where in a Slurm job we are, from the environment Slurm gives a batch script or a step. Pure. Facts seen in Slurm 22.05."""

import re
from collections.abc import Mapping

import msgspec


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One process's place in its job."""

    job_id: str
    """Raw id; of an array's last task it equals the array's id, so it never names a task safely: see `target`."""
    target: str
    """What `scontrol` is told: `ARRAY_TASK` in an array, the leader's id in a heterogeneous job, else the id."""
    restarts: int
    """SLURM_RESTART_COUNT: requeues before this run, as Slurm counts. Not a run id: it can repeat after a controller's crash."""
    in_step: bool
    """Started by srun, not by the batch script."""
    node: str
    nodes: tuple[str, ...]
    """Of the step when in one, else of the job."""
    node_rank: int
    """Our index in `nodes`."""
    tasks_here: int
    """Tasks of our step on this node; in a batch script 1."""
    task_pid: int | None
    """The process that gets Slurm's signals: the batch script's, or the step task's."""
    launch_ip: str | None
    """Address of the node that srun was called on; None in a batch script."""


def locate(environ: Mapping[str, str]) -> Placement | None:
    """Our place, or None outside of a Slurm job."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id.isdigit():
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    in_step = "SLURM_STEP_ID" in environ
    nodes = expand_hosts(environ.get("SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST", ""))
    node = environ.get("SLURMD_NODENAME", "")
    rank = _number(environ.get("SLURM_NODEID")) or 0
    pid = _number(environ.get("SLURM_TASK_PID"))
    return Placement(
        job_id=job_id,
        target=f"{array}_{task}" if array and task else environ.get("SLURM_HET_JOB_ID") or job_id,
        restarts=_number(environ.get("SLURM_RESTART_COUNT")) or 0,
        in_step=in_step,
        node=node,
        nodes=nodes,
        node_rank=rank,
        tasks_here=_tasks_here(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), rank) if in_step else 1,
        task_pid=pid,
        launch_ip=environ.get("SLURM_LAUNCH_NODE_IPADDR") if in_step else None,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _tasks_here(counts: str, node_rank: int) -> int:
    """The entry of our node in e.g. `2(x3),1`."""
    flat: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        flat += [int(count)] * int(times or 1)
    return flat[node_rank] if node_rank < len(flat) else 1


def expand_hosts(text: str) -> tuple[str, ...]:
    """Names of a host list like `gpu[01-03,7],login1`, in its order."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names += _expand(part)
    return tuple(names)


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    head, rest = part[: match.start()], _expand(part[match.end() :])
    names = []
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        numbers = [first] if not last else [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        names += [head + number + tail for number in numbers for tail in rest]
    return names
