"""A chat template can neither reach out of its sandbox, nor run or grow without bound."""

from __future__ import annotations

import time
from datetime import datetime

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from headrace.server.chat_sandbox import TemplateLimit, TemplateSandbox, weight


def render(source: str, max_steps: int = 10_000, max_chars: int = 100_000, **variables: object) -> str:
    sandbox = TemplateSandbox(datetime.now)
    _, template = sandbox.compile_template(source)
    return sandbox.run(template, variables, max_steps, max_chars)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '%s' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ environment }}{{ environment.x }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_a_template_reaches_nothing_but_what_it_is_given(source: str) -> None:
    messages = [{"role": "user"}]
    try:
        text = render(source, messages=messages)
    except (SecurityError, TemplateError, TypeError):
        text = ""
    assert "class" not in text and "object" not in text and "uid" not in text
    assert messages == [{"role": "user"}]


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10**30) %}{% endfor %}",
    "{{ range(99999) | list | length }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ 2 ** 200 * 2 ** 200 }}",
    "{{ 'a'.ljust(10**9) }}{{ 'a'.rjust(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ '1'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ '%999999999d' % 5 }}",
    "{{ '%*d' % (999999999, 5) }}",
    "{{ '%999999999d' | format(5) }}",
    "{{ '{:>999999999}'.format(5) }}",
    "{{ '{:{}}'.format(5, 999999999) }}",
    "{{ ['a' * 9999] | tojson(indent=99999999) }}",
    "{{ ('a\n' * 9999) | indent(99999999) }}",
    "{{ ('a\n' * 9999) | indent('x' * 9999) }}",
    "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "{{ (['a' * 9999] * 9999) | join }}",
    "{{ ''.join(['a' * 9999] * 9999) }}",
    "{{ ('a' * 9999).join(['b'] * 9999) }}",
    "{% for i in range(99) %}{{ 'a' * 9999 }}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    *(
        # Each is a few hundred objects, and looked at item by item 2**60 of them.
        "{% set n = namespace(a=['x'], b=['x']) %}{% for i in range(60) %}"
        f"{{% set n.a = {twice.replace('n.', 'n.a')} %}}{{% set n.b = {twice.replace('n.', 'n.b')} %}}"
        "{% endfor %}{{ n.a == n.b }}"
        for twice in (
            "[n., n.]",
            "(n., n.)",
            "{'p': n., 'q': n.}",
            "dict(p=n., q=n.)",
            "n. + [n.]",
            "[n.] * 2",
            "[1, 2] | map(attribute='none', default=n.) | list",
            "[1, 2] | map(attribute='none', default=n.) | sort",
        )
    ),
    "{% macro f(a) %}{{ f(varargs, varargs) if a | length < 60 else a == a }}{% endmacro %}{{ f('x', 'x') }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x ~ 'a' }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ '%s' % n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | join }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_bomb_goes_off_at_a_bound(source: str) -> None:
    begin = time.process_time()
    with pytest.raises((TemplateLimit, RecursionError, OverflowError)):
        render(source)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("name", ["lipsum", "sum", "random", "urlize", "center"])
def test_what_no_chat_template_needs_is_not_there(name: str) -> None:
    with pytest.raises(TemplateError):
        render("{{ %s() }}" % name)  # noqa: UP031
    with pytest.raises(TemplateError, match="No filter"):
        render("{{ [] | %s }}" % name)  # noqa: UP031


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ 1 + 2 * 3 ** 2 % 5 }}", "4"),
        ("{{ [1] + [2] }}{{ 'ab' * 2 }}", "[1, 2]abab"),
        ("{{ '%s-%d' % ('a', 5) }}{{ '%s' | format('b') }}{{ '{}'.format('c') }}", "a-5bc"),
        ("{{ ['a', 'b'] | join(',') }}{{ ','.join(['c', 'd']) }}", "a,bc,d"),
        ("{{ [{'x': 1}, {'x': 2}] | join('+', attribute='x') }}", "1+2"),
        ("{{ 'aXbX' | replace('X', '-') }}{{ 'aXbX' | replace('X', '-', 1) }}{{ 'aX'.replace('X', '') }}", "a-b-a-bXa"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'ab'.center(6) }}|{{ '7'.zfill(3) }}", "  ab  |007"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [] %}{{ i }}{% else %}none{% endfor %}", "none"),
        ("{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}", "12"),
        ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}x{% endcall %}", "<x>"),
        ("{% for t in tree recursive %}{{ t.n }}{{ loop(t.below) }}{% endfor %}", "123"),
        ("{% set n = namespace(a=0) %}{% for i in range(4) %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}", "6"),
        ("{{ missing }}{{ missing is defined }}{{ none }}{{ true }}", "FalseNoneTrue"),
    ],
)
def test_the_bounds_do_not_change_what_a_template_says(source: str, text: str) -> None:
    tree = [{"n": 1, "below": [{"n": 2, "below": []}]}, {"n": 3, "below": []}]
    assert render(source, tree=tree) == text


def test_the_bounds_are_set_anew_for_each_rendering() -> None:
    sandbox = TemplateSandbox(datetime.now)
    _, template = sandbox.compile_template("{% for i in range(n) %}{{ i }}{% endfor %}")
    with pytest.raises(TemplateLimit, match="too many loops"):
        sandbox.run(template, {"n": 20}, 10, 1000)
    assert sandbox.run(template, {"n": 3}, 10, 1000) == "012"


def test_weight_counts_a_value_wherever_it_stands_and_stops_at_the_limit() -> None:
    assert weight({"ab": ["cde", 1]}, 1000) == 16 * 5 + 5
    shared: list[object] = []
    for _ in range(99):
        shared = [shared, shared]
    assert 1000 < weight(shared, 1000) < 2000
