"""Fifty conversations, three templates and a small tokenizer; as a command, what transformers makes of them.

python tests/support/chat_cases.py  # where transformers is installed; writes tests/data/chat_golden.json
"""

import json
import pathlib
import random
import sys

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "chat_golden.json"
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Today's <b>weather</b>, °C", "parameters": {"type": "object"}},
}

# the usual form of turns, with tools, calls of them, and what `{% generation %}` is for
CHATML = """\
{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}

{% elif message.role == 'tool' %}
<|im_start|>user
<tool>{{ message.content }}</tool><|im_end|>
{% elif not (tools and message.role == 'system') %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
# the same text, where nothing tells the answers
PLAIN = CHATML.replace("{% generation", "{% if true").replace("{% endgeneration", "{% endif")
# only the last answer keeps its place for thoughts, so a conversation's beginning is written otherwise
THOUGHTS = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# turns between brackets, no roles by name, and a word against two questions in a row
BRACKETS = """\
{{- bos_token }}{% set state = namespace(turn=0) %}{% for message in messages %}
{%- if (message.role == 'user') != (state.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set state.turn = state.turn + 1 %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
{%- else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}
{%- if message.content is none %}{% break %}{% endif %}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "thoughts": THOUGHTS, "brackets": BRACKETS}
WORDS = "the|weather|in Zürich|is\tmild|héllo|日本|🙂 ok|a  b|x<y>|no.|\nnew line|then|".split("|")


def conversations():
    """Return fifty records with messages: system turns, tools and their calls, empty answers, questions left open."""
    draw, records = random.Random(5), []

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 5)))

    for number in range(50):
        messages, record = [{"role": "system", "content": text()}] if number % 3 == 0 else [], {}
        for _ in range(draw.randint(1, 4)):
            messages += [{"role": "user", "content": text()}]
            if number % 5 == 0:
                record = {"tools": [TOOL] if number % 10 else json.dumps([TOOL])}
                call = {"type": "function", "function": {"name": "weather", "arguments": {"city": text()}}}
                messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
                messages += [{"role": "tool", "content": text(), "name": None}]
            messages += [{"role": "assistant", "content": "" if number % 7 == 0 else text()}]
        if number % 11 == 0:
            messages += [{"role": "user", "content": text()}]
        records.append({"messages": messages, **record})
    return records


def plain(records):
    """Return the conversations of which every template knows the roles."""
    return [record for record in records if {m["role"] for m in record["messages"]} == {"user", "assistant"}]


def write_tokenizer(folder, template="", around=""):
    """Write a tokenizer of bytes and pairs that makes `around` of a text $A, and its chat template; return its path."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    pairs = [tuple(pair.split()) for pair in ("h e", "t he", "Ġ the", "Ġ a", "i s", "Ġ w", "> Ċ", "Ċ Ċ", "n o")]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    if around:
        marks = [(name, tokenizer.token_to_id(name)) for name in SPECIAL]
        parts = [processors.ByteLevel(), processors.TemplateProcessing(single=around, special_tokens=marks)]
        tokenizer.post_processor = processors.Sequence(parts)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|end|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder / "tokenizer.json"


def write_chats(folder, last=41, held_out=0.2):
    """Write twenty conversations and a tokenizer; return the bindings that read them. last: letters of the last."""
    turns = [("x" * (last if i == 19 else 3 + 2 * i), "the" * (1 + i % 5)) for i in range(20)]
    roles = ("user", "assistant")
    records = [{"messages": [dict(role=r, content=c) for r, c in zip(roles, t, strict=True)]} for t in turns]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = write_tokenizer(folder / "tokenizer", CHATML)
    return (
        "DataConfig.kind = 'chat'", f"DataConfig.path = {str(folder / 'chats.jsonl')!r}",
        f"DataConfig.tokenizer = {str(path)!r}", f"DataConfig.held_out_fraction = {held_out}",
    )  # fmt: skip


def main():
    import tempfile

    from transformers import AutoTokenizer, __version__

    found = {"transformers": __version__}
    for name, template in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_tokenizer(pathlib.Path(folder), template)
            tokenizer, found[name] = AutoTokenizer.from_pretrained(path.parent), []
            for record in conversations() if name == "chatml" else plain(conversations()):
                tools = record.get("tools")
                tools = json.loads(tools) if isinstance(tools, str) else tools
                marks = {"return_dict": True, "return_assistant_tokens_mask": name == "chatml"}
                given = tokenizer.apply_chat_template(record["messages"], tools=tools, **marks)
                row = {"ids": given["input_ids"]}
                if name == "chatml":
                    row["answers"] = "".join(map(str, given["assistant_masks"]))
                found[name].append(row)
    text = json.dumps(found, separators=(",", ":")).replace("},{", "},\n{")
    GOLDEN.write_text(text + "\n")
    print(f"{GOLDEN}: {len(text)} characters, transformers {__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()
