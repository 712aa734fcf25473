"""The fields of a request's JSON object: each is asked for, and what nobody asks for is refused."""

import math
from collections.abc import Sequence
from typing import Any

from turbojax import _json
from turbojax.server.errors import ApiError

MOST_BRACKETS = 500_000
"""Brackets that a body may have. Each may begin a list or an object, and while Python makes these,
some 0.2 µs each, no other thread runs."""


class Fields:
    """Reads a JSON object, in which null is the same as no field.

    `within` comes before the fields' names in errors, such as ``"stream_options."``.
    """

    def __init__(self, values: dict[str, Any], within: str = "") -> None:
        self._values = values
        self._within = within
        self._read = set[str]()

    @classmethod
    def of_body(cls, body: bytes) -> "Fields":
        """The fields of a body; ApiError if it is no JSON object, or has too many brackets."""
        if (count := body.count(b"[") + body.count(b"{")) > MOST_BRACKETS:
            raise ApiError(
                f"the body has {count} of [ and {{, must have at most {MOST_BRACKETS}",
                status=413,
                code="body_too_large",
            )
        try:
            values = _json.parse(body)
        except ValueError as error:  # bytes that are no UTF-8 among them
            raise ApiError(f"the body is not JSON: {_json.line(str(error))}") from error
        if not isinstance(values, dict):
            raise ApiError(f"the body is {_json.shown(values)}, must be a JSON object")
        return cls(values)

    def name(self, name: str) -> str:
        """A field's name as errors give it."""
        return self._within + name

    def error(self, name: str, requirement: str) -> ApiError:
        """Says that a field's value is not what it must be."""
        shown = _json.shown(self._values.get(name))
        return ApiError(f"{self.name(name)}={shown} must be {requirement}", param=self.name(name))

    def raw(self, name: str) -> Any:
        """A field as it is; None if it is not there."""
        self._read.add(name)
        return self._values.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        """An integer within bounds, both included."""
        value = self.raw(name)
        if value is None:
            return None
        above = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not above or (most is not None and value > most):
            limits = f"of {least} or more" if most is None else f"within {least}..{most}"
            raise self.error(name, f"an integer {limits}")
        assert isinstance(value, int)
        return value

    def number(
        self,
        name: str,
        default: float,
        least: float = -math.inf,
        most: float = math.inf,
        *,
        positive: bool = False,
    ) -> float:
        """A finite number within bounds, both included; or above 0."""
        value = self.raw(name)
        if value is None:
            return default
        found = _finite(value)
        if found is None or not least <= found <= most or (positive and found <= 0):
            if positive:
                limits = " above 0" + ("" if most == math.inf else f" and at most {most:g}")
            elif most == math.inf:
                limits = "" if least == -math.inf else f" of {least:g} or more"
            else:
                limits = f" within {least:g}..{most:g}"
            raise self.error(name, f"a number{limits}")
        return found

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """One text or at most so many, none empty or of more than `longest` characters."""
        value = self.raw(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(x, str) and x for x in values):
            raise self.error(name, "a text or a list of texts, none of them empty")
        if len(values) > most:
            raise self.error(name, f"{most} texts at most")
        if max(map(len, values), default=0) > longest:
            raise self.error(name, f"of texts of {longest} characters at most")
        return tuple(values)

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A list of tokens."""
        value = self.raw(name)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(is_token(x, vocab_size) for x in values):
            raise self.error(name, f"a list of tokens within 0..{vocab_size - 1}")
        return tuple(values)

    def inner(self, name: str) -> "Fields | None":
        """An object inside this one."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.name(name)}.")

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Refuses a field, saying `why`, unless its value asks for what is done anyway."""
        value = self.raw(name)
        # True is 1 to Python, not to JSON.
        same = any(type(value) is type(x) and value == x for x in allowed)
        if value is not None and not same:
            shown = f"{self.name(name)}={_json.shown(value)}"
            raise ApiError(f"{shown}: {why}", param=self.name(name), code="unsupported_parameter")

    def refuse_others(self) -> None:
        """Refuses the first field that no method was asked for."""
        for name in self._values:
            if name not in self._read:
                shown = self.name(_json.shown_name(name))
                raise ApiError(f"{shown} is not known here", param=shown, code="unknown_parameter")


def is_token(value: object, vocab_size: int) -> bool:
    """Whether a value of JSON is a token of a vocabulary."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _finite(value: object) -> float | None:
    """A value of JSON as a finite number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
