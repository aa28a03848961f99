"""Chat templates: what they are given, and what becomes of those that fail, escape or run wild."""

from __future__ import annotations

import datetime as dt
import re
import time

import pytest

from laneway import InvalidRequestError
from laneway_plugins._messages import Message
from laneway_plugins._templates import MAX_TEXT, ChatTemplate

CHAT = (Message("system", "Be brief."), Message("user", "Hi"))


def render(source: str, messages: tuple[Message, ...] = CHAT, *, bos: str = "<s>", eos: str = "</s>") -> str:
    return ChatTemplate(source, bos=bos, eos=eos).render(messages).text


def test_messages_and_special_tokens_are_what_a_template_sees() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}[{{ message.role }}|{{ message['content'] | trim }}]"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ eos_token }}"
        "{% if tools is not none or documents is not none %}tools{% endif %}"
    )
    assert render(source) == "<s>[system|Be brief.][user|Hi]></s>"


def test_blocks_leave_no_blank_lines_and_loop_controls_are_known() -> None:
    source = """\
{% for message in messages %}
    {% if message.role == "system" %}
        {% continue %}
    {% endif %}
{{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ message.content }}
    {% break %}
{% endfor %}
"""
    assert render(source) == "2/2 True Hi\n"


def test_dialect_of_other_engines() -> None:
    assert render('{{ {"b": "é<", "a": [1]} | tojson }}') == '{"b": "é<", "a": [1]}'
    assert render('{{ {"a": 1} | tojson(indent=2) }}') == '{\n  "a": 1\n}'
    assert render("a{% generation %}b{{ messages[1].content }}{% endgeneration %}c") == "abHic"
    today = dt.datetime.now().astimezone()
    assert render("{{ strftime_now('%Y') }}") in (str(today.year), str(today.year + 1))


def test_a_template_can_be_used_again_and_keeps_nothing() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    assert [template.render(chat).text for chat in (CHAT, CHAT[:1], CHAT)] == ["2", "1", "2"]


def test_a_refusal_is_told_in_the_template_s_own_words() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('The user must begin.') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="refuses them: The user must begin") as caught:
        render(source)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("line\n{% if %}", r"does not parse: .* \(its line 2\)"),
        ("{{ x | no_such_filter }}", "does not parse: No filter named 'no_such_filter'"),
        ("{% for x in messages %}", "does not parse: .*endfor"),
        ("{% include 'other' %}", "failed"),
        ("{{ messages[0].content.no_such.thing }}", "failed: 'str object' has no attribute 'no_such'"),
        ("{{ nobody.knows }}", "failed: 'nobody' is undefined"),
        ("{{ 1 + 'a' }}", "failed: TypeError"),
        ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
        ("{% for x in 5 %}{% endfor %}", "failed: TypeError"),
    ],
)
def test_a_broken_template_is_an_invalid_request(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(source)
    assert "raw prompt" in str(caught.value), "the error says what to do"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ messages[0].items.__self__.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['dt'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ('{0.__class__.__mro__}').format('a') }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))('a') }}",
        "{{ '{0.__class__}'.format_map({'0': messages}) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ loop.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.pop() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = render(source)
    except InvalidRequestError:
        return
    # Where the sandbox hands out an undefined value instead of raising, nothing of it may show.
    assert text in ("", "None"), text


GROW = "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s = GROWN %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% set L = range(90000) | list %}{% for a in L %}{% for b in L %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ [0] * 10 ** 9 }}",
        GROW.replace("GROWN", "ns.s ~ ns.s"),
        GROW.replace("GROWN", "ns.s + ns.s"),
        "{% set ns = namespace(s=['ab']) %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=9) %}{% for a in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = x %}{% endfor %}",
        "{% macro two(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='ab') %}"
        "{% for a in range(60) %}{% set ns.s = two(ns.s) %}{% endfor %}",
        GROW.replace("GROWN", "ns.s.replace('a', ns.s)"),
        GROW.replace("GROWN", "ns.s | replace('a', ns.s)"),
        GROW.replace("GROWN", "ns.s.join([ns.s, ns.s])"),
        GROW.replace("GROWN", "[ns.s, ns.s] | join(ns.s)"),
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a\n' * 1000 | indent(99999) }}",
        "{{ ('a\n' * 99) | indent(99999) }}",
        "{{ ('\t' * 99).expandtabs(99999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ [1] | batch(999999999, 0) | list }}",
        "{{ range(90000) | map('string') | list | join(', ' * 200) }}",
        "{% for a in range(90000) %}{{ messages | tojson }}{% endfor %}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_a_template_that_runs_wild_is_stopped(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match="the model's chat template"):
        render(source)
    # Generous: an unbounded one takes minutes, or the machine's memory.
    assert time.thread_time() - began < 5


def test_the_length_of_the_result_is_bounded() -> None:
    messages = (Message("user", "x" * 1000),)
    source = "{% for n in range(N) %}{{ messages[0].content }}{% endfor %}"
    assert len(render(source.replace("N", str(MAX_TEXT // 1000)), messages)) == MAX_TEXT
    with pytest.raises(InvalidRequestError, match=f"longer than {MAX_TEXT:,} characters"):
        render(source.replace("N", str(MAX_TEXT // 1000 + 1)), messages)


def test_real_chats_are_far_from_the_budget() -> None:
    messages = tuple(Message("user" if n % 2 else "assistant", "word " * 50) for n in range(2000))
    source = (
        "{% for message in messages %}{% set content = message.content | trim | replace('word', 'sword') %}"
        "{% for other in messages[:10] %}{% if other.role == message.role and loop.first %}*{% endif %}{% endfor %}"
        "{{ '<|' ~ message.role }}{{ content.split('x')[0].strip().replace('sword', 'word') + eos_token }}{% endfor %}"
    )
    text = render(source, messages)
    assert len(re.findall(re.escape("</s>"), text)) == 2000
    assert "sword" not in text
