"""A rank without torch: speaks the contract over SUPERVISE_SOCKET and writes real receipts. Run as a program.

Options (environment): TOY_STEPS (default 1000000), TOY_STEP_S (0.01), TOY_CRASH_AT (step, only in attempt TOY_CRASH_ATTEMPT),
TOY_LOG (a file that gets one JSON line an attempt: argv, resume, step, run_id), TOY_SAVE_S (how long a save takes), TOY_DEAF (never
answers a flush, as a rank stuck in C code would).
"""

import contextlib
import json
import os
import select
import socket
import sys
from pathlib import Path

from supervise_hooks.contract import digests, durable, env, layout, manifest, messages

ATTEMPT = int(os.environ[env.ATTEMPT])
FOLDER = Path(os.environ[env.CHECKPOINTS])


def save(step: int, flush_id: int, reason: manifest.Reason) -> messages.Saved:
    """One small checkpoint of one rank."""
    folder = FOLDER / layout.step_name(step)
    durable.make_folder(folder)
    content = json.dumps({"step": step}).encode()
    name = layout.state_name(0, 1)
    durable.write(folder / name, content)
    entry = manifest.FileEntry(name, len(content), digests.digest_buffers([content]))
    receipt = manifest.Receipt(
        run_id=os.environ[env.RUN_ID], attempt=ATTEMPT, step=step, rank=0, world_size=1, reason=reason, files=(entry,)
    )
    manifest.write_receipt(folder, receipt)
    return messages.Saved(flush_id=flush_id, step=step, path=str(folder), size=len(content), seconds=0.01)


def main() -> int:
    """Train until done, asked to leave, or told to crash."""
    step = int(os.environ[env.RESUME_STEP] or 0)
    if log := os.environ.get("TOY_LOG"):
        with open(log, "a") as file:
            file.write(
                json.dumps(
                    {
                        "attempt": ATTEMPT,
                        "argv": sys.argv[1:],
                        "resume": os.environ[env.RESUME],
                        "step": step,
                        "run_id": os.environ[env.RUN_ID],
                    }
                )
                + "\n"
            )
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ[env.SOCKET])

    def send(message: object) -> None:
        link.sendall(messages.encode(message))  # type: ignore[arg-type]

    send(
        messages.Hello(
            version="toy",
            run_id=os.environ[env.RUN_ID],
            attempt=ATTEMPT,
            rank=0,
            local_rank=0,
            world_size=1,
            checkpoints=str(FOLDER),
        )
    )
    send(messages.Resumed(path=os.environ[env.RESUME], step=step, seconds=0.0))
    lines = messages.LineBuffer()
    leaving = False
    while step < int(os.environ.get("TOY_STEPS", "1000000")):
        step += not leaving
        if step == int(os.environ.get("TOY_CRASH_AT", "0")) and ATTEMPT <= int(os.environ.get("TOY_CRASH_ATTEMPT", "1000")):
            send(messages.Failed(step=step - 1, error="ValueError: toy", traceback="Traceback: toy\nValueError: toy"))
            return 9
        send(messages.Progress(step=step, step_s=0.01))
        ready, _, _ = select.select([link], [], [], float(os.environ.get("TOY_STEP_S", "0.01")))
        if not ready:
            continue
        chunk = link.recv(1 << 16)
        if not chunk:
            return 0
        for line in lines.feed(chunk):
            order = messages.decode_to_rank(line)
            if isinstance(order, messages.Leave) and "TOY_DEAF" not in os.environ:
                return 0
            if isinstance(order, messages.FlushRequest) and "TOY_DEAF" not in os.environ:
                send(messages.Committed(flush_id=order.flush_id, step=step))
                select.select([], [], [], float(os.environ.get("TOY_SAVE_S", "0")))
                send(save(step, order.flush_id, "emergency"))
                leaving = leaving or order.purpose == "leave"
    send(messages.RunCompleted(step=step))
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
