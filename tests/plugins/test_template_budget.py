"""A template's work is charged by the size of its values before it is done: counted here in steps, not in time."""

from __future__ import annotations

import pytest

from laneway import InvalidRequestError
from laneway_plugins._messages import Message
from laneway_plugins._template_budget import MAX_VALUE, Budget, Limits, OutOfSteps, OverBudget
from laneway_plugins._templates import ChatTemplate, limits_of

CHAT = (Message("user", "Hi"),)
STEPS = 20_000
SIZE = 16_384
"""Characters of the text and entries of the list that the templates below work on."""

TEXT = "{% set s = 'a b ' * 4096 %}"
LIST = "{% set L = range(16384) | list %}"
FOR_EVER = "{% for i in range(90000) %}{% for j in range(90000) %}{{ tick() }}WORK{% endfor %}{% endfor %}"


def run(source: str, steps: int = STEPS) -> tuple[Budget, int, str]:
    """Render a template that does not end well: its budget, how often it called ``tick``, and why it ended."""
    ticks = 0

    def tick() -> str:
        nonlocal ticks
        ticks += 1
        return ""

    template = ChatTemplate(source)
    template._environment.offer("tick", tick)
    budget = Budget(Limits(steps))
    with pytest.raises(InvalidRequestError, match="the model's chat template") as caught:
        template.render(CHAT, budget=budget)
    assert caught.value.field == "messages"
    assert budget.spent <= steps + 1
    return budget, ticks, caught.value.reason


OVER_A_TEXT = """\
s | title
s | upper
s | lower
s | capitalize
s | trim
s | trim('ab')
s | replace('a', 'c')
s | replace('', 'c')
s | indent(2)
s | center(20000)
s | escape
s | forceescape
s | tojson
s | list
s | reverse
s | wordcount
s | int
s | float
s | safe
s | string
s | truncate(10)
s | join(',')
s | map('upper') | list
s | batch(3) | list
s | unique | list
s | sort
s | select('eq', 'x') | list
s | format
s is lower
s is eq s ~ ''
s == s ~ ''
s < s ~ 'a'
'c' in s
s in s ~ 'a'
s[1:]
s + 'a'
s ~ 'a'
s * 2
'%s' % s
'{}'.format(s)
s.format(1)
s.upper()
s.split()
s.split('b')
s.rsplit('b', 1)
s.splitlines()
s.partition('c')
s.strip()
s.lstrip('ab')
s.replace('a', '')
s.count('b')
s.find('c')
s.rfind('c')
s.startswith('c')
s.isdigit()
s.center(20000)
s.expandtabs(2)
s.join(['a', 'b'])
','.join(s)
{s ~ 'c': 1}
[s, s] | sort
[s, s] | join
[s, s] | tojson
[s, s] == [s, s ~ '']
s in [s ~ 'a', s ~ 'b']
dict(a=s) | dictsort
""".splitlines()


@pytest.mark.parametrize("work", OVER_A_TEXT)
def test_what_passes_over_a_text_costs_its_length(work: str) -> None:
    _, rounds, reason = run(TEXT + FOR_EVER.replace("WORK", "{% set x = " + work + " %}"))
    assert "steps of work" in reason
    assert rounds > 0
    assert rounds * (SIZE // 64) <= STEPS


@pytest.mark.parametrize(
    "work", ["{{ s }}", "{% set x %}{{ s }}{% endset %}", "{% filter upper %}{{ s }}{% endfilter %}", "{{ [s] }}"]
)
def test_what_writes_a_text_costs_its_length(work: str) -> None:
    _, rounds, reason = run(TEXT + FOR_EVER.replace("WORK", work))
    assert "steps of work" in reason
    assert rounds > 0
    assert rounds * (SIZE // 64) <= STEPS


OVER_A_LIST = """\
L | sort
L | max
L | sum
L | list
L | unique | list
L | tojson
L | join
L | slice(10) | list
L | map('string') | list
L | select('gt', 16384) | first
L | reject('ge', 0) | first
L | selectattr('x') | list
L | batch(2) | list
L | reverse | list
L | groupby('x')
L | string
L ~ ''
'%s' % (L,)
'{}'.format(L)
L == L + []
L + L
L[1:] + L[:1]
16385 in L
L.index(16383)
L.count(0)
L.copy()
cycler(*L)
0.5 in range(16384)
range(16384) | list
[L, L] | sum(start=[])
dict(L | batch(2))
namespace(dict(L | batch(2)))
dict(dict(L | batch(2)).items())
""".splitlines()


@pytest.mark.parametrize("work", OVER_A_LIST)
def test_what_passes_over_a_list_costs_its_entries(work: str) -> None:
    steps = 4 * STEPS
    _, rounds, reason = run(LIST + FOR_EVER.replace("WORK", "{% set x = " + work + " %}"), steps)
    assert "steps of work" in reason
    assert rounds * (SIZE // 8) <= steps


DEEP = "{% set ns = namespace(d=[1]) %}{% for i in range(60) %}{% set ns.d = [ns.d, ns.d] %}{% endfor %}"
DEEP_TUPLE = "{% set ns = namespace(d=(1, 2)) %}{% for i in range(60) %}{% set ns.d = (ns.d, ns.d) %}{% endfor %}"
OVER_SHARED_ENTRIES = [
    *(
        DEEP + "{{ " + work + " }}"
        for work in """\
ns.d
ns.d ~ ''
ns.d | string
ns.d | tojson
ns.d | pprint
ns.d | urlencode
ns.d | replace('a', 'b')
ns.d | join
ns.d | map('string') | list
{'a': ns.d} | xmlattr
{'a': ns.d} | tojson
[ns.d, ns.d] | sort
ns.d == ns.d
ns.d is eq ns.d
ns.d in [ns.d]
'%s' % ns.d
'{}'.format(ns.d)
ns.d.index(ns.d)
dict(a=ns.d)
loop_of(ns.d)
""".splitlines()
    ),
    *(
        DEEP_TUPLE + "{{ " + work + " }}"
        for work in """\
{ns.d: 1}
{}[ns.d]
{}.get(ns.d)
ns.d in {}
[ns.d, ns.d] | unique | list
dict([(ns.d, 1)])
[1] | map(attribute=ns.d) | list
'%s' % (ns.d,)
ns.d < ns.d
""".splitlines()
    ),
]


@pytest.mark.parametrize("source", OVER_SHARED_ENTRIES)
def test_lists_that_share_entries_cost_what_they_are_as_text(source: str) -> None:
    """Sixty lists with two entries each: as text they would be longer than any memory."""
    run(source)


TOO_LARGE = [
    "{{ 'a' * 2000000 }}",
    "{{ [0] * 2000000 }}",
    "{{ 'a' | center(99999999) }}",
    "{{ 'a'.ljust(99999999) }}",
    "{{ 'x' | indent(99999999) }}",
    "{{ ('x\\n' * 1000) | indent(90000) }}",
    "{{ ('\\t' * 10000).expandtabs(1000) }}",
    "{{ ('x' * 10000) | replace('x', 'y' * 1000) }}",
    "{{ ('x' * 10000) | replace('', 'y' * 1000) }}",
    "{{ ('x' * 1000).join(['y'] * 10000) }}",
    "{{ '%*d' % (99999999, 1) }}",
    "{{ '%*d' | format(99999999, 1) }}",
    "{{ '%99999d' % 1 }}",
    "{{ '%.99999f' % 1.5 }}",
    "{{ ('%9999d' * 1000) % ((1,) * 1000) }}",
    "{{ ('%(a)s' * 10000) % {'a': 'x' * 1000} }}",
    "{{ ('%(a)s' * 10000) | format(a='x' * 1000) }}",
    "{{ ('%(' * 10000) % {'a': 1} }}",
    "{{ ('{0}' * 10000).format('x' * 1000) }}",
    "{{ ('{a}' * 10000).format_map({'a': 'x' * 1000}) }}",
    "{{ '{:99999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 9) }}",
    "{{ '{0.x}'.format(messages) }}",
    "{{ [1] | batch(9999999, 0) | list }}",
    "{{ [1] | slice(9999999) | list }}",
    "{{ 2.5 | round(99999, 'floor') }}",
    "{{ 10 ** 999999 }}",
    "{{ [1] | tojson(indent=99999) }}",
    "{{ ([1] * 10000) | tojson(separators=('x' * 1000, ':')) }}",
    "{{ ('<!--' * 10000) | striptags }}",
    "{{ ('a-' * 10000) | wordwrap(1) }}",
    "{{ ('www.' * 10000) | urlize }}",
    "{{ {'a': 'x' * 10000} | xmlattr }}",
    "{{ ('a ' * 10000) | urlencode }}",
    "{{ ('a ' * 10000) | pprint }}",
    "{{ ('<' * 200000) | escape }}",
    "{{ strftime_now('x' * 101) }}",
    "{% set ns = namespace(x=2) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x=2) %}{% for i in range(5000) %}{% set ns.x = ns.x - (0 - ns.x) %}{% endfor %}",
    "{% set ns = namespace(d=[]) %}{% for i in range(99) %}{% set ns.d = [ns.d] %}{% endfor %}{{ ns.d }}",
]


@pytest.mark.parametrize("source", TOO_LARGE)
def test_what_would_become_too_large_is_refused_before_it_is_made(source: str) -> None:
    budget, _, reason = run(source, 100_000)
    assert "steps of work" not in reason
    assert budget.spent < 50_000


ENDLESS = [
    "{{ (['x' * 1000] * 10000) | join }}",
    "{% for i in range(90000) %}{{ cycler(*('ab' * 20000)) }}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}"
    "{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for x in [1] recursive %}{% if x is eq 1 %}{% for n in range(9) %}{{ loop(range(2, 90000)) }}{% endfor %}"
    "{% endif %}{% endfor %}",
    "{% for x in range(90000) | map('string') | select %}{% for y in range(90000) %}{% endfor %}{% endfor %}",
    "{% for x in range(90000) if range(90000) | select('lt', 0) | list %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.ns = ns %}{% for i in range(90000) %}{{ [ns] }}{{ ns }}{% endfor %}",
    "{% for x in 'ab' * 90000 %}{{ loop.changed(messages) }}{% endfor %}",
    "{% for i in range(90000) %}{% set x = (1, 2) < (1, 2, i) < (4,) %}{% endfor %}",
    "{% autoescape true %}{% for i in range(90000) %}{{ '<' ~ '>' }}{% endfor %}{% endautoescape %}",
    "{% set b = ('a' * 9000 + 'b') %}{% for i in range(9000) %}{% set x = (b * 9).rfind(b) %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = ('ab' * 5000).strip('ba' * 5000) %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_what_does_not_end_is_ended(source: str) -> None:
    run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'b' * 99}) }}",
        "{{ 'a'.maketrans('a', 'b') }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ (1).to_bytes(99, 'big') }}",
        "{{ range(9).index(8) }}",
        "{{ messages[0].keys().isdisjoint([1]) }}",
        "{{ 'a'.upper.__call__() }}",
    ],
)
def test_methods_without_a_known_cost_are_not_offered(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render(CHAT)


CHEAP = "{% set x = 1 %}" * 3200
ONES = "1, " * 6400
OVER_A_BODY = [
    "{% for i in range(90000) %}{{ tick() }}" + CHEAP + "{% endfor %}",
    "{% for i in range(90000) if tick() ~ [" + ONES + "] %}{% endfor %}",
    "{% for i in range(90000) %}{{ tick() }}{% for j in [" + ONES + "][:0] %}{% endfor %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in [] %}{% else %}{{ tick() }}" + CHEAP + "{% endfor %}{% endfor %}",
    "{% macro m() %}{{ tick() }}" + CHEAP + "{% endmacro %}{% for i in range(90000) %}{{ m() }}{% endfor %}",
    "{% macro m(x=[" + ONES + "]) %}{{ tick() }}{% endmacro %}{% for i in range(90000) %}{{ m() }}{% endfor %}",
    "{% macro m() %}{% for i in range(90000) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call m() %}{{ tick() }}" + CHEAP + "{% endcall %}",
    "{% block b %}{{ tick() }}" + CHEAP + "{% endblock %}{% for i in range(90000) %}{{ self.b() }}{% endfor %}",
    "{% for i in range(9) recursive %}{{ tick() }}" + CHEAP + "{{ loop(range(9)) }}{% endfor %}",
]


@pytest.mark.parametrize("source", OVER_A_BODY)
def test_a_body_costs_its_nodes_each_time_it_runs(source: str) -> None:
    _, rounds, reason = run(source)
    assert "steps of work" in reason
    assert rounds > 0
    assert rounds * 6400 // 32 <= STEPS


@pytest.mark.parametrize("work", ["1 + 1", "- 1", "2 * 2", "7 // 2", "messages.x", "'a'.x", "loop.index"])
def test_operators_and_attributes_cost_a_step_each(work: str) -> None:
    _, rounds, reason = run(FOR_EVER.replace("WORK", "{% set x = [" + f"{work}, " * 100 + "] %}"))
    assert "steps of work" in reason
    assert 0 < rounds * 100 <= STEPS


def test_the_nodes_of_a_whole_template_are_charged_before_they_run() -> None:
    budget = Budget(Limits(100))
    with pytest.raises(InvalidRequestError, match="steps of work"):
        ChatTemplate("{{ raise_exception('it has run') }}" + CHEAP).render(CHAT, budget=budget)
    ChatTemplate("{% set x = 1 %}").render(CHAT, budget=Budget(Limits(100)))


def test_a_naive_search_costs_the_product_of_both_texts() -> None:
    """Backwards, Python compares all of what it looks for at each place."""
    texts = "{% set s = 'a' * 40000 %}{% set t = 'b' + 'a' * 2000 %}"
    _, rounds, _ = run(texts + FOR_EVER.replace("WORK", "{% set x = s.rfind(t) %}"), 500_000)
    # The last round was not done.
    assert 0 < (rounds - 1) * 40_000 * 2_000 // 1024 <= 500_000


def test_one_text_may_be_as_large_as_the_chat_and_a_mebibyte_more() -> None:
    long = "x" * (2 * MAX_VALUE)
    chat = (Message("user", long),)
    template = ChatTemplate("{{ ('<' + messages[0].content | trim + '>') | replace('y', 'z') }}")
    assert template.render(chat).text == f"<{long}>"
    limits = limits_of(chat)
    assert limits.characters == MAX_VALUE + len(long) + len("user")
    with pytest.raises(InvalidRequestError, match=f"a text of more than {limits.characters:,} characters"):
        ChatTemplate("{{ messages[0].content * 2 }}").render(chat)
    doubled = ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}")
    assert len(doubled.render(chat).text) == 2 * len(long)


def test_the_budget_grows_with_messages_and_characters() -> None:
    few, many = limits_of(CHAT), limits_of(CHAT * 1000)
    assert many.steps > few.steps + 999 * 10_000
    assert limits_of((Message("user", "x" * 10**6),)).steps > few.steps + 10**6
    assert limits_of(CHAT, {"x": ["y" * 10**6]}).characters == few.characters + len("x") + 10**6


BACKWARDS = (
    "{% for m in messages %}{% set ns = namespace(last=0) %}{% for n in messages %}"
    "{% if n.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ m.role }}{% if loop.index0 > ns.last %}!{% endif %}{% endfor %}"
)


@pytest.mark.slow
def test_a_template_may_look_at_all_messages_for_each_of_them() -> None:
    chat = tuple(Message("user" if n % 2 == 0 else "assistant", f"message {n}") for n in range(400))
    budget = Budget(limits_of(chat))
    rendered = ChatTemplate(BACKWARDS).render(chat, budget=budget)
    assert rendered.text == "userassistant" * 200 + "!"
    assert budget.spent < budget.limits.steps / 2


def test_a_budget_that_is_stopped_ends_at_its_next_step() -> None:
    budget = Budget(Limits(100))
    budget.spend()
    budget.stop()
    for _ in range(2):
        with pytest.raises(OutOfSteps):
            budget.spend()


def test_work_that_is_too_much_is_not_counted_as_done() -> None:
    budget = Budget(Limits(100))
    with pytest.raises(OverBudget):
        budget.spend(10**9)
    assert budget.spent == 101
    with pytest.raises(OverBudget):
        budget.spend(0)


def test_a_short_chat_is_rendered_at_once_and_a_long_one_is_not() -> None:
    template = ChatTemplate(BACKWARDS)
    assert template.render_at_once(CHAT) == template.render(CHAT)
    assert template.render_at_once(CHAT * 199) is None
    refusing = ChatTemplate("{{ raise_exception('No.') }}")
    with pytest.raises(InvalidRequestError, match="refuses them: No"):
        refusing.render_at_once(CHAT)
    with pytest.raises(InvalidRequestError, match="a text of more than"):
        ChatTemplate("{{ 'a' * 2000000 }}").render_at_once(CHAT)


def test_a_template_that_is_too_long_is_not_compiled() -> None:
    with pytest.raises(InvalidRequestError, match=r"has 1,000,000 characters"):
        ChatTemplate("x" * 10**6)


def test_constants_are_not_folded_before_there_is_a_budget() -> None:
    """Compiling must do no work of the template's: no budget would see it."""
    assert ChatTemplate("{{ 'a' * 10 ** 9 }}{{ 'a' | center(10 ** 9) }}") is not None
