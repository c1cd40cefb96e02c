"""Chat templates that behave as those of the families do: the same control tokens in the same places."""

from __future__ import annotations

from typing import Final

__all__ = ["FAMILY_MARKUP", "FAMILY_TEMPLATES", "FAMILY_TOKENS"]

_CHATML: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

FAMILY_TOKENS: Final[dict[str, tuple[str, ...]]] = {
    "smollm2": _CHATML,
    "qwen2.5": _CHATML,
    "qwen3": _CHATML,
    "qwen3-coder": _CHATML,
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "deepseek": (
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        *(f"<｜tool▁{part}▁{end}｜>" for part in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
        "<｜tool▁sep｜>",
    ),
    "llama": (
        "<|end_of_text|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    "mistral": (
        "</s>",
        "<s>",
        *(
            f"[{end}{part}]"
            for part in ("INST", "SYSTEM_PROMPT", "TOOL_RESULTS", "AVAILABLE_TOOLS")
            for end in ("", "/")
        ),
        "[TOOL_CALLS]",
    ),
    "gemma": ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    "gpt-oss": (
        "<|return|>",
        "<|startoftext|>",
        *(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call")),
    ),
}
"""The control tokens; the first one ends a sequence."""

FAMILY_MARKUP: Final[dict[str, tuple[str, ...]]] = {
    "glm": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
"""Tokens of an assistant's markup that only this family has."""

_QWEN: Final = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else DEFAULT_SYSTEM %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') + '# Tools\n\nSignatures:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nCall them so:\n<tool_call>\nEXAMPLE\n</tool_call><|im_end|>\n' }}
{%- elif system %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_user=messages|length) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set said = m.content %}
        {%- if THINKS %}
            {%- set thought = '' %}
            {%- if '</think>' in said %}
                {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
                {%- set said = said.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
            {%- if loop.index0 > ns.last_user and (loop.last or thought) %}
                {{- '<think>\n' + thought + '\n</think>\n\n' }}
                {%- set said = said.lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {{- said + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def _qwen(default_system: str, thinks: bool, example: str = '{"name": <name>, "arguments": <object>}') -> str:
    named = _QWEN.replace("DEFAULT_SYSTEM", repr(default_system)).replace("THINKS", repr(thinks))
    return named.replace("EXAMPLE", example)


FAMILY_TEMPLATES: Final[dict[str, str]] = {
    "smollm2": (
        "{% for m in messages %}"
        "{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}"
        "{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen2.5": _qwen("You are Qwen. You are a helpful assistant.", thinks=False),
    "qwen3": _qwen("", thinks=True),
    "qwen3-coder": _qwen("", False, r"<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>"),
    "glm": r"""[gMASK]<sop>
{%- if tools %}{{ '<|system|>\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
    {{- '<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{{ '<think></think>\n' if enable_thinking is false }}{% endif %}
""",
    "deepseek": r"""
{%- set ns = namespace(system='', results=false, seen=false) %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'tool' %}
        {{- '\n' if ns.seen else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.results = true %}{% set ns.seen = true %}
    {%- elif m.role == 'user' %}
        {{- '<｜User｜>' + m.content }}{% set ns.results = false %}
    {%- else %}
        {{- ('<｜tool▁outputs▁end｜>' if ns.results else '<｜Assistant｜>') + m.content + '<｜end▁of▁sentence｜>' }}
        {%- set ns.results = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.results %}{{ '<｜tool▁outputs▁end｜>' }}{% elif add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
""",
    "llama": r"""{{- bos_token }}
{%- set first = messages[0] if messages[0].role == 'system' else none %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- (first.content | trim if first else '') + '<|eot_id|>' }}
{%- for m in (messages[1:] if first else messages) %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at once') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
""",
    "mistral": r"""{{- bos_token }}
{%- set system = messages[0] if messages[0].role == 'system' else none %}
{%- if system %}{{ '[SYSTEM_PROMPT]' + system.content + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- set said = messages[1:] if system else messages %}
{%- set ns = namespace(turns=0) %}
{%- set users = said | selectattr('role', 'equalto', 'user') | list %}
{%- for m in said %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {%- set ns.turns = ns.turns + 1 %}
    {%- endif %}
    {%- if m.role == 'user' %}
        {%- if tools and m is sameas users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('tool call ids have 9 characters') }}{% endif %}
            {{- (', ' if not loop.first else '') + '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('tool call ids have 9 characters') }}{% endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('a system message comes first') }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": r"""{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {{- (system + '\n\n' if loop.first and system else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
""",
    "gpt-oss": r"""{{- '<|start|>system<|message|>You are ChatGPT.\nReasoning: medium\n\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}{{ '# Instructions\n\n' + messages[0].content + '\n\n' }}{% endif %}
    {%- if tools %}{{ '# Tools\n\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{% endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for m in said %}
    {%- if m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.tool_calls %}
        {%- set later = said[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
        {%- set later = later | rejectattr('tool_calls') | list %}
        {%- if m.thinking and m.content %}{{ raise_exception('content and thinking') }}{% endif %}
        {%- if (m.thinking or m.content) and not later %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}
        {%- endif %}
        {%- set last.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- set last.name = none %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
""",
}
