"""The text of `--dry-run`: what would be done, and why. Starts nothing, writes nothing."""

from pathlib import Path

from supervise_daemon import assembly
from supervise_daemon.formats.keeper import Keeper
from supervise_daemon.job_spec import JobSpec
from supervise_daemon.ports import LaunchContext
from supervise_daemon.runtime.journal import Journal
from supervise_daemon.runtime.run_dir import RunDir
from supervise_daemon.runtime.scribe import Scribe
from supervise_daemon.runtime.status import mask_secrets


def describe_plan(spec: JobSpec) -> str:
    """Launcher, notices, grace, resume point, requeue."""
    run_dir = RunDir(spec.run_root, spec.name)
    memory = Journal(run_dir.journal, lambda text: None, Scribe()).recall()
    folder = spec.checkpoints or (Path(memory.checkpoints) if memory.checkpoints else None)
    keeper = Keeper(
        spec=spec,
        folder=lambda: folder,
        facts=lambda: (memory.attempt == 0, memory.ever_whole),
        clear=lambda: None,
        say=lambda text: None,
    )
    path, why = keeper.preview()
    launcher = assembly.choose_launcher(spec)
    context = LaunchContext(
        attempt=memory.attempt + 1,
        resume=path,
        resume_argument=spec.resume_argument,
        attempt_dir=run_dir.path / "attempts" / f"{memory.attempt + 1:04d}",
        grace_s=spec.grace_s,
    )
    plan = launcher.plan(spec.argv, context)
    rules = ", ".join(f"{rule.name} = {rule.action} ({rule.grace_s:g} s)" for rule in spec.signals)
    restart = spec.limits.restart
    rows = [
        ("run", f"{spec.name} in {run_dir.path}, attempt {memory.attempt + 1}"),
        ("command", " ".join(mask_secrets(plan.argv))),
        ("launcher", launcher.name),
        *(("note", note) for note in plan.notes),
        ("environment", " ".join(f"{key}={value}" for key, value in sorted(plan.env.items()))),
        ("notices", rules),
        *([("", f"file {spec.notice_file}, looked at every second")] if spec.notice_file else []),
        ("grace", f"{spec.grace_s:g} s unless the notice says otherwise"),
        ("resume", f"{path or 'fresh start'}: {why}"),
        ("checkpoints", f"{folder or 'what the script tells'}; the newest {spec.retention.keep_last} whole ones stay"),
        (
            "preempted",
            f"requeue by {spec.requeue}"
            + (f", again here after {spec.relaunch_delay_s:g} s" if spec.requeue == "local" else ": exit 75"),
        ),
        (
            "crashes",
            (
                f"{restart.max_crashes} survived within {restart.window_s / 3600:g} h, "
                f"pauses from {restart.backoff_first_s:g} s to {restart.backoff_max_s:g} s"
            ),
        ),
        (
            "if killed",
            f"ranks {'save and leave' if spec.on_supervisor_death == 'flush' else 'go on training'} when supervise itself dies",
        ),
    ]
    return "\n".join(f"{name + ':' if name else '':<13}{text}" for name, text in rows)
