"""Which files are found, in which order, and the error of a bad one, or of a bad binding."""

import gzip
import json
import os

import numpy as np
import pytest

from moe_jax.data import corpus
from moe_jax.data.corpus import DataConfig, find_documents
from moe_jax.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Hold b.txt, a/z.txt, a/data.jsonl, c.jsonl.gz, an empty file and things that are hidden."""
    (tmp_path / "a").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("B text")
    (tmp_path / "a" / "z.txt").write_text("Z text")
    (tmp_path / "a" / "data.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"id": 2, "text": "two"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden.txt").write_text("hidden")
    return tmp_path


def texts(path, **settings):
    sources = find_documents(DataConfig(path=str(path), **settings))
    return [text for source in sources for text, *_ in source.pieces()]


def names(path, folder):
    return [os.path.relpath(source.path, folder) for source in find_documents(DataConfig(path=str(path)))]


def test_find_documents_order_is_that_of_the_names_whatever_the_file_system_gives(folder, monkeypatch):
    # Sorted part by part: the folder "a" before "b.txt" before "c.jsonl.gz" before "empty.txt".
    # a/loop leads back to a folder that is being read, d to one that was read: neither adds a file.
    os.symlink(folder, folder / "a" / "loop")
    os.symlink(folder / "a", folder / "d")
    forward, walk = names(folder, folder), os.walk
    assert forward == ["a/data.jsonl", "a/z.txt", "b.txt", "c.jsonl.gz", "empty.txt"]

    def backwards(top, **kwargs):
        for parent, folders, files in walk(top, **kwargs):
            folders.sort(reverse=True)
            yield parent, folders, sorted(files, reverse=True)

    monkeypatch.setattr(corpus.os, "walk", backwards)
    assert names(folder, folder) == forward


def test_find_documents_globs_and_lists_keep_the_users_order_and_count_once(folder):
    path = f"{folder}/b.txt, {folder}/**/*.txt"
    # The glob matches a/z.txt, b.txt and empty.txt; b.txt was named before it.
    assert names(path, folder) == ["b.txt", "a/z.txt", "empty.txt"]
    assert names(f"{folder}/*a", folder) == ["a/data.jsonl", "a/z.txt"]  # a glob may match a folder
    (folder / "x,y*.txt").write_text("odd")  # a name with comma or star is itself
    assert names(folder / "x,y*.txt", folder) == ["x,y*.txt"]


def test_pieces_are_of_text_jsonl_and_gzip(folder):
    # the blank line and the empty text are no documents
    assert texts(folder) == ["one", "two", "Z text", "B text", "three"]
    # another field, in any spelling: the second is a surrogate pair
    (folder / "d.jsonl").write_text('{"body": "héé"}\n' + json.dumps({"body": "a \U0001f600"}) + "\n")
    assert texts(folder / "d.jsonl", field="body") == ["héé", "a \U0001f600"]


def test_pieces_cut_a_long_text_after_line_ends_and_lose_nothing(tmp_path, monkeypatch):
    # Blocks of 5 bytes: mark + "ab", which has no line end, so it is cut where it ends | "\ncde" and half of é, cut
    # after the line end | the other half and "\nlon", cut after the line end, with "cde" from before.
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 5)
    (tmp_path / "t.txt").write_bytes("\ufeffab\ncdeé\nlonger than a block".encode())
    (source,) = find_documents(DataConfig(path=str(tmp_path)))
    pieces = list(source.pieces())
    assert "".join(text for text, *_ in pieces) == "ab\ncdeé\nlonger than a block"  # without the byte order mark
    assert [ends for _, ends, _ in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [text for text, *_ in pieces][:3] == ["ab", "\n", "cdeé\n"]
    shares = [share for *_, share in pieces]  # of 31 bytes 10 are read when the first piece is sure to be none
    assert shares[0] == 10 / 31 and shares == sorted(shares) and shares[-1] == 1


def test_find_documents_default_is_the_standard_library_without_its_tests():
    sources = find_documents(DataConfig())
    parts = {part for source in sources for part in source.path.split(os.sep)}
    assert len(sources) > 300 and sum(source.size for source in sources) > 5e6
    assert all(source.path.endswith(".py") for source in sources)
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', r"d.jsonl:2: not a JSON object on one line .*; correct or remove"),
        ("d.jsonl", b'{"body": "a", "id": 1}\n', r"d.jsonl:1: has no field 'text' \(it has \['body', 'id'\]\); set Da"),
        ("d.jsonl", b'{"text": 7}\n', r"d.jsonl:1: field 'text' holds a int, not text; set DataConfig.field"),
        ("d.jsonl", b'{"text": "a"}\n\xff\xfe\n', r"d.jsonl:2: not UTF-8"),
        ("d.jsonl", b'{"text": "\\ud800"}\n', r"d.jsonl:1: field 'text' holds half a surrogate pair; remove it"),
        ("t.txt", b"a\nb\nc\nd\n\xff\n", r"t.txt:5: not UTF-8 .*; convert the file, or name only the text files"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "abc"}' * 99, mtime=0)[:-9], r"d.jsonl.gz: not a whole gzip file"),
    ],
)
def test_pieces_name_the_file_and_line_of_bad_data(tmp_path, monkeypatch, name, content, text):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 4)  # lines are counted over blocks
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=text):
        texts(tmp_path)


def test_find_documents_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    for path, words in (
        (f"{tmp_path}/no_such", r"no_such' is no file, no folder and matches nothing here; correct it"),
        (str(tmp_path), r"holds no files; put text files or .jsonl there"),
        (",", r"DataConfig.path \(','\) names nothing; give a file"),
        ("", "this Python came without them; name a text file"),
    ):
        with pytest.raises(UserError, match=words):
            find_documents(DataConfig(path=path))


@pytest.mark.parametrize(
    ("binding", "text"),
    [
        ({"sequence_length": 0}, r"DataConfig.sequence_length \(0\) must be a whole number of at least 1"),
        ({"sequence_length": True}, r"DataConfig.sequence_length \(True\) must be a whole number"),
        ({"held_out_fraction": 0.5}, r"DataConfig.held_out_fraction \(0.5\) must be above 0 and below 0.5"),
        ({"path": None}, r"DataConfig.path \(None\) must be text; write it in quotes"),
        ({"field": ""}, r"DataConfig.field \(''\) must not be empty"),
    ],
)
def test_data_config_refuses(binding, text):
    with pytest.raises(UserError, match=text):
        DataConfig(**binding)


def write_tables(folder):
    """Write the rows "one", null, "", "two" as a Parquet file and as both kinds of Arrow file, with another column."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"id": [1, 2, 3, 4], "text": ["one", None, "", "two"]})
    pq.write_table(table, folder / "t.parquet", row_group_size=2)
    for name, opened in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with opened(str(folder / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return pa, pq, table


def test_reading_a_table_holds_little_of_it(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(0)  # text that does not shrink: 40 row groups of 50 KB
    rows = [rng.bytes(500).hex() for _ in range(4000)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "t.parquet", row_group_size=100, compression="zstd")
    before = pa.total_allocated_bytes()
    (source,) = find_documents(DataConfig(path=str(tmp_path)))
    held = max(pa.total_allocated_bytes() - before for _ in source.pieces())
    assert held < source.size / 2


def test_documents_are_the_rows_of_a_column(tmp_path):
    pa, pq, table = write_tables(tmp_path)
    assert texts(tmp_path) == ["one", "two"] * 3
    for source in find_documents(DataConfig(path=str(tmp_path))):
        share = [share for *_, share in source.pieces()][-1]
        assert share == 1 or 0.5 < share < 1 and source.path.endswith("arrow")  # which ends with a list of its blocks
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "bad.arrow").write_bytes((tmp_path / "stream.arrow").read_bytes()[:300])
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "other.parquet")
    for name, field, words in (
        ("bad.parquet", "text", r"bad.parquet: not a whole table \(.*\); download or write it again$"),
        ("empty.parquet", "text", r"empty.parquet: not a whole table"),
        ("bad.arrow", "text", r"bad.arrow: not a whole table"),
        (
            "other.parquet",
            "text",
            r"has no column 'text' \(it has \['body', 'n'\]\); set DataConfig.field",
        ),
        ("other.parquet", "n", r"column 'n' holds int64, not text; set DataConfig.field"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            texts(tmp_path / name, field=field)
        assert "\n" not in str(caught.value)


# of the hub, of save_to_disk, without splits, without tables
FOLDERS = {
    "README.md data/train-0-of-2.parquet data/train-1-of-2.parquet data/test-0-of-1.parquet": (
        "data/train-0-of-2.parquet data/train-1-of-2.parquet"
    ),
    "dataset_dict.json train/data-0.arrow train/state.json train/cache-12.arrow validation/data-0.arrow": (
        "train/data-0.arrow"
    ),
    "dataset_info.json data-0.arrow": "data-0.arrow",
    "trained.parquet other.parquet": "other.parquet trained.parquet",
    "notes.txt a.jsonl": "a.jsonl notes.txt",
}


@pytest.mark.parametrize(("files", "taken"), FOLDERS.items())
def test_of_a_datasets_folder_the_training_split_counts(tmp_path, files, taken):
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert names(tmp_path, tmp_path) == taken.split()


def test_weights_are_one_for_each_entry():
    assert DataConfig(path="a, b", weights=(1, 0)).weights == (1, 0)
    for path, weights in (("a, b", (1.0,)), ("a, b", (0.0, 0.0)), ("a", (-1.0,)), ("a,b", (2.0, -1.0))):
        with pytest.raises(UserError, match=r"DataConfig.weights \(.*\) must be a number of at least 0 for"):
            DataConfig(path=path, weights=weights)
