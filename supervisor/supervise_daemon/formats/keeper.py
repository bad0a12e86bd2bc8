"""The checkpoint side of a run: chooses the resume point, checks what ranks saved, prunes. Called in worker threads."""

import threading
from collections.abc import Callable
from pathlib import Path

from supervise_daemon.core import events
from supervise_daemon.core.resume import Candidate, Choice, Refusal, ResumeFacts
from supervise_daemon.formats import catalog, tending
from supervise_daemon.formats.choosing import Look, clear_away, decide
from supervise_daemon.job_spec import JobSpec
from supervise_hooks.contract import exit_codes, messages, sealing
from supervise_hooks.contract.errors import CheckpointError
from supervise_hooks.contract.retention import Retention
from supervise_hooks.contract.verification import verify_sealed

RELOOK_S = 3.0


class Keeper:
    """Implements the executor's `Checkpoints`."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        folder: Callable[[], Path | None],
        facts: Callable[[], tuple[bool, bool]],
        clear: Callable[[], str | None],
        say: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._facts = facts
        """(no attempt was ever launched, a checkpoint was once whole)"""
        self._clear = clear
        """Ends what an earlier supervisor left; why that is impossible, or None."""
        self._say = say
        self._retention = spec.retention
        self._in_use: str | None = None
        self._fresh = spec.fresh
        self._disk = threading.Lock()
        """Choosing and pruning must not look at the same folder at once."""

    def heard(self, message: messages.FromRank) -> None:
        """A script may say how many checkpoints it wants kept; what the user told us here wins."""
        if isinstance(message, messages.Hello) and not self._spec.retention_given and message.keep_last is not None:
            self._retention = Retention(keep_last=message.keep_last, keep_every=message.keep_every)

    def choose(self, set_aside: str | None) -> events.ResumePointChosen | events.ResumeRefused:
        """Where the next attempt starts."""
        why_not = self._clear()
        if why_not is not None:
            return events.ResumeRefused(ticket=0, reason=why_not, exit_code=exit_codes.ALREADY_RUNNING)
        with self._disk:
            folder = self._where()
            if self._fresh:
                self._set_all_aside(folder)
            else:
                if set_aside is not None:
                    tending.set_aside(Path(set_aside), self._say, "attempts that start from it keep failing")
                tending.seal_ready(folder, self._spec.run_id, self._say)
            decision, candidates = self._decide(folder, move=True)
            if isinstance(decision, Choice):
                clear_away(candidates, decision, self._spec.run_id, self._say)
        # --fresh is about the first attempt of this supervisor: later ones go on from what that one saves.
        self._fresh = False
        if isinstance(decision, Refusal):
            return events.ResumeRefused(ticket=0, reason=decision.reason, exit_code=exit_codes.NO_RESUME_POINT)
        for note in decision.notes:
            self._say(note)
        self._in_use = decision.path
        return events.ResumePointChosen(ticket=0, path=decision.path, step=decision.step, reason=decision.reason)

    def _set_all_aside(self, folder: Path) -> None:
        """Checkpoints from before a fresh start would be newer by step than all that follow: resumed from, and kept instead of them."""
        if catalog.folder_state(folder) == "ok":
            for found in catalog.scan(folder):
                if found.candidate.run_id == self._spec.run_id:
                    tending.set_aside(found.path, self._say, "a fresh start was asked for (--fresh)")

    def preview(self) -> tuple[str | None, str]:
        """(path, reason) of the choice as it would be now; changes nothing."""
        decision, _ = self._decide(self._where(), move=False)
        return (None, decision.reason) if isinstance(decision, Refusal) else (decision.path, decision.reason)

    def check(self, path: str, step: int) -> events.CheckpointChecked:
        """Seal if nobody has, verify quickly."""
        folder = Path(path)
        try:
            _, sealed = sealing.seal(folder)
        except (CheckpointError, OSError) as error:
            return events.CheckpointChecked(ticket=0, path=path, step=step, whole=False, reason=str(error))
        inspection, manifest = verify_sealed(folder, "quick")
        if manifest is None:
            return events.CheckpointChecked(ticket=0, path=path, step=step, whole=False, reason=sealed)
        whole = inspection.verdict == "WHOLE"
        reason = "verified" if whole else "; ".join(inspection.problems[:3])
        return events.CheckpointChecked(ticket=0, path=path, step=manifest.step, whole=whole, reason=reason)

    def prune(self, newest: str) -> None:
        """Apply retention in the folder of `newest`, which has just been proved whole."""
        in_use = frozenset({newest} | ({self._in_use} if self._in_use else set()))
        with self._disk:
            notes = tending.prune(Path(newest).parent, self._retention, self._spec.run_id, in_use)
        for note in notes:
            self._say(note)

    def newest_step(self) -> int | None:
        """After an attempt: seal what lies ready; step of the newest checkpoint of this run that is quickly proved whole."""
        folder = self._where()
        with self._disk:
            tending.seal_ready(folder, self._spec.run_id, self._say)
            if catalog.folder_state(folder) != "ok":
                return None
            ours = [
                found.candidate.step
                for found in catalog.scan(folder)
                if found.candidate.state == "whole"
                and found.candidate.run_id == self._spec.run_id
                and found.candidate.step is not None
            ]
        return max(ours, default=None)

    def _where(self) -> Path:
        return self._folder() or Path.cwd() / "checkpoints"

    def _decide(self, folder: Path, *, move: bool) -> tuple[Choice | Refusal, list[Candidate]]:
        """Quick look at all, full verification from the newest down until one holds."""
        first, ever_whole = self._facts()
        facts = ResumeFacts(
            run_id=self._spec.run_id,
            folder=catalog.folder_state(folder),
            folder_path=str(folder),
            first_attempt=first,
            ever_whole=ever_whole,
            fresh_allowed=self._fresh,
        )
        return decide(folder, facts, Look(relook_s=RELOOK_S if move else 0.0))
