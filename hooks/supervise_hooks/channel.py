"""The rank's line to its supervisor and to signals: one daemon thread, one selector. It carries; `orders` decides.

Alone (no socket) the thread sleeps until a signal comes.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from supervise_hooks.contract import messages
from supervise_hooks.contract.errors import ContractError, SuperviseError

_MAX_UNSENT = 4 << 20
_CONNECT_S = 10.0


class Handlers(msgspec.Struct, frozen=True):
    """What the listener thread calls."""

    message: Callable[[messages.ToRank], None]
    byte: Callable[[int], None]
    """A byte came through the pipe."""
    gone: Callable[[str], None]
    """The supervisor is no longer there, and why we think so."""
    tick: Callable[[float], float | None]
    """Called when due, with the time; returns when to call again, or None."""


class Channel:
    """Sends from any thread; receives in its own."""

    def __init__(self, path: str | None) -> None:
        """Connects if there is a path. Raises SuperviseError when nobody listens there."""
        self._socket = _connect(path) if path else None
        self._read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        # A forked data worker must not keep the line open: its end of file tells the supervisor that the rank is gone.
        os.register_at_fork(after_in_child=self._abandon)

    @property
    def connected(self) -> bool:
        """Whether a supervisor is at the other end, as far as we know."""
        return self._socket is not None

    def start(self, handlers: Handlers) -> None:
        """Begin to listen."""
        self._thread = threading.Thread(target=self._listen, args=(handlers,), name="supervise-listener", daemon=True)
        self._thread.start()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message and send what the socket takes now; the thread sends the rest. Never blocks, never raises."""
        if self._socket is None or self._closed:
            return
        with self._sending:
            self._unsent += messages.encode(message)
            if len(self._unsent) > _MAX_UNSENT:
                self._unsent.clear()  # nobody reads; the files are the truth
        self._push()
        if self._unsent:
            self.wake()

    def wake(self) -> None:
        """Make the thread look again."""
        try:
            os.write(self.write_fd, b"\0")
        except OSError:
            pass  # full, so it is awake anyway; or closed

    def drain(self, limit_s: float) -> None:
        """Wait until everything queued is on its way: before the process ends."""
        deadline = time.monotonic() + limit_s
        while self._unsent and self._socket is not None and time.monotonic() < deadline:
            self._push()
            time.sleep(0.005)

    def close(self) -> None:
        """Stop listening. Safe to call twice, and from the listener thread itself."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        if self._thread is None or not self._thread.is_alive():
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        os.close(self._read_fd)
        os.close(self.write_fd)

    def _abandon(self) -> None:
        if not self._closed:
            self._closed = True
            self._close_descriptors()

    def _push(self) -> None:
        connection = self._socket
        with self._sending:
            if connection is None or not self._unsent:
                return
            try:
                sent = connection.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the end of file follows
                return
            del self._unsent[:sent]

    def _listen(self, handlers: Handlers) -> None:
        lines = messages.LineBuffer()
        due = handlers.tick(time.monotonic())
        while not self._closed:
            readable = self._wait(due)
            if self._read_fd in readable:
                for byte in filter(None, self._read_pipe()):
                    handlers.byte(byte)
            connection = self._socket
            if connection is not None and connection.fileno() in readable:
                self._receive(connection, lines, handlers)
            now = time.monotonic()
            if due is None or now >= due or self._read_fd in readable:
                due = handlers.tick(now)

    def _wait(self, due: float | None) -> set[int]:
        # poll, not epoll: a forked child would share the epoll set.
        with selectors.PollSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            if self._socket is not None:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                selector.register(self._socket, wanted)
            ready = selector.select(None if due is None else max(0.0, due - time.monotonic()))
        if any(mask & selectors.EVENT_WRITE for _, mask in ready):
            self._push()
        return {key.fd for key, mask in ready if mask & selectors.EVENT_READ}

    def _read_pipe(self) -> bytes:
        try:
            return os.read(self._read_fd, 4096)
        except BlockingIOError:
            return b""

    def _receive(self, connection: socket.socket, lines: messages.LineBuffer, handlers: Handlers) -> None:
        why = "it has closed the connection"
        try:
            chunk = connection.recv(1 << 16)
            received = [messages.decode_to_rank(line) for line in lines.feed(chunk)]
        except BlockingIOError:
            return
        except OSError as error:
            chunk, received, why = b"", [], str(error)
        except ContractError as error:
            chunk, received, why = b"", [], str(error)
        for message in received:
            handlers.message(message)
        if not chunk:
            self._socket = None
            connection.close()
            handlers.gone(why)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise SuperviseError(
            f"cannot attach to the supervisor at {path}: {error.strerror or error}. "
            "It has ended, or SUPERVISE_SOCKET is left over from it: unset it to run alone"
        ) from error
    connection.setblocking(False)
    return connection
