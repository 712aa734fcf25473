"""Ctrl-C ends the `turbojax` command soon, with one line and exit code 130; SIGTERM, with 143.

`KeyboardInterrupt` is raised in the main thread between two instructions of Python, so that what is
being written is finished or removed. But while XLA compiles, that thread is in C++ for half a
minute and more, and some callbacks swallow it. So a second thread hears of the signal at once, from
the C handler itself (`signal.set_wakeup_fd`). It ends the process if the main thread
has not ended it within `GRACE` seconds, or at a second signal. Either way the process ends by
`os._exit`: a regular exit of the interpreter destroys modules that XLA's threads still use, and
crashes.

Nothing but the standard library is imported: importing jax takes seconds, in which Ctrl-C is to
work, too. Only a process that was started as the command has its signals handled.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

GRACE = 1.5
"""Seconds that the main thread has to finish what it is doing."""

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_NOTHING = "nothing was written"


class _State:
    """State that the handler, the main thread and the watching thread share."""

    def __init__(self) -> None:
        self.watching = False
        self.running = False
        self.signal: int | None = None
        self.command = "turbojax"
        self.note: Callable[[], str] = lambda: _NOTHING
        self.told = False
        self.lock = threading.RLock()


_state = _State()


def begin(command: str) -> None:
    """Says which command runs: ``"turbojax serve"``. It has written nothing yet."""
    _state.command, _state.note, _state.told = command, lambda: _NOTHING, False


def say(note: Callable[[], str]) -> None:
    """Sets the note that an interrupted command prints from now on.

    It tells what was written and how to go on, such as ``"2 of 5 results are in out.jsonl"``.
    `note` is called when the command is interrupted, possibly by another thread: it must be quick
    and take no locks.
    """
    _state.note = note


def line() -> str:
    """The line to print: command, what happened to it, and its note."""
    word = _WORDS.get(signal.Signals(_state.signal or signal.SIGINT), "ended")
    try:
        note = _state.note()
    except Exception:  # a note must not keep the process from ending
        note = "what it had written is kept"
    return f"{_state.command}: {word}: {note}"


def exit_code() -> int:
    """128 and the number of the signal, as shells have it."""
    return 128 + (_state.signal or signal.SIGINT)


def watch() -> None:
    """Begins to handle signals, in the main thread; a second call does nothing.

    A signal that is ignored, as SIGINT is in the background of a shell's script, stays so.
    """
    if _state.watching:
        return
    _state.watching = True
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    threading.Thread(target=_wait, args=(read,), name="interrupt", daemon=True).start()


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Leaves signals to the code inside, such as a server that shuts down in its own way."""
    if not _state.watching:
        yield
        return
    write = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)


def run(application: Callable[[], object]) -> NoReturn:
    """Runs the command and ends the process: with SystemExit if it was not interrupted."""
    watch()
    _state.running = True
    try:
        sys.exit(application())  # type: ignore[arg-type]
    except BaseException as error:
        # Any exception after an interruption is a consequence of it.
        if _state.signal is None and not isinstance(error, KeyboardInterrupt):
            raise
    finally:
        _state.running = False
    _end()


def tell() -> None:
    """Writes the line to standard error, unless it has been written."""
    with _first_to_tell() as first:
        if first:
            print(line(), file=sys.stderr, flush=True)


def _handle(number: int, frame: object) -> None:
    second, _state.signal = _state.signal is not None, _state.signal or number
    if second or not _state.running:
        _end()
    # An interruption in a destructor cannot be raised: then the other thread ends the process.
    sys.unraisablehook = lambda unraisable: None
    raise KeyboardInterrupt


def _wait(read: int) -> None:
    """Runs in the watching thread."""
    while (number := os.read(read, 1)[0]) not in _WORDS:
        pass
    select.select([read], [], [], GRACE)
    # Not by `sys.stderr`, which the main thread may hold.
    _state.signal = _state.signal or number
    with _first_to_tell() as first:
        if first:
            # Over a progress bar, which hides the cursor.
            clean = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{clean}{line()}\n".encode(errors="replace"))
    os._exit(exit_code())


def _end() -> NoReturn:
    """Ends the process from the main thread."""
    with contextlib.suppress(OSError, ValueError):
        tell()
        sys.stdout.flush()
    os._exit(exit_code())


@contextlib.contextmanager
def _first_to_tell() -> Iterator[bool]:
    with _state.lock:
        first, _state.told = not _state.told, True
        yield first


def _is_command() -> bool:
    """Whether this process was started as `turbojax` or `python -m turbojax`."""
    if sys.argv[:1] == ["-m"]:  # a package is being imported to be run
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
        return "".join(options[-2:]).endswith("mturbojax")
    return bool(sys.argv) and Path(sys.argv[0]).name == "turbojax"


if _is_command() and threading.current_thread() is threading.main_thread():
    watch()
