"""From the signal to the moment every rank has the request, beside torchrun forwarding a SIGTERM. Budget: p99 < 50 ms."""

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure import Result

BIN = Path(sys.executable).parent
ROUNDS, RANKS, BUDGET_S = 100, 8, 0.050

_RANK = """
import json, os, socket, sys, time
from supervise_hooks.contract import env, messages
rank = int(sys.argv[1])
connection = socket.socket(socket.AF_UNIX); connection.connect(os.environ[env.SOCKET])
say = lambda message: connection.sendall(messages.encode(message))
say(messages.Hello(version="0", run_id=os.environ[env.RUN_ID], attempt=int(os.environ[env.ATTEMPT]), rank=rank, local_rank=rank,
                   world_size=int(sys.argv[2]), checkpoints=sys.argv[3]))
lines = messages.LineBuffer()
out = os.open(f"{sys.argv[3]}/heard.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while chunk := connection.recv(65536):
    now = time.monotonic()
    for line in lines.feed(chunk):
        request = messages.decode_to_rank(line)
        if isinstance(request, messages.Leave):
            sys.exit(0)
        if isinstance(request, messages.FlushRequest):
            os.write(out, f"{now}\\n".encode())
            say(messages.NothingToSave(flush_id=request.flush_id, step=0))
"""

_JOB = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, sys.argv[1], str(rank), sys.argv[2], sys.argv[3]]) for rank in range(int(sys.argv[2]))]
sys.exit(max(rank.wait() for rank in ranks))
"""

_FORWARDED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, f"{time.monotonic()}\\n".encode()), os._exit(0)))
os.write(2, b"ready\\n")
time.sleep(100)
"""


def measure(folder: Path) -> list[Result]:
    """SIGUSR2 (`flush`) a hundred times to a supervisor with eight attached ranks."""
    seconds = sorted(_supervised(folder))
    p99, median = seconds[int(len(seconds) * 0.99) - 1], statistics.median(seconds)
    torchrun = _torchrun(folder)
    return [
        Result(
            name="notice to request, p99",
            ratio=BUDGET_S / p99,
            target=1.0,
            measured=f"p99 {p99 * 1e3:.1f} ms, median {median * 1e3:.2f} ms, {RANKS} ranks (budget 50 ms); torchrun forwards a TERM in {torchrun * 1e3:.1f} ms",
        )
    ]


def _supervised(folder: Path) -> list[float]:
    work = folder / "notice"
    work.mkdir()
    (work / "rank.py").write_text(_RANK)
    (work / "job.py").write_text(_JOB)
    argv = [str(BIN / "supervise"), "--quiet", "--run-root", str(work / "runs"), "--name", "notice", "--grace", "5", "--"]
    process = subprocess.Popen([*argv, sys.executable, str(work / "job.py"), str(work / "rank.py"), str(RANKS), str(work)])
    heard = [work / f"heard.{rank}" for rank in range(RANKS)]
    status, journal = (work / "runs" / "notice" / name for name in ("status.json", "journal.jsonl"))
    try:
        _until(lambda: status.exists() and '"RUNNING"' in status.read_text())
        seconds = []
        for round_ in range(ROUNDS):
            begun = time.monotonic()
            process.send_signal(signal.SIGUSR2)
            _until(lambda round_=round_: all(len(path.read_text().split()) > round_ for path in heard))  # type: ignore[misc]
            seconds.append(max(float(path.read_text().split()[round_]) for path in heard) - begun)
            _until(lambda round_=round_: journal.read_bytes().count(b"nothing new to save; going on") > round_)  # type: ignore[misc]
        return seconds
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def _torchrun(folder: Path) -> float:
    script = folder / "forwarded.py"
    script.write_text(_FORWARDED)
    process = subprocess.Popen(
        [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    ready = 0
    while ready < 2:
        ready += process.stderr.readline().count("ready")
    begun = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    return max(float(line) for line in output.split()) - begun


def _until(met: object) -> None:
    deadline = time.monotonic() + 60
    while not met():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("the benchmark waited in vain")
        time.sleep(0.0005)
