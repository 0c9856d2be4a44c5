"""Conversations: ids and answers as transformers and a mask made by hand have them, windows, and what is refused."""

import json

import numpy as np
import pytest
from show_chats import show
from support import chat_cases

from moe_jax.data.cache import build_cache
from moe_jax.data.chat import ANSWER, FIRST, ID_BITS, ChatTemplate
from moe_jax.data.corpus import DataConfig
from moe_jax.data.stream import HeldOut, TokenStream
from moe_jax.data.tokenizer import build_tokenizer
from moe_jax.errors import UserError

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def template_of(folder, text):
    return ChatTemplate(build_tokenizer(DataConfig(tokenizer=str(chat_cases.write_tokenizer(folder, text)))))


def config_of(folder, records, template=chat_cases.PLAIN, **changes):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = chat_cases.write_tokenizer(folder / "tokenizer", template)
    paths = {"path": str(path), "tokenizer": str(tokenizer), "cache_dir": str(folder / "cache")}
    return DataConfig(kind="chat", **{"held_out_fraction": 0.2, **paths, **changes})


def answers_by_hand(ids, text_of):
    """Return '1' for each token from `<|im_start|>assistant` and a line end on, up to and with `<|im_end|>`."""
    start, end, found, inside, header = 266, 267, "", False, None
    for token in ids:
        found += "01"[inside]
        if token == start:
            header = ""
        elif token == end:
            inside, header = False, None
        elif header is not None:
            header += text_of(np.array([token]))
            if header.endswith("\n"):
                inside, header = header == "assistant\n", None
    return found


@pytest.mark.parametrize("name", [*chat_cases.TEMPLATES, "plain", "plain, no special end"])
def test_tokens_and_answers_are_those_of_transformers(tmp_path, name):
    """The golden file is transformers' (chat_cases.py says how); answers of `plain` are found without its blocks."""
    template = template_of(tmp_path, chat_cases.TEMPLATES.get(name, chat_cases.PLAIN))
    whole = name == "chatml" or name.startswith("plain")
    if name.endswith("no special end"):
        file, known = tmp_path / "tokenizer.json", template.name
        parts = json.loads(file.read_text())
        parts["added_tokens"] = [{**token, "special": token["id"] != 267} for token in parts["added_tokens"]]
        file.write_text(json.dumps(parts))
        template = ChatTemplate(build_tokenizer(DataConfig(tokenizer=str(file))))
        assert template.name.split()[-1] != known.split()[-1]  # other answers than before are another cache
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json")))
    records = chat_cases.conversations() if whole else chat_cases.plain(chat_cases.conversations())
    golden = json.loads(chat_cases.GOLDEN.read_text())["chatml" if whole else name]
    assert len(records) == (50 if whole else 27)
    for number, (record, want) in enumerate(zip(records, golden, strict=True)):
        (marked,) = template.encode_batch([template.read(record, f"conversation {number}")])
        ids = marked & ID_BITS
        assert ids.tolist() == want["ids"], number
        assert np.flatnonzero(marked & FIRST).tolist() == [0]
        answers = "".join("01"[bool(mark)] for mark in marked & ANSWER)
        if whole:
            assert answers == want["answers"] == answers_by_hand(want["ids"], tokenizer.decode), number
        else:  # all that is green, next to the messages
            said = show(marked, tokenizer).split("\033[32m")[1:]
            wanted = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
            if name == "brackets":
                wanted = [f" {content.strip()}<|im_end|>" for content in wanted]
            else:  # thoughts stand where the conversation ends with the answer
                last = record["messages"][-1]["role"] == "assistant"
                wanted = [f"{content}<|im_end|>" for content in wanted]
                wanted[-1] = "<think>\n\n</think>\n\n" * last + wanted[-1]
            assert [text.partition("\033[0m")[0] for text in said] == wanted, number
    assert template.end_ids() == (267,)
    question = [{"role": "user", "content": "no"}]
    shown = "[INST] no [/INST]" if name == "brackets" else "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert show(np.array(template.prompt(question)), tokenizer).removeprefix("<|end|>") == shown


def windows_seen(config, length, packed, cache=None):
    """Return [(ids, answers) of each conversation] of an epoch and of what is held out, from their windows."""
    cache = cache or build_cache(config)
    stream = TokenStream(cache, sequence_length=length, batch_size=1, seed=3, packed=packed)
    held_out = HeldOut(cache, length, packed=packed).batches(1)
    windows = [stream.batch(step)[0][: stream.sizes(step)[0]] for step in range(stream.windows[0])]
    windows += [tokens[0][: sizes[0]] for tokens, _, _, sizes in held_out]
    found = [part for window in windows for part in np.split(window, np.flatnonzero(window & FIRST))[1:]]
    return stream, windows, sorted(part.tolist() for part in found if (part & ANSWER).any())


def test_every_conversation_is_in_one_window_and_once_an_epoch(tmp_path):
    records = chat_cases.conversations()
    config = config_of(tmp_path, records)
    cache, template = build_cache(config), template_of(tmp_path / "t", chat_cases.PLAIN)
    want = template.encode_batch([template.read(record, "") for record in records])
    assert cache.tokens.tolist() == np.concatenate(want).tolist() and cache.meta.documents == 50
    assert cache.meta.answers == sum(np.count_nonzero(ids & ANSWER) for ids in want)
    assert set(cache.held_out.runs.ravel()) <= {0, *cache.ends.tolist()}  # no conversation is cut
    longest = max(ids.size for ids in want)
    for packed in (True, False):
        stream, windows, found = windows_seen(config, longest - 1, packed)
        assert found == sorted(ids.tolist() for ids in want)
        assert (stream.windows[0] < 25 and len(windows) < 30) if packed else (len(windows) == 50)
        assert "; 0 conversations are cut, with 0 tokens" in stream.told()
    (count,) = stream.windows
    first, second = ([stream.batch(at + step).tolist() for step in range(count)] for at in (0, count))
    assert first != second and sorted(first) == sorted(second)
    # shorter: all are cut there, and what is lost is told
    length = max(int(np.flatnonzero(ids & ANSWER)[0]) for ids in want)
    stream, _, found = windows_seen(config, length, False)
    assert found == sorted(ids[: length + 1].tolist() for ids in want)
    train = [ids for ids in want if ids[length + 1 :].size and cache_has(cache.train, ids)]
    lost = sum(np.count_nonzero(ids[length + 1 :] & ANSWER) for ids in train)
    assert f"; {len(train)} conversations are cut, with {lost:,} tokens of answers behind the cuts" in stream.told()


def cache_has(span, ids):
    whole = span.read(0, len(span))
    return any(np.array_equal(whole[at : at + ids.size], ids) for at in np.flatnonzero(whole & FIRST))


def test_rows_of_a_table_are_conversations(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [{"messages": r["messages"], "other": 1} for r in chat_cases.plain(chat_cases.conversations())]
    config = config_of(tmp_path, records)
    table = str(tmp_path / "chats.parquet")
    parquet.write_table(pa.Table.from_pylist(records), table)
    changed = DataConfig(kind="chat", path=table, tokenizer=config.tokenizer, cache_dir=config.cache_dir)
    assert build_cache(changed).meta.content == build_cache(config).meta.content
    parquet.write_table(pa.table({"text": ["a"]}), table)
    with pytest.raises(UserError, match=r"has no column 'messages' \(it has \['text'\]\)"):
        build_cache(changed)


TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("records", "template", "message"),
    [
        ([{"messages": TURN[:1]}], None, r"chats.jsonl:1: no message of the role 'assistant', so nothing to learn"),
        ([{"messages": TURN}, {"messages": TURN[::-1]}], None, r"chats.jsonl:2: roles are out of order: message 0 "),
        ([{"messages": TURN[:1] * 2 + TURN[1:]}], None, r"message 1 \('user'\) follows 'user'"),
        ([{"messages": [{"role": "bot", "content": "b"}]}], None, "message 0 has the role 'bot', not one of system,"),
        ([{"messages": [{"role": ["user"], "content": "b"}]}], None, r"message 0 has the role \['user'\], not one"),
        ([{"messages": "a"}], None, "`messages` must be a list of objects"),
        ([{"text": "a"}], None, "`messages` must be a list of objects"),
        ([{"messages": TURN, "tools": "{"}], None, "tools are no JSON"),
        ([{"messages": TURN}], "{{ raise_exception('not\nthis') }}", "the chat template fails .not this.; correct it"),
        ([{"messages": TURN}], "{{ messages[0].content.x.y }}", "the chat template fails .*has no attribute 'x'"),
        ([{"messages": TURN}], "{{ ''.__class__.__mro__ }}", "the chat template fails .*unsafe"),
        ([{"messages": TURN}], "{% for %}", "no chat template can be read .*put a chat_template.jinja there"),
        ([{"messages": TURN}], "{{ messages | length }}", "writes message 1 otherwise when others follow"),
        ([{"messages": TURN}], "{% generation %}{% endgeneration %}", "writes nothing for the assistant to say"),
        ([{"messages": [{"role": "user", "content": "\ufdd0"}, TURN[1]]}], chat_cases.CHATML, "holds U.FDD0"),
        ([{"messages": [{"role": "user", "content": "\ud800"}, TURN[1]]}], None, "surrogates not allowed"),
        ([{"messages": TURN}], None, "holds one conversation, and one is held out; name at least two"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused(tmp_path, records, template, message):
    with pytest.raises(UserError, match=message):
        build_cache(config_of(tmp_path, records, template or chat_cases.PLAIN))


def test_an_answer_cut_away_and_files_without_conversations(tmp_path):
    long = [{"role": "user", "content": "x" * 90}, TURN[1]]
    config = config_of(tmp_path, [{"messages": long}] * 3)
    with pytest.raises(UserError, match=r"conversation 1 .* first answer behind 108 tokens.*at least 108, or remove"):
        TokenStream(build_cache(config), sequence_length=107, batch_size=1, seed=0)
    TokenStream(build_cache(config), sequence_length=108, batch_size=1, seed=0)
    (tmp_path / "a.txt").write_text("text")
    for changes, message in (
        ({"path": str(tmp_path / "a.txt")}, "conversations stand in .jsonl"),
        ({"path": ""}, "has no data of its own"),
        ({"tokenizer": "byte"}, "bytes have none; name a tokenizer.json"),
    ):
        with pytest.raises(UserError, match=message):
            build_cache(config_of(tmp_path, [], **changes))
    with pytest.raises(UserError, match="must be 'text' or 'chat'"):
        DataConfig(kind="talk")
