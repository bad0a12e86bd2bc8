"""The Unix socket on which ranks and command-line verbs talk to the daemon. Turns messages into events; decides nothing.

Only the same user may connect (checked by the kernel's credentials), and only ranks of the current attempt are heard.
"""

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from supervise_daemon.core import events
from supervise_hooks.contract import messages
from supervise_hooks.contract.errors import ContractError

_MAX_UNSENT = 4 << 20


class Peer:
    """One connection: a rank once it has said hello, a verb once it has asked."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.hello: messages.Hello | None = None
        self.control: messages.Control | None = None
        self.lines = messages.LineBuffer()
        self.unsent = bytearray()


class RankServer:
    """Registers its descriptors with the loop's selector; `handle` is called for what is ready."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, emit: Callable[[events.Event], None]) -> None:
        self.path = path
        self.run_id = ""
        self.attempt = 0
        self.peers: dict[int, Peer] = {}
        self.on_message: Callable[[Peer, messages.FromRank], None] = lambda peer, message: None
        """Sees every message after it became an event: for status and control."""
        self._selector = selector
        self._emit = emit
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(512)
        selector.register(self._listener, selectors.EVENT_READ, self)

    def ranks(self) -> dict[int, Peer]:
        """Attached ranks of the current attempt."""
        return {peer.hello.rank: peer for peer in self.peers.values() if peer.hello is not None}

    def broadcast(self, message: messages.ToRank) -> None:
        """Send to every attached rank."""
        line = messages.encode(message)
        for peer in list(self.ranks().values()):
            self._send(peer, line)

    def reply(self, peer: Peer, message: messages.ControlReply) -> None:
        """Answer a verb; a verb that has gone away is no matter."""
        self._send(peer, messages.encode(message))

    def handle(self, fd: int, mask: int) -> None:
        """Something is ready on `fd`."""
        if fd == self._listener.fileno():
            self._accept()
            return
        peer = self.peers.get(fd)
        if peer is None:
            return
        if mask & selectors.EVENT_WRITE:
            self._send(peer, b"")
        if mask & selectors.EVENT_READ:
            self._receive(peer)

    def drop_ranks(self) -> None:
        """Close every rank's connection: the attempt is over."""
        for peer in list(self.ranks().values()):
            peer.hello = None
            self._close(peer)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        for peer in list(self.peers.values()):
            peer.hello = None
            if peer.unsent:  # last words to a verb: one blocking try
                peer.connection.settimeout(1.0)
                try:
                    peer.connection.sendall(peer.unsent)
                except OSError:
                    pass  # it has gone away; it can read status.json
                peer.unsent.clear()
            self._close(peer)
        self._selector.unregister(self._listener)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # gone before we looked, or out of descriptors: it will try again
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _gid = struct.unpack("3i", credentials)
        if uid not in (os.getuid(), 0):
            connection.close()
            return
        peer = Peer(connection, pid)
        self.peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, self)

    def _receive(self, peer: Peer) -> None:
        try:
            chunk = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._close(peer)
            return
        try:
            for line in peer.lines.feed(chunk):
                if peer.connection.fileno() >= 0:  # an answer to an earlier line may have closed it
                    self._read(peer, line)
        except ContractError:
            self._close(peer)  # not one of ours, or of another attempt

    def _read(self, peer: Peer, line: bytes) -> None:
        try:
            message = messages.decode_from_rank(line)
        except ContractError:
            if peer.hello is None:
                raise
            return  # of a newer version, or broken: losing a hint costs less than the rank, whose loss ends the attempt
        self._hear(peer, message)

    def _hear(self, peer: Peer, message: messages.FromRank) -> None:
        if isinstance(message, messages.Hello):
            if (message.run_id, message.attempt) != (self.run_id, self.attempt) or message.protocol != messages.PROTOCOL:
                raise ContractError(
                    f"cannot attach rank {message.rank}: it is of attempt {message.attempt} of {message.run_id!r}"
                )
            peer.hello = message
        elif isinstance(message, messages.Control):
            peer.control = message
        elif peer.hello is None:
            raise ContractError("cannot hear a rank that has not said hello")
        event = event_of(peer.hello, message)
        self.on_message(peer, message)
        if event is not None:
            self._emit(event)

    def _send(self, peer: Peer, line: bytes) -> None:
        peer.unsent += line
        try:
            sent = peer.connection.send(peer.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # its end of file follows
        del peer.unsent[:sent]
        if len(peer.unsent) > _MAX_UNSENT:
            self._close(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, wanted, self)

    def _close(self, peer: Peer) -> None:
        fd = peer.connection.fileno()
        self._selector.unregister(peer.connection)
        self.peers.pop(fd, None)
        peer.connection.close()
        if peer.hello is not None:
            self._emit(events.RankLost(rank=peer.hello.rank))


def event_of(hello: messages.Hello | None, message: messages.FromRank) -> events.Event | None:
    """The event a message stands for, or None for messages that only inform people. Pure."""
    if hello is None:
        return None
    rank = hello.rank
    match message:
        case messages.Hello():
            return events.RankAttached(rank=rank, world_size=message.world_size)
        case messages.Progress():
            return events.RankProgressed(rank=rank, step=message.step, step_s=message.step_s)
        case messages.RunCompleted():
            return events.RankCompleted(rank=rank, step=message.step)
        case messages.Failed():
            return events.RankFailed(rank=rank, step=message.step, error=message.error)
        case messages.StrayTerm():
            return events.RankTermed(rank=rank)
        case messages.Committed():
            return events.RankCommitted(rank=rank, flush_id=message.flush_id, step=message.step, why=message.why)
        case messages.Saved():
            return events.RankSaved(
                rank=rank, flush_id=message.flush_id, step=message.step, path=message.path, seconds=message.seconds
            )
        case messages.NothingToSave():
            return events.RankHadNothing(rank=rank, flush_id=message.flush_id, step=message.step)
        case messages.SaveFailed():
            return events.RankSaveFailed(rank=rank, flush_id=message.flush_id, step=message.step, error=message.error)
        case _:
            return None


def ask_daemon(path: str, control: messages.Control, on_text: Callable[[str], None], timeout_s: float) -> int:
    """Send a verb to a live daemon and follow its answers; returns the exit code. Raises OSError, ContractError, TimeoutError."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(messages.encode(control))
        lines = messages.LineBuffer()
        while time.monotonic() < deadline:
            chunk = connection.recv(1 << 16)
            if not chunk:
                raise ContractError("the supervisor went away before it answered")
            for line in lines.feed(chunk):
                reply = messages.decode_to_rank(line)
                if isinstance(reply, messages.ControlReply):
                    if reply.text:
                        on_text(reply.text)
                    if reply.done:
                        return reply.exit_code
    raise TimeoutError(f"no answer within {timeout_s:.0f} s")
