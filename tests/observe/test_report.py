import re
from html.parser import HTMLParser

import pytest

from moe_jax.observe import RunFolder, summarize_run, write_report
from moe_jax.observe.report import headline_numbers, without_absolute_paths

VOID = {"meta", "link", "img", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order; keeps attributes that can load something."""

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_self_contained_html(finished_run):
    text = write_report(finished_run).read_text()
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.tags.count("img") == 3 and "script" not in parser.tags
    assert all(source.startswith("data:") for source in parser.sources)
    without_pictures = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert "http" not in without_pictures and "url(" not in without_pictures and "@import" not in without_pictures


def test_report_names_no_absolute_path(finished_run):
    without_pictures = re.sub(r"base64,[A-Za-z0-9+/=]+", "", write_report(finished_run).read_text())
    assert str(finished_run.path.parent) not in without_pictures and "ann" not in without_pictures
    assert ".../books.txt" in without_pictures


def test_report_shows_numbers_config_and_environment(finished_run):
    text = write_report(finished_run).read_text()
    for words in ("tiny", "5.000", "2.400", "loss ends 25% below it", "2.50G", "train.steps = 30", "expert 2", "4.5 s"):
        assert words in text


def test_report_escapes_what_users_write(finished_run):
    finished_run.write_config("x = '<script>alert(1)</script> & co'")
    text = write_report(finished_run, pictures=[]).read_text()
    assert "<script" not in text and "&lt;script&gt;" in text


def test_report_of_an_empty_folder_says_so(tmp_path):
    text = write_report(RunFolder(tmp_path / "new")).read_text()
    assert "no steps" in text and "No records yet" in text


def test_headline_leaves_out_what_is_not_recorded(finished_run):
    labels = [label for label, _, _ in headline_numbers(summarize_run(finished_run))]
    assert "re-jit stall" not in labels and "overflow steps" in labels


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("path = '/data/ann/books.txt'", "path = '.../books.txt'"),
        ("path = '/data'", "path = '.../data'"),
        ("path = '~/texts/a b.txt'", "path = '.../a b.txt'"),
        ("path = '~ann/texts/'", "path = '.../texts'"),
        ("include 'configs/run/demo.gin'", "include 'configs/run/demo.gin'"),
        ("x = 1 / 2", "x = 1 / 2"),
        ("x = 1/2  # a/b", "x = 1/2  # a/b"),
        ("path = 'gs://bucket/key'", "path = 'gs://bucket/key'"),
        ("path = '../texts/a.txt'", "path = '../texts/a.txt'"),
    ],
)
def test_without_absolute_paths(text, shown):
    assert without_absolute_paths(text) == shown
