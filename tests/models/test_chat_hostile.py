"""Chat templates that would take all time or memory are refused; what real ones do is not."""

import time
import tracemalloc

import pytest

from turbojax.models.text.chat import render_template

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
DOUBLING = "{% for i in range(60) %}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2,
    "loops over messages": "{% for a in messages %}" * 15
    + "{% endfor %}" * 15
    + "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a variable of a range": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling by ~": "{% set n = namespace(x='aa') %}"
    + DOUBLING
    + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='aa') %}"
    + DOUBLING
    + "{% set n.x = n.x + n.x %}{% endfor %}",
    "~ within ~": "{% set n = namespace(x='aa') %}"
    + DOUBLING
    + "{% set n.x = 'a' ~ (n.x ~ n.x) ~ (n.x ~ n.x) %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}"
    + DOUBLING
    + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling in a block": "{% set n = namespace(x='aa') %}"
    + DOUBLING
    + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "lists that hold themselves twice": "{% set n = namespace(x=[1]) %}"
    + DOUBLING
    + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "the same as JSON": "{% set n = namespace(x=[1]) %}"
    + DOUBLING
    + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
    "plain text in a block": "{% set y %}{% for a in range(99999) %}"
    + "x" * 50_000
    + "{% endfor %}{% endset %}{{ y }}",
    "long output": "{% for a in range(99999) %}" + "x" * 5_000 + "{% endfor %}",
    "times": "{{ 'a' * 10**9 }}",
    "times, both ways": "{{ 10**9 * 'a' }}",
    "a list, many times": "{{ ([1] * 10**9)|length }}",
    "powers": "{{ 9 ** 99999999 }}",
    "growing numbers": "{% set n = namespace(x=99) %}"
    + DOUBLING
    + "{% set n.x = n.x * n.x %}{% endfor %}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "indented JSON": "{{ [1]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% from arguments": "{{ '%*d' % (10**9, 1) }}",
    "the filter format": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format from arguments": "{{ '{:>{w}}'.format(1, w='1000000000') }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "the filter replace": "{{ ('a' * 10**6)|replace('a', 'a' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6).replace('', 'a' * 10**6) }}",
    "replace by name": "{{ ('a' * 10**6)|replace(new='a' * 10**6, old='a') }}",
    "replace in a number": "{{ (9 ** 1000)|replace(9, 'a' * 10**7) }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "slices": "{{ [1]|slice(10**9, 'x')|list }}",
    "join": "{{ ('a' * 10**6).join('a' * 10**6) }}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}


@pytest.mark.quick(6, slow=0)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(monkeypatch, name):
    monkeypatch.setattr("turbojax.models.text.templates.SECONDS", 0.5)
    begun = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(ValueError, match="the chat template (refuses|is not readable)") as caught:
        render_template(HOSTILE[name], MESSAGES)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value).isprintable()
    assert time.perf_counter() - begun < 10
    assert most < 300_000_000


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 1700000000|string ~ '-' ~ 'a' * 3 }}", "1700000000-aaa"),
        ("{{ ('a' ~ ('b' ~ 1)) ~ none }}", "ab1None"),
        ("{{ '%05d' % 42 }}{{ '%s %s'|format('a', 2) }}{{ '{:>4}'.format(7) }}", "00042a 2   7"),
        ("{{ messages|map(attribute='content')|join(', ') }}", "hello, hi"),
        ("{{ messages[0].content.replace('l', 'LL') }}", "heLLLLo"),
        ("{{ messages[0]|tojson(indent=1) }}", '{\n "role": "user",\n "content": "hello"\n}'),
        ("{% set x %}{{ 2 ** 10 }}{% endset %}{{ x }}{{ [1] + [2] }}", "1024[1, 2]"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(3) }}", "<3>"),
        ("{% for m in messages recursive %}{{ loop.index }}{% endfor %}", "12"),
        ("{{ 'a b'.split(' ')|reverse|list }}", "['b', 'a']"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1719500000) }}", "<1719500000>"),
        ("{% set n = namespace(t=1719500000) %}{{ n.t }}", "1719500000"),
        ("{{ x|default(1719500000) }}{{ {'a': 1}.get('b', 2000000) }}", "17195000002000000"),
        ("{{ '%s' | format(1719500000) }}{{ '{}'.format(2000000) }}", "17195000002000000"),
        ("{{ ('a' * 30000).replace('b' * 30000, 'c' * 2000)|length }}", "30000"),
        ("{{ ('a' * 30000 ~ 'x').replace('a' * 30000, '') }}", "x"),
        ("{{ 'abc'|replace('b', '') }}{{ 121|replace(1, 'a') }}", "aca2a"),
    ],
)
def test_what_templates_do_otherwise(template, text):
    assert render_template(template, MESSAGES) == text


def test_a_long_conversation_is_no_attack():
    messages = [{"role": "user", "content": "word " * 2000}] * 1000
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content is string %}"
        "{% set ns.n = ns.n + 1 %}{{ '<' + m['role'] + '>' + m['content']|trim + '\n' }}"
        "{% endif %}{% endfor %}{{ ns.n }}"
    )
    begun = time.perf_counter()
    text = render_template(template, messages)
    assert text.endswith(">" + "word " * 1999 + "word\n1000")
    assert time.perf_counter() - begun < 5
