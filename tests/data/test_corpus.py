"""Which files are found, in which order, and the error of a bad one, or of a bad binding."""

import gzip
import json
import os

import pytest

from moe_jax.data import corpus
from moe_jax.data.corpus import DataConfig, find_documents
from moe_jax.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Hold b.txt, a/z.txt, a/data.rst, c.txt.gz, an empty file and things that are hidden."""
    (tmp_path / "a").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("B text")
    (tmp_path / "a" / "z.txt").write_text("Z text")
    (tmp_path / "a" / "data.rst").write_text("one")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"three"))
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
    # Sorted part by part: the folder "a" before "b.txt" before "c.txt.gz" before "empty.txt".
    # a/loop leads back to a folder that is being read, d to one that was read: neither adds a file.
    os.symlink(folder, folder / "a" / "loop")
    os.symlink(folder / "a", folder / "d")
    forward, walk = names(folder, folder), os.walk
    assert forward == ["a/data.rst", "a/z.txt", "b.txt", "c.txt.gz", "empty.txt"]
    assert texts(folder) == ["one", "Z text", "B text", "three"]

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
    assert names(f"{folder}/*a", folder) == ["a/data.rst", "a/z.txt"]  # a glob may match a folder
    (folder / "x,y*.txt").write_text("odd")  # a name with comma or star is itself
    assert names(folder / "x,y*.txt", folder) == ["x,y*.txt"]


@pytest.mark.parametrize("suffix", ["jsonl", "JSONL", "ndjson", "NDJSON", "json", "Json"])
@pytest.mark.parametrize("packed", ["", ".gz", ".GZ"])
def test_pieces_are_the_records_of_json(tmp_path, suffix, packed):
    """By lines, or a list or one; blank lines and empty texts are none, and the smiley is a surrogate pair."""
    records = [{"body": "héé"}, {"body": ""}, {"id": 2, "body": "a \U0001f600"}]
    lines = "\ufeff" + "\n\n".join(map(json.dumps, records)) + "\n"
    contents = [lines] if suffix.lower() != "json" else [json.dumps(records, indent=1), json.dumps(records[0])]
    for number, content in enumerate(map(str.encode, contents)):
        (tmp_path / f"{number}.{suffix}{packed}").write_bytes(gzip.compress(content) if packed else content)
    assert texts(tmp_path, field="body") == ["héé", "a \U0001f600", "héé"][: 1 + len(contents)]
    (source, *_) = find_documents(DataConfig(path=str(tmp_path), kind="chat"))
    assert [record for _, record, _ in source.records()] == records


@pytest.mark.parametrize("name", ["a.csv", "b.CSV.gz", "c.tsv"])
def test_a_file_of_columns_is_refused(tmp_path, name):
    (tmp_path / name).write_text("text,n\na,1\n")
    (tmp_path / "notes.txt").write_text("is left out")
    with pytest.raises(UserError, match="is not read; write its rows as lines of JSON, a .jsonl file"):
        texts(tmp_path)


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


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', r"d.jsonl:2: not a JSON object on one line .*; correct or remove"),
        ("d.jsonl", b'{"body": "a", "id": 1}\n', r"d.jsonl:1: has no field 'text' \(it has \['body', 'id'\]\); set Da"),
        ("d.jsonl", b'{"text": 7}\n', r"d.jsonl:1: field 'text' holds a int, not text; set DataConfig.field"),
        ("d.jsonl", b'{"text": "a"}\n\xff\xfe\n', r"d.jsonl:2: not UTF-8"),
        ("d.jsonl", b'{"text": "' + b"x" * 99, r"d.jsonl:1: has more than 60 bytes, .*; make it more lines of"),
        ("d.json", b"[" + b" " * 500, r"d.json: has more than 480 bytes, .*; make it more lines of .jsonl"),
        ("d.json", b'{"text": 1}\n{}', r"d.json: not JSON \(if each line is, call it .jsonl\) \(Extra data"),
        ("d.json", b'[{"text": "a"}, 7]', r"d.json: record 2: holds a int, but must be a JSON object"),
        ("d.json", b"[" * 400, r"d.json: not JSON"),
        ("d.jsonl", b'{"text": "\\ud800"}\n', r"d.jsonl:1: field 'text' holds half a surrogate pair; remove it"),
        ("t.txt", b"a\nb\nc\nd\n\xff\n", r"t.txt:5: not UTF-8 .*; convert the file, or name only the text files"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 99, mtime=0)[:-9], r"d.jsonl.gz: not a whole gzip file"),
    ],
)
def test_pieces_name_the_file_and_line_of_bad_data(tmp_path, monkeypatch, name, content, text):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 4)  # lines are counted over blocks
    monkeypatch.setattr(corpus, "RECORD_BYTES", 60, raising=False)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=text):
        texts(tmp_path)


def test_find_documents_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (f"{tmp_path}/no_such", r"no_such' is no file, no folder and matches nothing here; correct it"),
        (str(tmp_path / "empty"), r"holds no files; put text files or .jsonl there"),
        (",", r"DataConfig.path \(','\) names nothing; give a file"),
        (f"{tmp_path}/pipe*", "pipe: is no regular file; write what it gives to a file, and name that"),
        ("", "this Python came without them; name a text file"),
    ):
        with pytest.raises(UserError, match=words):
            find_documents(DataConfig(path=path))


def write_tables(folder):
    """Write the rows "one", null, "", "two" as a Parquet file and as both kinds of Arrow file, with another column."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"id": [1, 2, 3, 4], "text": ["one", None, "", "two"]})
    pq.write_table(table, folder / "t.parquet", row_group_size=2, write_page_checksum=True)
    for name, opened in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with opened(str(folder / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return pa, pq, table


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
        ("other.parquet", "text", r"has no column 'text' \(it has \['body', 'n'\]\); set DataConfig.field"),
        ("other.parquet", "n", r"row 1: field 'n' holds a int, not text; set DataConfig.field"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            texts(tmp_path / name, field=field)
        assert "\n" not in str(caught.value)


# of the hub, of save_to_disk, without splits, without tables
FOLDERS = {
    "README.md data/train-0-of-1.parquet data/test-0-of-1.parquet": "data/train-0-of-1.parquet",
    "dataset_dict.json train/0.arrow train/state.json train/cache-1.arrow validation/0.arrow": "train/0.arrow",
    "dataset_info.json data-0.arrow": "data-0.arrow",
    "trained.parquet other.parquet": "other.parquet trained.parquet",
    "notes.txt a.jsonl": "a.jsonl",
    "notes.txt README.md test.py": "README.md notes.txt test.py",
}
# of each suffix a file of each split, next to some without one
SPLITS = ("validation", "valid", "val", "dev", "test", "testing", "eval", "Evaluation")
for suffix in ("jsonl", "jsonl.gz", "JSONL", "ndjson", "ndjson.gz", "json", "json.gz", "parquet", "arrow"):
    others = " ".join(f"{name}.{suffix} {name}/0.{suffix} my_{name}-1.{suffix}" for name in SPLITS)
    FOLDERS |= {
        f"{others} README.md dataset_infos.json latest.{suffix}": f"latest.{suffix}",
        f"{others} wiki.TRAIN.{suffix} training/0.{suffix} a.{suffix}": f"training/0.{suffix} wiki.TRAIN.{suffix}",
        f"test.{suffix} train/test.{suffix} b.txt": f"test.{suffix} train/test.{suffix}",
    }


@pytest.mark.parametrize(("files", "taken"), FOLDERS.items())
def test_of_a_datasets_folder_the_training_split_counts(tmp_path, caplog, files, taken):
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert sorted(names(tmp_path, tmp_path)) == sorted(taken.split())
    left = len(files.split()) - len(taken.split())
    assert [f": left out: {left} of {len(files.split())} files" in text for text in caplog.messages] == [True][:left]


def test_weights_are_one_for_each_entry():
    assert DataConfig(path="a, b", weights=(1, 0)).weights == (1, 0)
    for path, weights in (("a, b", (1.0,)), ("a, b", (0.0, 0.0)), ("a", (-1.0,)), ("a,b", (2.0, -1.0))):
        with pytest.raises(UserError, match=r"DataConfig.weights \(.*\) must be a number of at least 0 for"):
            DataConfig(path=path, weights=weights)


def test_a_damaged_table_is_named_and_gives_no_other_text(tmp_path):
    """Each byte of a Parquet file with checksums of its pages, or of an Arrow file, is another one once."""
    write_tables(tmp_path)
    for path in list(tmp_path.iterdir()):
        whole, refused = path.read_bytes(), 0
        for at in range(0, len(whole), 2):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x35]) + whole[at + 1 :])
            try:
                assert texts(path) == ["one", "two"] or path.suffix == ".arrow", at
            except UserError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)
                refused += 1
        assert refused > 20
