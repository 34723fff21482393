"""fault 54: templates are programs from strangers."""

import pytest

from tinyllm.errors import ChatTemplateError
from tinyllm.text import budget
from tinyllm.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source, **kwargs):
    return ChatTemplate({"default": source}).render(MESSAGES, **kwargs)


@pytest.fixture
def small_budget(monkeypatch):
    """What takes a second with the real limits takes a moment with these."""
    monkeypatch.setattr(budget, "MAX_STEPS", 5_000)
    monkeypatch.setattr(budget, "MAX_SIZE", 50_000)
    monkeypatch.setattr(budget, "MAX_WORK", 500_000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace(a=1) %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__globals__['os'].system('true') }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_a_way_out_of_the_sandbox_is_an_error_of_one_line(source):
    """fault 54."""
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% for x in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
        "{{ range(99999) | select('in', range(99999) | list) | list }}",
        "{{ range(99999) | map('string') | list | length }}",
        "{% set x %}{% for a in range(4000) %}" + "y" * 5000 + "{% endfor %}{% endset %}",
    ],
)
def test_endless_work_ends(source, small_budget):
    """fault 54: bounded time."""
    with pytest.raises(ChatTemplateError, match="does too much"):
        render(source)


@pytest.mark.parametrize(
    "grow",
    ["ns.s ~ ns.s", "ns.s + ns.s", "[ns.s, ns.s]", "(ns.s, ns.s) if true else 0", "{'a': ns.s, 'b': ns.s}",
     "dict(a=ns.s, b=ns.s)", "ns.s | list + ns.s | list", "ns.s | join(ns.s)", "ns.s | replace('a', 'aa')",
     "ns.s.join([ns.s, ns.s])", "'%s%s' % (ns.s, ns.s)", "'{0}{0}'.format(ns.s)", "ns.s | string ~ ns.s | tojson"],
)  # fmt: skip
def test_values_that_double_end(grow, small_budget):
    """fault 54: bounded memory."""
    source = "{% set ns = namespace(s='aa') %}{% for i in range(100) %}{% set ns.s = GROW %}{% endfor %}{{ ns.s }}"
    with pytest.raises(ChatTemplateError, match="does too much"):
        render(source.replace("GROW", grow))


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10 ** 10",
        "messages * 10 ** 10",
        "10 ** (10 ** 8)",
        "'a'.center(10 ** 10)",
        "'a' | center(10000000000)",
        "'a'.ljust(10 ** 10)",
        "'1'.zfill(10 ** 10)",
        "'%10000000000d' % 1",
        "'%*d' % (10 ** 10, 1)",
        "'%10000000000d' | format(1)",
        "'{:10000000000}'.format(1)",
        "'{:{w}}'.format(1, w=10 ** 10)",
        "'a\\nb' | indent(10 ** 10)",
        "'\\t'.expandtabs(10 ** 10)",
        "[1] | batch(10 ** 10, 'x') | list",
        "[1] | slice(10 ** 10) | list",
        "messages | tojson(indent=10 ** 10)",
        "('a' * 1000000) | replace('', 'b' * 1000000)",
        "(['a' * 1000000] * 1000000) | join",
        "''.join(['a' * 1000000] * 1000000)",
        "range(99999) | map('string') | join('x' * 1000000)",
        "range(99999) | join(d='x' * 1000000)",
        "[[1]] * 100 | sum(start=[])",
        "('a' * 100000) | wordwrap(1, wrapstring='b' * 100000)",
        "('a' * 100000).translate({97: 'b' * 100000})",
        "(1).to_bytes(10 ** 10, 'big')",
        "'a'.encode()",
        "5 | round(-(10 ** 10))",
    ],
)
def test_one_enormous_value_is_refused_before_it_is_made(expression):
    """fault 54: with the limits as they are."""
    with pytest.raises(ChatTemplateError, match="does too much"):
        render("{{ " + expression + " }}")


def test_a_slow_step_is_ended_by_the_clock(monkeypatch):
    """fault 54: the last resort."""
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.0)
    with pytest.raises(ChatTemplateError, match="0 seconds"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_a_template_that_failed_harms_no_later_one():
    """fault 54: the process lives."""
    template = ChatTemplate({"default": "{% if n %}{{ 'a' * n }}{% endif %}ok"})
    with pytest.raises(ChatTemplateError):
        template.render(MESSAGES, n=10**12)
    assert template.render(MESSAGES, n=2) == "aaok"


def test_a_long_conversation_stays_within_the_budget():
    """The limits are far from what people do."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ '<' ~ m.role ~ '>' + m.content | trim %}{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 50}] * 1000
    assert ChatTemplate({"default": source}).render(messages).count("<user>word") == 1000


def test_what_templates_do_is_as_in_jinja():
    """The charges change no result."""
    source = (
        "{% set a, b = 1, [2, 3] %}{% for x, y in [(1, 2), (a, b)] %}{{ loop.last }}{{ loop.length }}{{ x }}{{ y }}"
        "{% else %}none{% endfor %}{% for x in absent %}{% else %}none{% endfor %}|{{ [a, b] | join(',') }}|"
        "{{ {'a': a} | tojson(indent=2) }}|{{ (messages + [a]) | length }}|{{ dict.fromkeys('ab', 1) }}|"
        "{% if a in (a, b) %}y{% endif %}|{{ a ~ 'x' ~ b }}|{{ '%s-%05d' % ('a', 3) }}|{{ '{:>5}'.format(a) }}|"
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}|{% generation %}g{{ a }}{% endgeneration %}|{{ range(5) | select('odd') | list }}|"
        "{{ messages | map(attribute='role') | join }}|{{ 7 // 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}|"
        "{% macro m(n) %}[{{ caller(n) }}]{% endmacro %}{% call(x) m(4) %}{{ x }}{% endcall %}|"
        "{{ 'a' if absent is defined else 'b' }}|{{ absent | default([a]) }}|{{ messages[::-1] | length }}"
    )
    assert render(source) == (
        "False212True21[2, 3]none|1,[2, 3]|{\n  \"a\": 1\n}|2|{'a': 1, 'b': 1}|y|1x[2, 3]|a-00003|    1|013|g1|"
        "[1, 3]|user|383|[4]|b|[1]|1"
    )
