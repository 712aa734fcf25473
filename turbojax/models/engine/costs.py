"""What steps have cost so far, from which it is decided which way costs less from now on.

There are two such decisions: whether the pages of a request that leaves the pool are moved away and
back or its tokens are computed again, and whether a step has guesses.
"""

# The weight of the newest measurement in a running mean.
_WEIGHT = 0.25
# Assumed before anything was moved: pages go through host memory, no faster than this.
_FIRST_BYTES_PER_SECOND = 8e9
# Steps with fewer tokens of prompts say little about how fast these run.
_FEWEST_TOKENS = 32
# Steps of guesses before they are compared with plain ones, and after how many steps the way that
# seemed to be slower is tried again.
_FIRST_GUESSES, _TRY_AGAIN = 8, 32


class Costs:
    """Times measured so far; without `may_recompute`, tokens are never computed again."""

    def __init__(self, *, may_recompute: bool) -> None:
        self._may_recompute = may_recompute
        self._bytes_per_second = _FIRST_BYTES_PER_SECOND
        self._tokens_per_second: float | None = None
        self._plain_seconds: float | None = None
        self._guess_seconds: float | None = None
        self._new_tokens = 1.0  # of a sequence in a step of guesses
        self._guesses = self._asked = 0

    def swapped(self, nbytes: int, seconds: float) -> None:
        """Notes that so many bytes came to host memory in this time."""
        if nbytes and seconds > 0:
            self._bytes_per_second = _mean(self._bytes_per_second, nbytes / seconds)

    def stepped(
        self, seconds: float, *, prompt_tokens: int, guesses: bool, sequences: int, new_tokens: int
    ) -> None:
        """Notes a step's time; it ran `prompt_tokens`, and `sequences` got `new_tokens` in all."""
        if prompt_tokens >= _FEWEST_TOKENS and seconds > 0:
            self._tokens_per_second = _mean(self._tokens_per_second, prompt_tokens / seconds)
        if guesses:
            self._guesses += 1
            self._new_tokens = _mean(self._new_tokens, new_tokens / max(sequences, 1))
            self._guess_seconds = _mean(self._guess_seconds, seconds)
        elif not prompt_tokens:
            self._plain_seconds = _mean(self._plain_seconds, seconds)

    def recomputes(self, nbytes: int, tokens: int) -> bool:
        """Whether computing these tokens takes less time than moving their pages away and back."""
        if not self._may_recompute or self._tokens_per_second is None:
            return False
        return tokens / self._tokens_per_second < 2 * nbytes / self._bytes_per_second

    def guessing_pays(self) -> bool:
        """Whether the next step should be one of guesses; to be asked before each step.

        Guesses are right in one text and wrong in the next, and what they cost depends on how many
        sequences there are: so both ways are tried again now and then.
        """
        self._asked += 1
        if self._guesses < _FIRST_GUESSES:
            return True
        if self._plain_seconds is None or self._guess_seconds is None:
            return False
        pays = self._new_tokens * self._plain_seconds >= self._guess_seconds
        return pays != (self._asked % _TRY_AGAIN == 0)


def _mean(before: float | None, x: float) -> float:
    return x if before is None else before + _WEIGHT * (x - before)
