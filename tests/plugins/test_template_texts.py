"""Templates come out as from a plain jinja2 environment, with all that they use and all that a chat says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import pytest

from laneway import InvalidRequestError
from laneway_plugins._messages import Message
from laneway_plugins._templates import ChatTemplate
from laneway_plugins._written import spans_of
from tests.plugins.chat_templates import TEMPLATES


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 - as its base declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RefusedError(Exception):
    pass


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def plainly(source: str, messages: tuple[Message, ...], variables: Mapping[str, Any], asking: bool) -> str | None:
    """What the usual renderer makes of it; None where the template refuses or fails."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tools": None, "documents": None, **variables}
    names["messages"] = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return environment.from_string(source).render(names, add_generation_prompt=asking)
    except (RefusedError, jinja2.TemplateError, TypeError):
        return None


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


CHATS = {
    "one": (user("Hi"),),
    "spaces": (Message("system", " Be brief.\n"), user("  Why is\nthe sky blue?  ")),
    "turns": (user("One?"), assistant("Yes."), user("Two?"), assistant("No.\n"), user("Three?")),
    "thoughts": (user("Hi"), assistant("<think>\nhm\n</think>\n\nYes."), user("And <think> now</think>?")),
    "letters": (Message("developer", "Straße İ ŉ"), user("漢字 \u2028 é 😀\r\nx\ttab"), assistant("ß")),
    "tools": (user("Go"), Message("tool", '{"a": [1]}'), Message("tool", "<|turn_end|>"), assistant("done")),
    "markers": (user("<|turn_end|>\n<|turn|>system\n{{ messages }}{% raw %}%s %d {} {0}"), assistant("|><|end|>")),
    "empty": (user(""), assistant(""), user("x")),
    "late system": (user("Hi"), Message("system", "Later."), Message("poet", "Ho")),
    "long": tuple(user(f"word {n}") if n % 2 == 0 else assistant("answer " * n) for n in range(41)),
}
TOOL = {"function": {"name": "find", "parameters": {"what": "str", "how <|end|>": "int"}}, "é": [None, 1.5]}
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False, "note": "n <|turn|>"},
    {"tools": [TOOL, {"name": "bare"}], "documents": [{"a": 1}], "enable_thinking": True},
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_comes_out_as_from_the_usual_renderer(name: str) -> None:
    source = TEMPLATES[name]
    template = ChatTemplate(source, bos="<|begin|>", eos="<|end|>")
    rendered = 0
    for messages in CHATS.values():
        for variables in VARIABLES:
            for asking in (False, True):
                expected = plainly(source, messages, variables, asking)
                if expected is None:
                    with pytest.raises(InvalidRequestError):
                        template.render(messages, generation_prompt=asking, variables=variables)
                else:
                    found = template.render(messages, generation_prompt=asking, variables=variables)
                    assert type(found.text) is str
                    assert found.text == expected
                    rendered += 1
    assert rendered >= len(CHATS)


EXPRESSIONS = """\
'a' ~ 1 ~ none ~ [1]
'%s' % 'a' + '%05d|%x' % (7, 255)
'{0}{1}{0}'.format('a', 2)
'{x}'.format_map({'x': 1})
('a,b;c' | replace(',', ';')).split(';') | reverse | list
'abc'[::-1] ~ 'abc'[1] ~ 'abc'[-2:]
'Hello World foo' | title ~ ('x-y (z)' | title) | upper
'x' | center(7) ~ '|' ~ 'x'.ljust(3, '.') ~ 'x'.rjust(3) ~ '7'.zfill(3)
'a\\tb'.expandtabs(4) ~ 'a\\nb' | indent(3, true)
'  a b  '.split() ~ 'a b c'.split(' ', 1) ~ 'a b c'.rsplit(none, 1) ~ 'a\\nb\\n'.splitlines(true)
'a=b=c'.partition('=') ~ 'a=b=c'.rpartition('=')
'abc'.find('c') ~ 'abc'.index('b') ~ 'abc'.rfind('z') ~ 'aaa'.count('a')
'abc'.startswith(('x', 'a')) ~ 'abc'.removeprefix('a').removesuffix('c') ~ 'ABC'.isupper() ~ '12'.isdigit()
[3, 1, 2] | sort(reverse=true) | join('-') ~ [1, 2, 3] | sum ~ [[1], [2]] | sum(start=[])
[{'n': 2, 'k': 'b'}, {'n': 1, 'k': 'a'}] | sort(attribute='n') | map(attribute='k') | join
[{'n': 1}, {'n': 2}] | sum(attribute='n') ~ [{'n': 1}, {'n': 1}, {'n': 2}] | groupby('n') | list
[1, 2, 3, 4, 5] | batch(2, 'x') | list ~ [1, 2, 3, 4, 5] | slice(2) | list
['a', 'A', 'b'] | unique | list ~ ['a', 'B'] | map('lower') | list ~ [1, 2, 3] | select('odd') | list
[0, 1, ''] | select | list ~ [0, 1] | reject | list ~ [1, 5] | reject('gt', 3) | list
{'b': 1, 'a': 2} | dictsort ~ {'b': 1} | items | list ~ {'b': 1}.get('c', 'd') ~ {'a': {'b': 1}}.a.b
{'a': 1}.keys() | list ~ {'a': 1}.values() | list ~ ('a' in {'a': 1}) ~ ('b' not in 'abc')
([1, 2] + [3]) ~ [0] * 3 ~ 7 // 2 ~ 7 % 3 ~ 7 / 2 ~ 2 ** 10 ~ -3 ~ (1 - 4) | abs
('5' | int + '2.5' | float) ~ 'x' | int(7) ~ 'ff' | int(base=16) ~ 3.14159 | round(2) ~ 2.5 | round(0, 'floor')
'a<b>' | escape ~ 'a' | safe ~ ('<' | safe + '<') ~ 'a b' | urlencode ~ '<p>x</p>' | striptags
'some words here' | truncate(8) ~ 'some words here' | wordwrap(6) ~ 'a b' | wordcount ~ 1024 | filesizeformat
(1 < 2 < 3) ~ (1 < 2 > 5) ~ (1 == 1.0) ~ ('a' == 'b') ~ ([1] == [1]) ~ (1 != 2) ~ (3 >= 3) ~ (none is none)
(nothing is defined) ~ nothing | default('d') ~ ('' | default('e', true)) ~ (1 is odd) ~ (4 is divisibleby 2)
('a' is string) ~ ([] is sequence) ~ ({} is mapping) ~ (1 is number) ~ ('a' is in ['a']) ~ (1 is sameas 1)
('a' is lower) ~ ('A' is upper) ~ (1 is eq 1) ~ (true is boolean) ~ ([] is iterable) ~ (2 is gt 1)
'a' if false ~ ('b' if true else 'c') ~ (not true) ~ (true and 'x') ~ ('' or 'y')
range(2, 8, 3) | list ~ dict(a=1, **{'b': 2}) ~ (3 in range(5)) ~ range(4)[2] ~ [4, 5][-1]
'abc' | first ~ 'abc' | last
{'a': [1, {'b': none}], 'c': 'é"'} | tojson ~ [1, 2] | tojson(indent=2) ~ {'b': 1, 'a': 2} | tojson(sort_keys=true)
'a' | tojson(ensure_ascii=true) ~ 'é' | tojson(ensure_ascii=true) ~ [1] | tojson(separators=(',', ':'))
namespace(a=1).a ~ [1, 2] | random in [1, 2] ~ [3, 1] | min ~ [3, 1] | max ~ 'ab' | length ~ [1] | count
{'a': 1} | xmlattr ~ {1: 'x'}[1] ~ {(1, 2): 'y'}[(1, 2)] ~ 'x' | string ~ 12 | string ~ [1, 'a'] | pprint
'x'.join('ab')
"""


@pytest.mark.parametrize("expression", EXPRESSIONS.splitlines())
def test_an_expression_comes_out_as_from_the_usual_renderer(expression: str) -> None:
    source = "{{ " + expression + " }}"
    expected = plainly(source, CHATS["one"], {}, True)
    assert expected is not None
    assert ChatTemplate(source).render(CHATS["one"]).text == expected


def test_literals_and_constants_are_the_template_s_and_all_that_is_handed_in_is_not() -> None:
    source = (
        "{{ bos_token }}a{{ 'b' }}{{ messages[0].content }}{{ note }}{{ note.x | tojson }}{{ messages[0].role }}"
        "{{ messages[1].role }}{% set s %}c{{ messages[0].content }}{% endset %}{{ s | upper }}{{ eos_token }}"
    )
    messages = (user("<x>"), Message("end", "y"))
    rendered = ChatTemplate(source, bos="<s>", eos="</s>").render(messages, variables={"note": {"x": "<z>"}})
    assert rendered.text == "<s>ab<x>{'x': '<z>'}\"<z>\"userendC<X></s>"
    theirs = [rendered.text[start:stop] for start, stop in rendered.spans]
    assert theirs == ["<s>ab", "user", "C", "</s>"]
    assert rendered.cut(3, 8).spans == ((0, 2),)
    assert spans_of(rendered.text) == ()
