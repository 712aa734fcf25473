"""Requests before an engine has them: whether they fit it, and the sequences that they become."""

import dataclasses
from collections.abc import Sequence as Many
from typing import Any

from turbojax import _checks
from turbojax.models.config import TransformerConfig
from turbojax.models.engine import requests
from turbojax.models.engine.groups import Group
from turbojax.models.engine.requests import Request
from turbojax.models.engine.sampler import wanted_of
from turbojax.models.engine.sequence import Sequence
from turbojax.models.generation.stopping import TextStream, check_stops
from turbojax.models.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Admission:
    """What a request is checked against. It never changes, so any thread may ask at any time."""

    config: TransformerConfig
    max_length: int
    step_tokens: int
    groups: Many[Group]
    tokenizer: Tokenizer | None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.groups[0].allocator.page_size

    @property
    def sizes(self) -> dict[str, Any]:
        """What requests are checked against, for comparing two engines."""
        return {
            "config": self.config,
            "max_length": self.max_length,
            "step_tokens": self.step_tokens,
            "page_size": self.page_size,
            "pages": tuple(group.allocator.num_pages for group in self.groups),
            "tokenizer": self.tokenizer,
        }

    def sequences(self, request: Request, count: int) -> list[Sequence]:
        """The sequences of `count` samples of a request, unnumbered; raises as `Engine` does."""
        _checks.check_sizes(count=count)
        if not isinstance(request, Request):
            raise TypeError(f"request is a {type(request).__name__}, must be a Request")
        requests.check_vocabulary(request, self.config.vocab_size)
        self._check_room(request)
        samples = [request]
        for i in range(1, count):
            seed = (request.sampling.seed + i) % 2**32
            sampling = dataclasses.replace(request.sampling, seed=seed)
            samples.append(dataclasses.replace(request, sampling=sampling))
        return [self._sequence(sample) for sample in samples]

    def _check_room(self, request: Request) -> None:
        """Raises ValueError unless a request fits alone."""
        parts = f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
        if request.total > self.max_length:
            raise ValueError(f"{parts} must be at most max_length={self.max_length}")
        for group in self.groups:
            pages, there = group.pages_of(request, self.step_tokens), group.allocator.num_pages
            if pages > there:
                name = "num_pages" if group is self.groups[0] else "window_pages"
                raise ValueError(f"{parts} need {pages} pages, must be at most {name}={there}")

    def _sequence(self, request: Request) -> Sequence:
        tokens, strings = check_stops(request.stop_tokens, request.stop_strings, self.tokenizer)
        text = None
        if strings and self.tokenizer is not None:
            text = TextStream(self.tokenizer.stream(request.tokens), strings)
        wanted = wanted_of([request])
        return Sequence(
            -1,
            request,
            tokens,
            text,
            None if request.constraint is None else request.constraint.begin(),
            is_plain=wanted.is_plain,
            can_guess=wanted._replace(kind="greedy").is_plain,
        )
