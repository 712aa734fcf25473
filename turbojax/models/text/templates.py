"""Where chat templates run: jinja2's sandbox, which they cannot leave, and limits of time and size.

Templates come with weights from anywhere. These are bounded: the time, checked in every pass of a
loop, every call and every filter; every text and list that operators, filters, calls and
``{% set %}`` blocks make; all of them together; and the text that comes out. A single comparison
of values that hold each other many times over is not bounded.
"""

import contextvars
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

SECONDS = 10.0
"""Most seconds of a rendering."""
MOST_CHARACTERS = 20_000_000
"""Most characters of a text, or entries of a list."""
_MOST_ENTRIES = 100_000
"""Most entries of nested lists and mappings that are written as text."""
_MOST_TOGETHER = 1_000_000_000
"""Most characters and entries of everything that a rendering makes."""
_LARGEST_NUMBER = 1_000_000
"""Largest number among the arguments of what pads, indents and repeats."""
_MOST_BITS = 4096
_WIDE_FORMAT = re.compile(r"\d{6}|%[^a-zA-Z%]*\*|:[^{}]*\{")
# Filters that do not write lists as text, so the content of lists need not be measured.
_STRUCTURAL_TEXT = """
abs attr batch count d default dictsort first float groupby int items last length list map max min
random reject rejectattr reverse round select selectattr slice sort sum unique
"""
_STRUCTURAL = frozenset(_STRUCTURAL_TEXT.split())
# Methods and filters that make as much as one of their arguments, a number, says.
_COUNTING_TEXT = """
batch center expandtabs generate_lorem_ipsum indent ljust rjust round safe_range slice to_bytes
tojson truncate wordwrap zfill
"""
_COUNTING = frozenset(_COUNTING_TEXT.split())
# Those that put one text into many places of another.
_MULTIPLYING = frozenset(("expandtabs", "join", "replace", "translate"))


class _Budget:
    """The time and size that a rendering may still use."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + SECONDS
        self.together = _MOST_TOGETHER

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise jinja2.TemplateError(f"it takes more than {SECONDS:g} seconds")

    def take(self, size: int) -> None:
        """Raises TemplateError unless a value of this size may be made."""
        self.together -= size
        if size > MOST_CHARACTERS or self.together < 0:
            raise jinja2.TemplateError(
                f"it makes texts or lists of more than {MOST_CHARACTERS:,} characters or entries, "
                f"or of {_MOST_TOGETHER:,} in all"
            )


# While templates are compiled there is no budget, and filters raise, so that even constant
# expressions are computed only when a template is rendered.
_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("_budget")


class _Limits(jinja2.ext.Extension):
    """Functions whose calls are put into templates; the extension has no tag."""

    def step(self, literal: int) -> str:
        """Begins a loop's pass or a macro's body, with `literal` characters of plain text."""
        budget = _budget.get()
        budget.check_time()
        budget.take(literal)
        return ""

    def concatenate(self, *parts: Any) -> str:
        """The operator ``~``."""
        _budget.get().take(_measure(parts))
        return "".join(map(str, parts))


class BoundedTemplate(jinja2.Template):
    """A template with a budget for every rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """See `jinja2.Template`; raises its TemplateError also where it would exceed the limits."""
        token = _budget.set(_Budget())
        try:
            written, size = [], 0
            for text in self.generate(*args, **kwargs):
                size += len(text)
                if size > MOST_CHARACTERS:
                    raise jinja2.TemplateError(
                        f"it writes more than {MOST_CHARACTERS:,} characters"
                    )
                written.append(text)
            return "".join(written)
        finally:
            _budget.reset(token)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, with the limits of this module."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    template_class = BoundedTemplate

    def __init__(self, **options: Any) -> None:
        extensions = [*options.pop("extensions", ()), _Limits]
        super().__init__(extensions=extensions, finalize=_finalize, **options)

    def from_string(
        self,
        source: str | jinja2.nodes.Template,
        globals: MutableMapping[str, Any] | None = None,
        template_class: type[jinja2.Template] | None = None,
    ) -> jinja2.Template:
        """See `jinja2.Environment`."""
        self.filters = {name: _bounded(name, x) for name, x in self.filters.items()}
        tree = self.parse(source) if isinstance(source, str) else source
        code = self.compile(_with_limits(tree, self.extensions[_Limits.identifier]))
        kind = template_class or self.template_class
        return kind.from_code(self, code, self.make_globals(globals), None)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See `jinja2.sandbox.SandboxedEnvironment`."""
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See `jinja2.sandbox.SandboxedEnvironment`."""
        own = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        # `__self__` of a built-in function is its module, which is not measured.
        own = (own,) if isinstance(own, str | bytes | list | tuple) else ()
        _check_arguments(getattr(__obj, "__name__", ""), own, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _budget.get().take(len(result) if isinstance(result, str | bytes | list | tuple) else 0)
        return result


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Counts what an expression writes, even if it is kept and not written out yet."""
    del context
    _budget.get().take(_measure((value,)))
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with checks of its arguments and of what it makes."""
    if hasattr(function, "is_bounded"):
        return function

    @functools.wraps(function)  # also copies what jinja2 must pass to it
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        given = [x for x in args if not isinstance(x, _PASSED)]
        _check_arguments(name, given[:1], given[1:], kwargs)
        if name not in _STRUCTURAL:
            budget.take(_measure((*given, *kwargs.values())))
        result = function(*args, **kwargs)
        budget.take(len(result) if isinstance(result, str | list | tuple) else 0)
        return result

    bounded.is_bounded = True  # type: ignore[attr-defined]
    return bounded


# Objects that filters may be passed before their arguments.
_PASSED = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


def _check_arguments(
    name: str, own: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises TemplateError if a call would make much from little; `own` is what it applies to."""
    budget, given = _budget.get(), (*args, *kwargs.values())
    budget.check_time()
    for x in given if name in _COUNTING else ():
        if isinstance(x, int) and abs(x) > _LARGEST_NUMBER:
            raise jinja2.TemplateError(f"{name} has an argument above {_LARGEST_NUMBER:,}")
    if name in ("format", "format_map"):
        _check_format(own[0] if own else "")
    texts = (*own, *args)[:3]
    if name == "replace" and len(texts) == 3 and all(isinstance(x, str) for x in texts):
        text, old, new = texts
        budget.take(len(text) + text.count(old) * max(len(new) - len(old), 0))
    elif name in _MULTIPLYING:
        # The two longest: the text that is put in, and the one it is put into.
        sizes = sorted(1 + _measure((x,)) for x in (*own, *given))[-2:]
        budget.take(math.prod(sizes))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    budget, sizes = _budget.get(), [_length(x) for x in (left, right)]
    budget.check_time()
    if operator == "+":
        budget.take(sum(size or 0 for size in sizes))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        budget.take(len(left) + _measure((right,)))
    elif operator == "*" and sizes != [None, None]:
        times = [x for x in (left, right) if isinstance(x, int)]
        budget.take(sum(size or 0 for size in sizes) * max(times, default=1))
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = [max(abs(x).bit_length(), 1) for x in (left, right)]
        most = bits[0] * abs(right) if operator == "**" else sum(bits)
        if most > _MOST_BITS:
            raise jinja2.TemplateError(f"{operator} makes a number of more than {_MOST_BITS} bits")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise jinja2.TemplateError("a format must not have widths of six digits or from arguments")


def _length(x: Any) -> int | None:
    return len(x) if isinstance(x, str | bytes | list | tuple) else None


def _measure(values: Any) -> int:
    """Characters and entries of what is to be written; counting stops above the limits."""
    size, entries, waiting = 0, 0, list(values)
    while waiting:
        x, entries = waiting.pop(), entries + 1
        if size > MOST_CHARACTERS or entries > _MOST_ENTRIES:
            return MOST_CHARACTERS + 1
        size += 1 if _length(x) is None else len(x)
        if isinstance(x, Mapping):
            waiting += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple):
            waiting += x
    return size


def _with_limits(tree: jinja2.nodes.Template, limits: Any) -> jinja2.nodes.Template:
    """The template with a step in every loop and macro, and its own operator ``~``."""
    nodes = jinja2.nodes
    every: list[Any] = [tree, *tree.find_all(nodes.Node)]
    for node in every:
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            literal = sum(len(x.data) for body in node.body for x in _literals(body))
            step = limits.call_method("step", [nodes.Const(literal)], lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
    for node in every:
        for name, value in node.iter_fields():
            if isinstance(value, list):
                # In place, because an operator within an operator is in another list.
                value[:] = [_own_operator(x, limits) for x in value]
            else:
                setattr(node, name, _own_operator(value, limits))
    tree.set_environment(limits.environment)
    return tree


def _literals(node: jinja2.nodes.Node) -> list[jinja2.nodes.TemplateData]:
    kind = jinja2.nodes.TemplateData
    return [*([node] if isinstance(node, kind) else []), *node.find_all(kind)]


def _own_operator(value: Any, limits: Any) -> Any:
    if isinstance(value, jinja2.nodes.Concat):
        return limits.call_method("concatenate", value.nodes, lineno=value.lineno)
    return value
