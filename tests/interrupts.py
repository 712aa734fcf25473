"""Interrupting a function at any line of the library's code."""

import sys
from pathlib import Path

import turbojax

_LIBRARY = str(Path(turbojax.__file__).parent)


class Interruption:
    """Raises at the n-th line of the library that runs inside a `with` block; counts lines.

    Generators that are not exhausted are not traced; nested blocks are not supported.

    Attributes:
      lines: how many ran so far.
    """

    def __init__(self, at=None, error=KeyboardInterrupt, within=""):
        self.lines = 0
        self._at = at
        self._error = error
        self._within = f"{_LIBRARY}/{within}"

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(self._within) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise self._error(f"at line {self.lines}")
        return self._line
