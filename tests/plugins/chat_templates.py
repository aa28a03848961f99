"""Chat templates of our own making, with all constructs that those of public models use.

Control tokens are those of the scripted tokenizer; ``USER_DEFINED`` are markers that a vocabulary has as user-defined
tokens, and such that are ordinary text.
"""

from __future__ import annotations

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]")
PLAIN = ("  ", "\n\n", "wonder", "```", "<unused7>")
"""User-defined tokens that no template here writes as markers."""
USER_DEFINED = (*MARKERS, *PLAIN)

TEMPLATES: dict[str, str] = {}

TEMPLATES["sums in an output"] = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|turn_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)

TEMPLATES["literal text"] = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception("The system speaks first.") }}
    {%- endif %}
<|turn|>{{ message.role }}
{{ message.content | trim }}<|turn_end|>
{% endfor %}
{%- if add_generation_prompt -%}
<|turn|>assistant
{% endif %}
"""

TEMPLATES["roles inside of markers"] = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|' ~ 'assistant' ~ '|>' }}\n{% endif %}"
)

TEMPLATES["macros"] = """\
{%- macro turn(role, text, end='<|turn_end|>') -%}
    {{- '<|turn|>' ~ role ~ '\\n' -}}{{- caller() if caller is defined else '' -}}{{- text ~ end -}}
{%- endmacro -%}
{%- macro shown(value) -%}
    {%- if value is string -%}{{ value }}{%- elif value is mapping -%}
        {%- for key, part in value | dictsort %}{{ key }}: {{ shown(part) }}{{ ', ' if not loop.last }}{%- endfor -%}
    {%- elif value is iterable -%}
        [{% for part in value %}{{ shown(part) }}{% if not loop.last %}, {% endif %}{% endfor %}]
    {%- elif value is none -%}null{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- call turn(message.role, text=message.content) -%}{{ loop.index if loop.length > 9 }}{%- endcall %}
{% endfor -%}
{{ shown({'b': [1, 2.5, none, true], 'a': {'c': 'd'}}) }}
{% if add_generation_prompt %}{{ turn('assistant', '', end='') }}{% endif %}
"""

TEMPLATES["namespaces and loop controls"] = """\
{%- set ns = namespace(system='', turns=0, last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = ns.system ~ message.content -%}
        {%- continue -%}
    {%- endif -%}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
    {%- set ns.turns = ns.turns + 1 -%}
{%- endfor -%}
{%- if ns.system -%}{{ '<|turn|>system\\n' + ns.system + '<|turn_end|>\\n' }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
    {%- set mark = cycler('*', '-') -%}
    {%- if loop.index > 40 %}{% break %}{% endif -%}
    {{ '<|turn|>' ~ message.role ~ ('!' if loop.index0 == ns.last) ~ '\\n' }}
    {{- message.content }}{{ '<|turn_end|>\\n' }}
{%- else -%}
    nothing
{%- endfor -%}
{{ '<|turn|>assistant' if add_generation_prompt }}
"""

TEMPLATES["split at a marker"] = """\
{%- for message in messages -%}
    {%- set content = message.content -%}
    {%- set thought = '' -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none -%}
            {%- set thought = message.reasoning_content -%}
        {%- elif '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|turn|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
    {%- else -%}
        {{- '<|turn|>' + message.role + '\\n' + content }}
    {%- endif -%}
    {{- '<|turn_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""

TEMPLATES["tools"] = """\
{%- if tools -%}
    <|turn|>system
# Tools
{% for tool in tools -%}
    {{ tool | tojson }}
    {{ tool | tojson(indent=2) }}
{%- set function = tool.function or tool %}
{{ function.name }}({% for name, kind in function.get('parameters', {}).items() %}{{ name }}: {{ kind | upper }}
{%- if not loop.last %}, {% endif %}{% endfor %})
{% endfor -%}
<tool_call>{"name": <name>}</tool_call><|turn_end|>
{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}<|turn|>user{% endif %}
<response>{{ message.content }}</response>
        {%- if loop.last or loop.nextitem.role != 'tool' %}<|turn_end|>
{% endif -%}
    {%- else -%}
<|turn|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|turn_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif -%}
"""

TEMPLATES["lists joined"] = (
    "{% set parts = namespace(all=[]) %}"
    "{% for message in messages %}"
    "{% set parts.all = parts.all + ['<|turn|>', message.role | lower, '\\n', message.content, '<|turn_end|>'] %}"
    "{% endfor %}{{ parts.all | join }}{{ '\\n'.join(['<|turn|>assistant', '']) if add_generation_prompt }}"
    "{{ ['x', 'y'] | map('upper') | join(' <|turn|> ') }}{{ ''.join(['<|turn', '_end|>']) }}"
)

TEMPLATES["formats"] = (
    "{% for message in messages %}{{ '<|turn|>%s\\n%s<|turn_end|>\\n' | format(message.role, message.content) }}"
    "{{ '<|turn|>{}:{}<|turn_end|>'.format(loop.index, message.content | length) }}"
    "{{ '%d%% of %5.1f' % (loop.index, 3.14159) }}{{ '{:>6}|{a!r}'.format(loop.index0, a='b') }}{% endfor %}"
    "{{ '<|turn|>%s' % 'assistant' if add_generation_prompt }}"
)

TEMPLATES["blocks and filters"] = """\
{% set turn %}<|turn|>{% endset %}
{%- set end -%}<|turn{{ '_' }}end|>{%- endset -%}
{%- for message in messages -%}
{{ turn }}{% filter trim %}  {{ message.role | title | replace('Sys', 'sys') }}  {% endfilter %}
{{ message.content | replace('\\r\\n', '\\n') | indent(2) }}{{ end }}
{{ message.content[:4] }}..{{ message.content[-3:] }} {{ (message.content | list)[1:6:2] | join('/') }}
{{ message.content.upper().count('E') }} {{ message.content | wordcount }} {{ message.content | truncate(9, true) }}
{% endfor -%}
{%- with name = 'assistant' %}{% if add_generation_prompt %}{{ turn ~ name }}{% endif %}{% endwith %}
"""

TEMPLATES["slices and tests"] = """\
{%- set first = messages[0] -%}
{%- set rest = messages[1:] if first['role'] in ['system', 'developer'] else messages -%}
{%- if rest | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('No user.') }}{% endif -%}
{%- if first.role == 'system' -%}{{ '[INST] ' ~ first.content ~ ' [/INST]' }}{%- endif -%}
{%- for message in rest[::-1] -%}
    {%- if 0 <= loop.index0 < 2 and message.content is not none and message.content not in ('', 'x') -%}
        {{ loop.revindex }}{{ message.content.startswith('<|') or message.content.endswith('|>') }}
    {%- endif -%}
{%- endfor %}
{% for message in rest %}
{%- set end = ' [/INST]' if message.role == 'user' else eos_token -%}
{{- ('[INST] ' if message.role == 'user' else ' ') + message.content.strip() + end }}
{{- (loop.index0 // 2) ~ (loop.index0 % 2 == 0) ~ (1.0 / loop.index) | round(2) -}}
{{- [3, 1, 2] | sort | first ~ -loop.index }}
{%- endfor %}
{{ rest | map(attribute='role') | unique | join(',') }} {{ {'a': 1, 'b': 2}.items() | list }} {{ dict(x=1) }}
{{ range(3) | sum }} {{ [1, [2, 'é']] }} {{ (1, 'a') }} {{ none }} {{ 2 ** 5 }} {{ 'a' < 'b' <= 'c' }} {{ 1 in [1] }}
"""

TEMPLATES["recursion and includes of itself"] = """\
{%- for message in messages recursive -%}
    {%- if message.role is defined -%}
        <|turn|>{{ message.role }}
{{ loop([{'text': message.content}, {'text': '.'}]) }}<|turn_end|>
    {%- else -%}
        {{ loop.depth }}{{ message.text }}
    {%- endif -%}
{%- endfor -%}
{%- block ending -%}{{ joiner(', ')() }}{%- if add_generation_prompt %}<|turn|>assistant{% endif -%}{%- endblock -%}
{{ self.ending() }}
"""

TEMPLATES["words marked for training"] = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|turn_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|turn_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

TEMPLATES["markers around variables"] = """\
{%- set turn = {'user': '<|turn|>user', 'assistant': '<|turn|>assistant'} -%}
{%- for message in messages -%}
{{ turn.get(message.role, '<|turn|>' ~ message.role) }}
{{ message.content.split('\\n') | join('\\n') }}{{ '<|turn_end|>'.strip() }}
{% endfor -%}
{{ documents | tojson if documents else '' }}{{ note | default('none') }}
{{- '<|turn|>assistant' if add_generation_prompt }}
"""
