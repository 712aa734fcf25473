"""Commands in processes of their own, interrupted at a chosen moment."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# On an idle machine an interrupted command ends in 1.6 s. Test processes share the cores with
# others, which may compile: twice what users are promised.
SECONDS = 2 * 2.0
# Lines of `python -X importtime` and of JAX_LOG_COMPILES, by which a moment is found.
_LOG = ("import time:", "Compiling jit", "Finished ", "Persistent compilation cache", "WARNING:20")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, the seconds since the signal, lines on standard error."""

    code: int
    seconds: float
    lines: list[str]

    def check(self, code: int = 130, seconds: float = SECONDS) -> str:
        """Asserts that it ended in time, with this code and one line, which is returned."""
        assert (self.code, len(self.lines)) == (code, 1), self
        assert self.seconds < seconds, self
        return self.lines[0]

    def check_command(self) -> str:
        """The same of a command, which may have said other things before."""
        assert not [x for x in self.lines if "Traceback" in x or "Error" in x], self
        own = [x for x in self.lines if x.startswith("turbojax")]
        return dataclasses.replace(self, lines=own).check()


def environment(cache: Path) -> dict[str, str]:
    """As users compile, with a cache of programs of its own; it logs what is compiled."""
    unset = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    return {
        **{name: value for name, value in os.environ.items() if name not in unset},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(cache),
        "JAX_LOG_COMPILES": "1",
        "COLUMNS": "200",
    }


def turbojax(*arguments: str, options: Sequence[str] = ()) -> list[str]:
    """What starts the command."""
    return [sys.executable, *options, "-m", "turbojax", *arguments]


def interrupted(
    command: Sequence[str],
    env: dict[str, str],
    moment: str,
    delay: float = 0.0,
    signals: Sequence[int] = (signal.SIGINT,),
) -> Ended:
    """Starts a process and sends it signals.

    Args:
      command: see `turbojax`.
      env: see `environment`.
      moment: what standard error holds when it has come.
      delay: seconds to wait from then on.
      signals: what is sent, a tenth of a second apart.
    """
    lines, come = list[str](), threading.Event()
    with _not_ignored():
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def read() -> None:
        for line in process.stderr:
            if moment in line:
                come.set()
            if line.strip() and not any(log in line for log in _LOG):
                lines.append(line.strip())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while not come.wait(0.02):
            assert process.poll() is None, f"ended before {moment!r}: {lines}"
        time.sleep(delay)
        assert process.poll() is None, f"ended within {delay} s of {moment!r}: {lines}"
        begun = time.perf_counter()
        for i, number in enumerate(signals):
            time.sleep(0.1 * (i > 0))
            process.send_signal(number)
        code = process.wait(60)
        seconds = time.perf_counter() - begun
    finally:
        process.kill()
        reader.join()
        process.stderr.close()
    return Ended(code, seconds, lines)


@contextlib.contextmanager
def _not_ignored() -> Iterator[None]:
    """A process inherits it if SIGINT is ignored, as in the background of a script."""
    old = signal.getsignal(signal.SIGINT)
    if old is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
