"""Who is inside an engine: one thread at a time, and nobody after a call that was interrupted."""

import dataclasses
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

_T = TypeVar("_T")

# What calls are on record for: changing the engine, and keeping other threads out meanwhile.
_CHANGE, _RUN = "change", "run"


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call that is under way, or was interrupted.

    `frame` is the frame on that thread's stack for as long as the call is under way.
    """

    name: str
    thread: int
    thread_name: str
    frame: FrameType

    def is_running(self) -> bool:
        """Whether its thread is still in it; if not, it returned or an exception has left it.

        The frame itself is asked, by one call of C during which no other thread runs: Python
        refuses to clear a frame that is on a thread's stack, even below other frames. A frame that
        is on none only loses its local variables, which nobody needs. Following `f_back` from the
        top of the other thread's stack would sometimes miss the frame, because that thread goes on
        meanwhile.
        """
        try:
            self.frame.clear()
        except RuntimeError:
            return True
        return False


class Guard:
    """Lets one call at a time change an engine, and none after an exception inside such a call.

    An exception may come at any instruction (Ctrl-C does), also in this class. So a call is put on
    record before it changes anything, and its last instruction takes it off. Whoever finds a call
    on record asks whether it is still running. If so, the engine is in use. If not, and it is still
    on record, it was interrupted and the engine has ended, even where no handler could note why.

    Python looks for signals, and changes threads, where a function begins, after calls of functions
    written in C, and where a loop goes back. The lines of several statements below contain none of
    these.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._cause: BaseException | None = None
        self._ended = ""

    def check(self) -> None:
        """Raises RuntimeError if the engine has ended, or is in use by another call or thread."""
        call = self._calls.get(_CHANGE)
        if call is not None:
            self._refuse(call)
        call = self._calls.get(_RUN)
        if call is not None and call.thread != threading.get_ident() and call.is_running():
            raise _in_use(call)

    def change(self, name: str, change: Callable[[], _T]) -> _T:
        """Calls what changes the engine; an exception inside ends it.

        `name` is that of the engine's method, for messages. The result is the caller's only if the
        engine has not ended. Raises RuntimeError, without calling `change`, if the engine has ended
        or is in use.
        """
        self.check()
        call = _call(name, sys._getframe())
        try:
            found = self._calls.setdefault(_CHANGE, call)  # one thread wins
            if found is call:
                result = change()
                del self._calls[_CHANGE]; return result  # fmt: skip  # noqa: E702
        except BaseException as error:
            if self._calls.get(_CHANGE) is call:
                # It stays on record: nobody can get in any more.
                self._end(f"{type(error).__name__}: {error}".removesuffix(": "), error)
            raise
        self._refuse(found)

    def keep_others_out(self, name: str, work: Callable[[], _T]) -> _T:
        """Calls what changes the engine several times, and refuses other threads in between.

        An exception from `work` ends nothing. Raises RuntimeError, without calling `work`, if the
        engine has ended or is in use.
        """
        self.check()
        call = _call(name, sys._getframe())
        found = self._calls.setdefault(_RUN, call)
        if found is not call:
            if found.is_running():
                raise _in_use(found)
            self._calls[_RUN] = call  # that one was interrupted between two changes
        try:
            result = work()
        except BaseException:
            del self._calls[_RUN]
            raise
        del self._calls[_RUN]; return result  # fmt: skip  # noqa: E702

    def _refuse(self, call: Call) -> NoReturn:
        """Raises an error that says what became of a call found on record."""
        running = call.is_running()
        if not self._ended:
            # It may have come to its end since it was found.
            if running or self._calls.get(_CHANGE) is not call:
                raise _in_use(call)
            self._end(f"interrupted inside {call.name}", None)
        raise RuntimeError(f"this engine has ended: {self._ended}") from self._cause

    def _end(self, why: str, cause: BaseException | None) -> None:
        self._cause = cause
        self._ended = why


def _call(name: str, frame: FrameType) -> Call:
    return Call(name, threading.get_ident(), threading.current_thread().name, frame)


def _in_use(call: Call) -> RuntimeError:
    if call.thread == threading.get_ident():
        return RuntimeError(f"this engine is in use: {call.name} is under way in this thread")
    return RuntimeError(
        f"this engine is in use by another thread ({call.name} in {call.thread_name!r}, "
        f"number {call.thread})"
    )
