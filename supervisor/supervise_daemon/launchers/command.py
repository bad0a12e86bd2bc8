"""Any command: run as it is. Pure."""

from supervise_daemon.core.restart import FailureReport
from supervise_daemon.launchers.resume_argument import with_resume
from supervise_daemon.ports import LaunchContext, LaunchPlan


class CommandLauncher:
    """The fallback: recognises everything."""

    name = "command"

    def recognises(self, argv: tuple[str, ...]) -> bool:
        """Always."""
        return True

    def plan(self, argv: tuple[str, ...], context: LaunchContext) -> LaunchPlan:
        """The user's words, plus the resume argument.

        A wrapper like `bash run.sh` may start torchrun inside, so torchrun's environment is set here as well.
        """
        from supervise_daemon.launchers.torchrun import environment

        return LaunchPlan(argv=with_resume(argv, context.resume_argument, context.resume), env=environment(context))

    def read_failures(self, output: str, leader_code: int) -> tuple[FailureReport, ...]:
        """What a torchrun inside may have printed."""
        from supervise_daemon.launchers.torchrun import parse_failures

        return parse_failures(output)
