import re
from html.parser import HTMLParser

import pytest

from moe_jax.errors import UserError
from moe_jax.observe import RunFolder, write_atomically, write_report
from moe_jax.observe.report import without_absolute_paths


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order; keeps attributes that can load something."""

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        self.open += [] if tag in ("meta", "link", "img", "br") else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_self_contained_html(finished_run):
    write_atomically(finished_run.operative_config, "x = '<script>alert(1)</script> & co'")
    text = write_report(finished_run).read_text()
    assert "&lt;script&gt;" in text
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.tags.count("img") == 3 and "script" not in parser.tags
    assert all(source.startswith("data:") for source in parser.sources)
    without_pictures = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert "http" not in without_pictures and "url(" not in without_pictures and "@import" not in without_pictures
    assert str(finished_run.path.parent) not in without_pictures and "ann" not in without_pictures
    assert ".../books.txt" in without_pictures
    for words in ("tiny", "5.000", "2.400", "loss ends 25% below it", "2.50G", "train.steps = 30", "expert 2", "4.5 s"):
        assert words in text
    assert "re-jit stall" not in text and "overflow steps" in text  # what is not recorded is left out


def test_report_of_an_empty_folder_says_so(tmp_path):
    run = RunFolder(tmp_path / "new")
    text = write_report(run).read_text()
    assert "no steps" in text and "No records yet" in text and "<img" not in text
    for damaged, message in (("[1]", "holds a list"), ("{", "is not JSON")):
        run.environment.write_text(damaged)
        with pytest.raises(UserError, match=message):
            write_report(run)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("path = '/data/ann/books.txt'", "path = '.../books.txt'"),
        ("path = '~/texts/a b.txt'", "path = '.../a b.txt'"),
        ("path = '~ann/texts/'", "path = '.../texts'"),
        ("include 'configs/run/demo.gin'", "include 'configs/run/demo.gin'"),
        ("x = 1/2  # a/b", "x = 1/2  # a/b"),
        ("path = 'gs://bucket/key'", "path = 'gs://bucket/key'"),
        ("path = '../texts/a.txt'", "path = '../texts/a.txt'"),
    ],
)
def test_without_absolute_paths(text, shown):
    assert without_absolute_paths(text) == shown
