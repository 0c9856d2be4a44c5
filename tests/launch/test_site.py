"""The site of docs/: every link of it leads somewhere, and nothing in it comes from another host."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.ecosystem
def test_the_site_is_built_strictly_and_loads_nothing(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "scripts/site/mkdocs.yml")]
    built = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(list((ROOT / "docs").glob("*.md"))) + 5  # with README.md, BUILD.md and those of the papers
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]+src="?(https?:)|<link[^>]+stylesheet"[^>]+href="?(https?:)""")
    for path, text in pages.items():
        assert not loaded.search(text), path
    hosts = pages[tmp_path / "hosts" / "index.html"]
    assert "scripts/lab/README.md" not in hosts  # a file that is no page
    assert 'href="../build/#conversations"' in pages[tmp_path / "huggingface" / "index.html"]
