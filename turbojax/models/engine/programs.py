"""The sizes of steps: few, so that all of their programs can be compiled before they are needed."""

import threading
from collections.abc import Collection
from typing import NamedTuple

import jax

# Rows of decoding: powers of two, and half-way between them where a row costs much.
_FIRST_HALVES = 128
# Tokens of prompts: all that a step may have, a quarter, a sixteenth and a sixty-fourth.
_PROMPT_STEPS = (64, 16, 4, 1)
_SMALLEST_PROMPT_STEP = 64
# Tokens of a prompt, at least, for each that may be in a step, and how many may be.
_TOKENS_OF_A_PIECE, _MOST_PIECES = 128, 64
# How finely a step's prompts are cut up where they attend to pages. Pages of codes are expanded
# once for each part, which costs most where texts are long.
_PARTS, _PARTS_OF_LONG_CODES = 16, 4
_LONG = 16384
_SMALLEST_PART = 16


class PromptProgram(NamedTuple):
    """A program for pieces of prompts, and one token of each sequence that is decoding.

    A static argument of jitted steps, and therefore a tuple: jax hides an interrupt that comes
    inside an `__eq__` written in Python.

    Attributes:
      tokens: N, of all: first those of decoding sequences, then the pieces.
      rows: D, how many of the first tokens may be those of decoding sequences.
      pieces: M, at most.
      parts: Q, into how many parts the pieces are cut where they attend to pages; 0 if no layer
        attends to pages.
      part: tokens of a part, at most.
      is_dense: whether prompts that begin attend among themselves, and not to pages.
    """

    tokens: int
    rows: int
    pieces: int
    parts: int
    part: int
    is_dense: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all pieces, at most, so that there is room for all sequences that decode."""
        return self.tokens - self.rows

    def fits(self, pieces: list[int]) -> bool:
        """Whether it has room for pieces of these sizes."""
        return (
            sum(pieces) <= self.prompt_tokens
            and len(pieces) <= self.pieces
            and (not self.parts or sum(-(-n // self.part) for n in pieces) <= self.parts)
        )


def decode_program(rows: int) -> PromptProgram:
    """The program without prompts."""
    return PromptProgram(rows, rows, 0, 0, 0, is_dense=False)


def decode_sizes(slots: int) -> tuple[int, ...]:
    """Rows of the programs that only decode, ascending, the last one for all slots."""
    sizes, size = list[int](), 1
    while size < slots:
        sizes.append(size)
        if size >= _FIRST_HALVES and size * 3 // 2 < slots:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, slots)


def prompt_programs(
    slots: int, step_tokens: int, max_length: int, *, kinds: Collection[str], is_dense: bool
) -> tuple[PromptProgram, ...]:
    """The programs with prompts, ascending in size, the dense ones of a size first.

    The largest has `step_tokens` of prompts; `kinds` are the ways in which layers store pages. With
    `is_dense` there are dense programs too, which only layers of compressed pages use.
    """
    smallest = min(_SMALLEST_PROMPT_STEP, step_tokens)
    sizes = sorted({max(step_tokens // n, smallest) for n in _PROMPT_STEPS})
    has_codes = any(kind != "auto" for kind in kinds)
    most = _PARTS_OF_LONG_CODES if has_codes and max_length > _LONG else _PARTS
    found = []
    for size in sizes:
        part = max(-(-size // most), _SMALLEST_PART)
        parts = -(-size // part)
        pieces = min(max(size // _TOKENS_OF_A_PIECE, 4), _MOST_PIECES)
        if is_dense:
            to_pages = parts if "auto" in kinds else 0
            found.append(PromptProgram(size + slots, slots, pieces, to_pages, part, True))
        found.append(PromptProgram(size + slots, slots, pieces, parts, part, False))
    return tuple(found)


def reproducible_program(slots: int, step_tokens: int) -> PromptProgram:
    """The only program of an engine in which a row's numbers depend on nothing but the row."""
    return PromptProgram(step_tokens + slots, slots, 1, 1, step_tokens, is_dense=False)


# Counting programs, by thread: each engine asks for those of its own step -------------------------


# A program that was traced for one device is compiled for another without being traced again.
_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Counts(threading.local):
    traced = compiled = 0


class Seen(NamedTuple):
    """Programs that a thread has traced and compiled so far."""

    traced: int
    compiled: int


_counts = _Counts()


def note_traced() -> None:
    """Counts a program; to be called in the body of a jitted function, which runs once for each."""
    _counts.traced += 1


def count_traced() -> int:
    """Calls of `note_traced` in this thread."""
    return _counts.traced


def seen() -> Seen:
    """What this thread has traced and compiled so far."""
    return Seen(_counts.traced, _counts.compiled)


def compiled_since(before: Seen) -> int:
    """Programs that this thread has compiled since then."""
    return max(_counts.traced - before.traced, _counts.compiled - before.compiled)


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event == _COMPILED:
        _counts.compiled += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
