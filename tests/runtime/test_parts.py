"""Parts of the daemon's mechanism on real processes, pipes, sockets and files, each alone."""

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from kit.eventually import eventually
from supervise_daemon.core import events
from supervise_daemon.core.restart import Crash
from supervise_daemon.runtime import tree as trees
from supervise_daemon.runtime.journal import Journal, Memory
from supervise_daemon.runtime.output import Output
from supervise_daemon.runtime.rank_server import RankServer, ask_daemon
from supervise_daemon.runtime.run_dir import AlreadyRunning, RunDir, make_private_dir, remove_private_dir
from supervise_daemon.runtime.scribe import Scribe
from supervise_daemon.runtime.status import mask_secrets
from supervise_daemon.runtime.takeover import take_over
from supervise_daemon.runtime.workers import Workers
from supervise_hooks.contract import env, messages
from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.identity import ProcessIdentity, identify, is_alive

pytestmark = pytest.mark.process


def child(code: str, **options: object) -> subprocess.Popen[str]:
    """A Python child with pipes for words in both directions."""
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )


# --- signals

INBOX = """
import select, signal, sys
from supervise_daemon.runtime.signals import SignalInbox, is_ignored
print([int(n) for n in (1, 15) if is_ignored(n)], flush=True)
with SignalInbox([n for n in (15, 10, 2, 1) if not is_ignored(n)]) as inbox:
    print("ready", flush=True)
    seen = []
    while 2 not in seen:
        select.select([inbox.fd], [], [])
        seen += inbox.read()
    print(seen, flush=True)
"""


def test_signals_arrive_as_numbers_even_if_the_parent_blocked_them() -> None:
    """TERM and USR1 blocked in the parent are heard all the same; INT ends the test's child by number, not by exception."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        process = child(INBOX)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    with process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip(), process.stdout.readline().strip()] == ["[]", "ready"]
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            process.send_signal(number)
        assert set(eval(process.stdout.readline())) == {15, 10, 2}
        assert process.wait(10) == 0


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    """C07: the caller of nohup said that HUP means nothing."""
    with subprocess.Popen(
        ["nohup", sys.executable, "-c", INBOX], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip(), process.stdout.readline().strip()] == ["[1]", "ready"]
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().strip() == "[2]"


# --- tree

TREE = """
import os, sys, signal
from supervise_daemon.runtime.tree import Tree, become_subreaper
become_subreaper()
tree = Tree()
read, write = os.pipe()
os.set_inheritable(write, True)
tree.spawn(["sh", "-c", sys.argv[1]], {**os.environ, "SUPERVISE_MARKER": sys.argv[2]}, 2, 2)
print("spawned", flush=True)
for line in sys.stdin:
    if line.strip() == "members":
        tree.reap()
        print(len(tree.members()), flush=True)
    if line.strip() == "kill":
        tree.kill()
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        print(len(tree.members()), flush=True)
"""


class Keeper:
    """A child process that owns a tree."""

    def __init__(self, job: str, marker: str) -> None:
        self.marker = marker
        self.process = subprocess.Popen(
            [sys.executable, "-c", TREE, job, marker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.read() == "spawned"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return int(self.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        trees.kill_carrying(f"{env.MARKER}={self.marker}")
        self.process.communicate(timeout=10)


def test_sessions_orphans_and_term_proof_processes_are_members_and_die() -> None:
    """F4: double forks, own sessions and ignored TERM: all are found by descent, and nothing is left after a kill."""
    job = "trap '' TERM; setsid sh -c '(setsid sleep 300 &); exec sleep 300' & (sleep 300 &) ; wait; sleep 300"
    with Keeper(job, "m-sessions") as keeper:
        eventually(lambda: keeper.ask("members") >= 4, "four members")
        assert keeper.ask("kill") == 0
        assert trees.find_marked("m-sessions") == []


def test_a_launcher_that_respawns_does_not_win() -> None:
    """C08: the leader starts a new worker whenever one dies; after a kill neither is left."""
    with Keeper("while :; do setsid sh -c 'sleep 300 & exec sleep 300' & wait $!; done", "m-respawn") as keeper:
        eventually(lambda: keeper.ask("members") >= 3, "leader and workers")
        assert keeper.ask("kill") == 0
        assert trees.find_marked("m-respawn") == []


def test_members_are_found_by_marker_whoever_their_parent_is_and_strangers_are_not() -> None:
    """An orphan under init and a child alike; not a process of another marker, nor one that only names it in its words."""
    marked = subprocess.Popen(["sh", "-c", "setsid sleep 300 & exec sleep 300"], env={**os.environ, env.MARKER: "m-find"})
    longer = subprocess.Popen(["sleep", "300"], env={**os.environ, env.MARKER: "m-find-not"})
    words = subprocess.Popen(["sh", "-c", "exec sleep 300", f"{env.MARKER}=m-find"])
    try:
        eventually(lambda: len(trees.find_marked("m-find")) == 2, "two marked processes")
        assert trees.kill_carrying(f"{env.MARKER}=m-find") == []
        assert marked.wait(10) is not None
        assert trees.find_marked("m-find") == []
        assert (longer.poll(), words.poll()) == (None, None)
    finally:
        for process in (longer, words, marked):
            process.kill()
            process.wait()


def test_a_reused_pid_is_not_the_same_process() -> None:
    """C79: pid, start time and boot make an identity; a zombie is dead."""
    process = subprocess.Popen(["sleep", "300"])
    try:
        real = identify(process.pid)
        assert is_alive(real)
        assert not is_alive(ProcessIdentity(real.pid, real.start_ticks - 1, real.boot_id, real.host))
        assert not is_alive(ProcessIdentity(real.pid, real.start_ticks, "other boot", real.host))
        assert not is_alive(ProcessIdentity(real.pid, real.start_ticks, real.boot_id, "elsewhere"))
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(real)
    finally:
        process.kill()
        process.wait()


# --- output


def pumped(log: Path, code: str, during: Callable[[Output], None] = lambda output: None) -> tuple[int, Output]:
    """Run `code` with its output pumped; its exit code once the pump has ended too."""
    output = Output(log)
    output.start()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=output.stdout, stderr=output.stderr)
    output.close_write_ends()
    try:
        during(output)
        while not output.drained.is_set():
            assert output.pid is not None
            _, status = os.waitpid(output.pid, 0)
            output.ended(os.waitstatus_to_exitcode(status))
        return process.wait(30), output
    finally:
        process.kill()
        process.wait()


def test_much_output_long_lines_and_invalid_bytes_come_through(tmp_path: Path) -> None:
    """C61: 10 MB on both streams, a line of 3 MB, bytes that are no text: every one is in the log."""
    code = """
import os, threading
def flood(fd, byte):
    for _ in range(1280): os.write(fd, byte * 4096)
threads = [threading.Thread(target=flood, args=(fd, byte)) for fd, byte in ((1, b"o"), (2, b"e"))]
[t.start() for t in threads]; [t.join() for t in threads]
data = b"L" * 3_000_000 + b"\\n\\xff\\xfe\\x00"
while data: data = data[os.write(1, data):]
"""
    saved = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    try:
        exit_code, output = pumped(tmp_path / "log", code)
    finally:
        os.dup2(saved[0], 1), os.dup2(saved[1], 2)
        for fd in (*saved, null):
            os.close(fd)
    content = (tmp_path / "log").read_bytes()
    assert exit_code == 0
    assert (content.count(b"o"), content.count(b"e"), content.count(b"L")) == (160 * 32768, 160 * 32768, 3_000_000)
    assert content.endswith(b"\xff\xfe\x00")
    assert output.tail().endswith("\ufffd\ufffd\0")


def test_a_killed_pump_is_started_again_and_writers_see_nothing(tmp_path: Path) -> None:
    """Kill -9 of the pump in the middle: no EPIPE, later lines are in the log."""
    ready, done = tmp_path / "ready", tmp_path / "go"
    code = f"""
import os, time
print("before", flush=True); open({str(ready)!r}, "w").close()
while not os.path.exists({str(done)!r}): time.sleep(0.01)
for i in range(20000): print("line", i)
"""

    def kill(output: Output) -> None:
        eventually(lambda: ready.exists() and b"before" in (tmp_path / "log").read_bytes(), "the first line")
        assert output.pid is not None
        os.kill(output.pid, signal.SIGKILL)
        done.touch()

    exit_code, _ = pumped(tmp_path / "log", code, kill)
    assert exit_code == 0
    assert (tmp_path / "log").read_text().splitlines()[-1] == "line 19999"


def test_a_log_that_cannot_grow_does_not_stop_the_job(tmp_path: Path) -> None:
    """A full disk (here: a limit on file sizes in the pump) costs lines of the log, nothing else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = Output(tmp_path / "log")
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        output.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    process = subprocess.Popen(["sh", "-c", "head -c 200000 /dev/zero; exit 5"], stdout=output.stdout, stderr=output.stderr)
    output.close_write_ends()
    assert process.wait(20) == 5
    assert output.pid is not None
    assert output.ended(os.waitstatus_to_exitcode(os.waitpid(output.pid, 0)[1])) is None
    assert (tmp_path / "log").stat().st_size == 4096


# --- rank server


class Bench:
    """A server driven by hand."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.seen: list[events.Event] = []
        self.server = RankServer(folder / "s", self.selector, self.seen.append)
        self.server.run_id, self.server.attempt = "r", 1
        self.links: list[socket.socket] = []

    def turn(self, timeout: float = 0.05) -> None:
        """Handle what is ready."""
        for key, mask in self.selector.select(timeout):
            self.server.handle(key.fd, mask)

    def link(self, *messages_: object) -> socket.socket:
        """A client that has said these things."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.server.path))
        connection.settimeout(5)
        self.links.append(connection)
        for message in messages_:
            connection.sendall(message if isinstance(message, bytes) else messages.encode(message))  # type: ignore[arg-type]
        for _ in range(4):
            self.turn()
        return connection

    def close(self) -> None:
        self.server.close()
        self.selector.close()
        for connection in self.links:
            connection.close()


@pytest.fixture
def bench():  # type: ignore[no-untyped-def]
    """A server on a short path."""
    folder = make_private_dir("0-test")
    bench = Bench(folder)
    yield bench
    bench.close()
    remove_private_dir(folder)


def hello(rank: int = 0, attempt: int = 1, protocol: int = messages.PROTOCOL) -> messages.Hello:
    return messages.Hello(
        protocol=protocol, version="0", run_id="r", attempt=attempt, rank=rank, local_rank=rank, world_size=2, checkpoints="/c"
    )


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_rank_attaches_tells_and_is_lost_when_it_closes(bench: Bench) -> None:
    """Messages become events in order; the end of the connection is the loss of the rank."""
    link = bench.link(hello(), messages.Progress(step=3))
    link.close()
    bench.turn()
    assert [type(event).__name__ for event in bench.seen] == ["RankAttached", "RankProgressed", "RankLost"]


@pytest.mark.parametrize(
    "first",
    [
        b"\xff\xfe garbage\n",
        b"{}\n",
        b"x" * (messages.MAX_LINE_BYTES + 10),
        hello(attempt=7),
        hello(protocol=99),
        messages.Progress(step=1),
    ],
    ids=["garbage", "no type", "endless line", "old attempt", "other protocol", "no hello"],
)
def test_strangers_and_other_attempts_are_turned_away(bench: Bench, first: object) -> None:
    """Garbage, an endless line, an old attempt, another protocol, words before the hello: closed, no event, others unharmed."""
    good = bench.link(hello())
    bad = bench.link()
    bad.setblocking(False)
    data = memoryview(first if isinstance(first, bytes) else messages.encode(first))  # type: ignore[arg-type]
    while data:
        try:
            data = data[bad.send(data) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            break
        bench.turn()
    for _ in range(4):
        bench.turn(0.01)
    bad.settimeout(5)
    assert is_closed(bad)
    good.sendall(messages.encode(messages.Progress(step=1)))
    bench.turn()
    assert [type(event).__name__ for event in bench.seen] == ["RankAttached", "RankProgressed"]


def test_a_bad_line_of_an_attached_rank_does_not_cost_the_rank(bench: Bench) -> None:
    """A loss that is not a number, or a message of a newer version: the hint is lost, the attempt goes on."""
    link = bench.link(hello(), b'{"type":"Progress","step":1,"values":{"loss":null}}\n', b'{"type":"FromTheFuture"}\n')
    link.sendall(messages.encode(messages.Progress(step=2)))
    bench.turn()
    assert [type(event).__name__ for event in bench.seen] == ["RankAttached", "RankProgressed"]


def test_a_stranger_is_not_even_heard(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says who connects: another user's connection is closed before a word is read."""
    monkeypatch.setattr("supervise_daemon.runtime.rank_server.struct.unpack", lambda form, data: (1, 4242, 4242))
    link = bench.link(hello())
    assert is_closed(link)
    assert bench.seen == []


def test_a_peer_that_never_reads_costs_bounded_memory(bench: Bench) -> None:
    """Beyond the bound it is given up, as lost; broadcasting never blocks."""
    bench.link(hello())
    request = messages.FlushRequest(flush_id=1, purpose="leave", left_s=1.0, reason="x" * 500_000)
    for _ in range(20):
        bench.server.broadcast(request)
    assert bench.server.peers == {}
    assert [type(event).__name__ for event in bench.seen] == ["RankAttached", "RankLost"]


def test_a_verb_hears_lines_until_done_and_notices_a_daemon_that_goes_away(bench: Bench) -> None:
    """`ask_daemon` prints each line and returns the last one's code; without an answer it raises, never hangs."""
    bench.server.on_message = lambda peer, message: (
        bench.server.reply(peer, messages.ControlReply(text="saving")),
        bench.server.reply(peer, messages.ControlReply(text="saved", done=True, exit_code=5)),
    )  # type: ignore[assignment,return-value]
    said: list[str] = []
    codes: list[object] = []

    def ask(verb: str) -> None:
        try:
            codes.append(ask_daemon(str(bench.server.path), messages.Control(verb=verb), said.append, 5.0))  # type: ignore[arg-type]
        except (ContractError, OSError) as error:
            codes.append(type(error))

    def answered(verb: str, count: int) -> None:
        thread = threading.Thread(target=ask, args=(verb,))
        thread.start()
        eventually(lambda: (bench.turn(0.01), len(codes) >= count)[1], "an answer")
        thread.join()

    answered("flush", 1)
    bench.server.on_message = lambda peer, message: peer.connection.shutdown(socket.SHUT_RDWR)
    answered("stop", 2)
    assert (said, codes) == (["saving", "saved"], [5, ContractError])


# --- journal


def written(path: Path, attempts: int = 4) -> Memory:
    """A journal of a few attempts; the last memory."""
    scribe = Scribe()
    journal = Journal(path, pytest.fail, scribe)
    memory = Memory()
    for attempt in range(1, attempts + 1):
        crash = Crash(at=1.0, signature="1:x", step=3, resumed_from=None, started_training=True, newest_step=None)
        memory = Memory(attempt=attempt, crashes=(crash,) * attempt, preemptions=attempt, marker=f"m{attempt}")
        journal.remember(memory, 1.0)
        journal.append("step", 1.0, reason="x" * 100)
    scribe.sync()
    return memory


@pytest.mark.parametrize("keep", ["0", "1", "size // 2", "size - 1"])
def test_a_cut_journal_is_readable_and_attempt_numbers_never_go_down(tmp_path: Path, keep: str) -> None:
    """C60: cut anywhere; what is still whole counts, the folders of attempts give the rest, and writing goes on behind it."""
    run_dir = RunDir(tmp_path, "r")
    for attempt in range(1, 5):
        run_dir.attempt_dir(attempt)
    written(run_dir.journal)
    os.truncate(run_dir.journal, eval(keep, {"size": run_dir.journal.stat().st_size}))
    scribe = Scribe()
    recalled = Journal(run_dir.journal, pytest.fail, scribe).recall()
    assert max(recalled.attempt, run_dir.highest_attempt()) == 4
    assert recalled.attempt == {"0": 0, "1": 0, "size // 2": 2, "size - 1": 4}[keep]
    later = Journal(run_dir.journal, pytest.fail, scribe)
    later.remember(Memory(attempt=5), 2.0)
    assert later.recall() == Memory(attempt=5)


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\x00\xfe", b'{"kind":"memory","memory":{"attempt":"x"}}\n', b'["memory"]\n', b'{"kind":"memory"', b'\n"memory"\n'],
)
def test_garbage_behind_the_last_line_costs_only_itself(tmp_path: Path, garbage: bytes) -> None:
    """Foreign bytes and torn lines are stepped over, and new lines begin on a line of their own."""
    path = tmp_path / "j"
    memory = written(path)
    with path.open("ab") as file:
        file.write(garbage)
    assert Journal(path, pytest.fail, Scribe()).recall() == memory
    later = Journal(path, pytest.fail, Scribe())
    later.remember(Memory(attempt=9), 2.0)
    assert later.recall().attempt == 9


def test_a_refusing_disk_is_told_once_and_tolerated(tmp_path: Path) -> None:
    """No journal is better than no job; when there is room again it goes on."""
    said: list[str] = []
    journal = Journal(tmp_path / "gone" / "j", said.append, Scribe())
    journal.remember(Memory(attempt=1), 1.0)
    journal.remember(Memory(attempt=2), 1.0)
    assert len(said) == 1
    assert "going on without a journal" in said[0]
    (tmp_path / "gone").mkdir()
    journal.remember(Memory(attempt=3), 1.0)
    assert journal.recall().attempt == 3


# --- run directory


def test_the_lock_says_who_is_not_inherited_and_dies_with_its_owner(tmp_path: Path) -> None:
    """C80: a second owner is refused by name; a child of the owner does not keep the lock; kill -9 frees it."""
    code = f"""
import subprocess, sys
from pathlib import Path
from supervise_daemon.runtime.run_dir import RunDir
run = RunDir(Path({str(tmp_path)!r}), "r"); run.acquire()
kid = subprocess.Popen(["sleep", "300"], close_fds=False)
print(kid.pid, flush=True); sys.stdin.read()
"""
    with child(code) as process:
        assert process.stdout is not None
        kid = int(process.stdout.readline())
        try:
            with pytest.raises(AlreadyRunning, match=f"pid {process.pid} on {os.uname().nodename}"):
                RunDir(tmp_path, "r").acquire()
            process.kill()
            process.wait()
            assert (tmp_path / "r" / "lock").stat().st_size > 0
            mine = RunDir(tmp_path, "r")
            mine.acquire()
            mine.release()
        finally:
            os.kill(kid, signal.SIGKILL)


def test_highest_attempt_ignores_what_is_no_number(tmp_path: Path) -> None:
    """Counts folders by number, whatever else lies there."""
    run_dir = RunDir(tmp_path, "r")
    assert run_dir.highest_attempt() == 0
    run_dir.attempt_dir(7)
    run_dir.attempt_dir(12345)
    (run_dir.path / "attempts" / "notes").mkdir()
    assert run_dir.highest_attempt() == 12345


def test_only_our_own_private_folders_are_removed(tmp_path: Path) -> None:
    """A journal is only a file: what it names is removed only if it is provably ours."""
    other, link = tmp_path / "precious", tmp_path / "supervise-link"
    other.mkdir()
    link.symlink_to(other)
    for path in (other, link, tmp_path / "supervise-none"):
        remove_private_dir(path)
    assert other.exists()


# --- takeover


def test_an_old_tree_gets_its_time_and_is_then_killed(tmp_path: Path) -> None:
    """C59: found by the run directory alone, whatever became of the journal; it leaves by itself, or is killed; another run's stays."""
    said: list[str] = []
    assert take_over(tmp_path, 5, said.append) is None
    assert said == []

    def old(run_dir: Path, policy: str = "flush") -> subprocess.Popen[bytes]:
        told = {env.RUN_DIR: str(run_dir), env.ATTEMPT: "3", env.ON_SUPERVISOR_DEATH: policy}
        process = subprocess.Popen(["sleep", "300"], env={**os.environ, **told})
        eventually(lambda: trees.find_carrying(f"{env.RUN_DIR}={run_dir}"), "the old tree")
        return process

    other, process = old(tmp_path / "other"), old(tmp_path)
    alive: list[bool] = []

    def look(seconds: float) -> None:
        alive.append(process.poll() is None)
        threading.Event().wait(seconds)

    try:
        assert take_over(tmp_path, 0.3, said.append, look) is None
        assert alive and all(alive), "it had its time"
        assert process.poll() is not None  # psutil, waiting for it, took its exit status
        assert "attempt 3" in said[0]
        assert other.poll() is None

        leaving = old(tmp_path)

        def leave(seconds: float) -> None:
            leaving.terminate()
            leaving.wait(10)

        assert take_over(tmp_path, 3600, said.append, leave) is None
        assert leaving.returncode == -signal.SIGTERM

        process = old(tmp_path, "continue")
        refusal = take_over(tmp_path, 5, said.append)
        assert refusal is not None
        assert str(process.pid) in refusal
        assert process.poll() is None
    finally:
        for one in (other, process):
            one.kill()
            one.wait()


# --- workers, masking


def test_a_stuck_worker_does_not_hold_up_the_exit() -> None:
    """Digests of a big checkpoint take minutes; leaving does not wait for them."""
    code = """
import threading
from supervise_daemon.runtime.workers import Workers
begun = threading.Event()
Workers().submit(lambda: (begun.set(), threading.Event().wait())[0])
begun.wait()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0


def test_workers_answer_in_the_loop_and_raise_there(tmp_path: Path) -> None:
    """An event comes back through the descriptor; what a worker raised is raised by `take`."""
    workers = Workers()
    workers.submit(events.Begun)
    selector = selectors.DefaultSelector()
    selector.register(workers.fd, selectors.EVENT_READ)
    assert selector.select(10)
    assert workers.take() == [events.Begun()]
    assert workers.take() == []
    workers.submit(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert selector.select(10)
    with pytest.raises(ZeroDivisionError):
        workers.take()
    selector.close()


def test_secret_options_are_masked() -> None:
    """By name, in both spellings; a switch swallows no option."""
    words = ["t", "--token", "s1", "--api-key=s2", "--HF_TOKEN", "s3", "--password", "--lr", "1", "tokens.py"]
    assert mask_secrets(words) == [
        "t",
        "--token",
        "***",
        "--api-key=***",
        "--HF_TOKEN",
        "***",
        "--password",
        "--lr",
        "1",
        "tokens.py",
    ]
