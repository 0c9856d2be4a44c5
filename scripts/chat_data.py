"""Two hundred small conversations, a tokenizer learned from them, and its chat template: an example to fine-tune on.

    python scripts/chat_data.py --out=runs/chat_data

Writes chats.jsonl, tokenizer.json, tokenizer_config.json and chat_template.jinja, the same at every call, and prints
two of the conversations with the tokens that the loss counts in green.
"""

import argparse
import json
import random
from pathlib import Path

import tokenizers
from show_chats import show
from train_tokenizer import train_tokenizer

from moe_jax.data.chat import ANSWER, ChatTemplate
from moe_jax.data.corpus import DataConfig
from moe_jax.data.tokenizer import build_tokenizer

COUNT = 200
TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
STYLES = ("Answer in one word.", "Answer in a whole sentence.")
OPPOSITES = {
    "hot": "cold", "early": "late", "open": "closed", "heavy": "light", "loud": "quiet", "wide": "narrow",
    "dry": "wet", "full": "empty", "fast": "slow", "young": "old", "near": "far", "rough": "smooth",
}  # fmt: skip
HOMES = {
    "bee": "hive", "dog": "kennel", "horse": "stable", "spider": "web", "bird": "nest", "rabbit": "burrow",
    "bear": "den", "ant": "hill", "cow": "barn", "beaver": "lodge",
}  # fmt: skip
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def question_and_answers(draw: random.Random) -> tuple[str, str, str]:
    """Return a question, its answer in one word, and its answer in a sentence."""
    kind = draw.randrange(4)
    if kind == 0:
        word, other = draw.choice([*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())])
        return f"What is the opposite of {word}?", other, f"The opposite of {word} is {other}."
    if kind == 1:
        animal, home = draw.choice([*HOMES.items()])
        return f"Where does a {animal} live?", home, f"A {animal} lives in a {home}."
    a, b = draw.randint(0, 6), draw.randint(0, 6)
    if kind == 2:
        return f"How much is {a} and {b}?", NUMBERS[a + b], f"{a} and {b} make {NUMBERS[a + b]}."
    word = draw.choice([*OPPOSITES, *HOMES])
    return f"How many letters has {word}?", NUMBERS[len(word)], f"The word {word} has {NUMBERS[len(word)]} letters."


def conversations() -> list[dict]:
    """Return the records: one to three questions each; every other one begins with how to answer."""
    draw, records = random.Random(32), []
    for number in range(COUNT):
        short, messages = draw.random() < 0.5, []
        if number % 2:
            messages.append({"role": "system", "content": STYLES[not short]})
        for _ in range(draw.randint(1, 3)):
            question, word, sentence = question_and_answers(draw)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": word if number % 2 and short else sentence})
        records.append({"messages": messages})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/chat_data"), help="folder to write")
    out, records = parser.parse_args().out, conversations()
    out.mkdir(parents=True, exist_ok=True)
    chats, learned = out / "chats.jsonl", out / "tokenizer.json"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    text = out / "text.txt"  # what is said, without JSON around it
    text.write_text("\n".join(m["content"] for record in records for m in record["messages"]), encoding="utf-8")
    print(train_tokenizer(DataConfig(path=str(text)), str(learned), 512))
    text.unlink()
    tokenizer = tokenizers.Tokenizer.from_file(str(learned))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(learned))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(learned)))
    template = ChatTemplate(tokenizer)
    marked = template.encode_batch([template.read(record, str(chats)) for record in records])
    total, answers = sum(ids.size for ids in marked), sum(int((ids & ANSWER > 0).sum()) for ids in marked)
    print(f"{chats}: {COUNT} conversations, {total} tokens, {answers} of them answers (green)\n")
    print("\n".join(show(ids, tokenizer) for ids in marked[:2]))


if __name__ == "__main__":
    main()
