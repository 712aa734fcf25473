"""What requests get from a model that is a formula, and how their tokens are chosen, in numpy."""

import numpy as np

from turbojax.models.engine import Request
from turbojax.models.generation.sampling import NO_PENALTIES, NOTHING

VOCABULARY = 5


def next_token(tokens) -> int:
    """Depends on every token and its place; after a 4 at the beginning, sometimes there is none."""
    total = _total(tokens)
    if tokens[-1] == NOTHING or (tokens[0] == 4 and total % 31 == 0):
        return NOTHING
    return total % 7 % VOCABULARY


def _total(tokens) -> int:
    return sum((3 * i + 1) * (token + 1) for i, token in enumerate(tokens))


def logits_of(tokens) -> np.ndarray:
    """The most likely token is the next one; the others depend on the text, too."""
    token, total = next_token(tokens), _total(tokens)
    logits = np.array([(total * (7 * v + 3) + 5 * v) % 23 / 11.5 for v in range(VOCABULARY)])
    logits[token] = np.nan if token == NOTHING else 2.5
    return logits


def chosen_from(
    logits: np.ndarray, temperature: float = 0.0, top_k: int = 0, seed: int = 0, index: int = 0
) -> int:
    """The most likely token, or one that `seed` and `index` draw."""
    if np.any(np.isnan(logits)) or np.all(logits == -np.inf):
        return NOTHING
    if not temperature:
        return int(np.argmax(logits))
    kept = logits >= np.sort(logits)[::-1][top_k - 1] if top_k else np.ones(len(logits), bool)
    noise = np.random.default_rng([seed, index]).gumbel(size=len(logits))
    return int(np.argmax(np.where(kept, logits / np.float32(temperature) + noise, -np.inf)))


def penalized(logits: np.ndarray, text, prompt: int, penalties) -> np.ndarray:
    """Logits after repetition, presence and frequency of the tokens of a text."""
    repetition, presence, frequency = penalties
    logits = logits.copy()
    for token in {int(x) for x in text if x >= 0}:
        logits[token] *= repetition if logits[token] <= 0 else 1 / repetition
        count = sum(int(x) == token for x in text[prompt:])
        logits[token] -= (presence + frequency * count) * (count > 0)
    return logits


def expected(request: Request) -> tuple[tuple[int, ...], str]:
    """The result of a request that nothing disturbs, and why it ends."""
    tokens, prompt, sampling = list(request.tokens), len(request.tokens), request.sampling
    constraint = None if request.constraint is None else request.constraint.begin()
    penalties = (
        request.penalties.repetition,
        request.penalties.presence,
        request.penalties.frequency,
    )
    for index in range(request.max_new_tokens):
        logits = logits_of(tokens)
        for token, value in request.logit_bias.items():
            logits[token] += value
        if request.penalties != NO_PENALTIES:
            logits = penalized(logits, tokens, prompt, np.float32(penalties))
        if constraint is not None:
            bits = constraint.allowed()[0] >> np.arange(VOCABULARY, dtype=np.uint32) & 1
            logits = np.where(bits == 1, logits, -np.inf)
        options = sampling.temperature, sampling.top_k or 0, sampling.seed, index
        token = chosen_from(logits, *options)
        if token == NOTHING:
            return tuple(tokens[prompt:]), "failed"
        tokens.append(token)
        if constraint is not None:
            constraint.accept(token)
        if token in request.stop_tokens:
            return tuple(tokens[prompt:]), "stop"
    return tuple(tokens[prompt:]), "length"


class NoRepeats:
    """A constraint: no token twice in a row, and none of those that a number follows from."""

    def __init__(self, number: int) -> None:
        self.number = number

    def begin(self) -> "_NoRepeats":
        return _NoRepeats(self.number)


class _NoRepeats:
    def __init__(self, number: int) -> None:
        self.number, self.last, self.count = number, VOCABULARY, 0

    def allowed(self) -> np.ndarray:
        mask = (1 << VOCABULARY) - 1
        mask &= ~(1 << self.last) & ~((self.number >> self.count % 7) & 0b10101)
        return np.array([mask], np.uint32)

    def accept(self, token: int) -> None:
        assert self.allowed()[0] >> np.uint32(token) & 1, "a token that is not allowed"
        self.last, self.count = token, self.count + 1
