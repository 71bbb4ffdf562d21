"""Chat templates in the shapes that are common, in ChatML's control tokens so that most small models' tokenizers fit.

For tokenizers whose own template shows no tools, and to see what reuse costs under each shape.
"""

from __future__ import annotations

CHATML_TOOLS = """\
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{{- '<|im_start|>system\\n' + (first.content if first else 'You are a helpful assistant.') -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nYou may call one or more of these functions.\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor -%}
{{- '\\n</tools>\\n\\nAnswer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in (messages[1:] if first else messages) -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""As Qwen2.5 and Hermes: tools in the system turn, a line of JSON each."""

DATED_TOOLS = """\
{%- set date = date_string if date_string is defined else '26 Jul 2024' -%}
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{{- '<|im_start|>system\\nCutting Knowledge Date: December 2023\\nToday Date: ' + date + '\\n\\n' -}}
{{- (first.content | trim if first else '') + '<|im_end|>' -}}
{%- for message in (messages[1:] if first else messages) -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if loop.first and tools -%}
{{- 'Given the following functions, answer with a JSON call of one.\\n\\n' -}}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor -%}
{%- endif -%}
{{- message.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""As Llama 3.1: today's date in front of everything, contents trimmed, tools indented in the first user turn.

One line break behind a role where Llama has two: the rules of GPT-2 and SmolLM2 cut two in one way at a text's end
and in another before a word.
"""

THINKING = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- if loop.index0 > last.user -%}
{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content -%}
{%- endif -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""As Qwen3: what an assistant thought is dropped once a user has spoken after it."""
