"""mkdocs' hook: README.md and BUILD.md are pages of the site too, and links to other files of the project are text."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "BUILD.md": "build.md"}  # outside of docs/: their place in the site
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files, config):
    """Add the pages."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point each link at the site's page of its file, and make text of one whose file is no page."""
    source = next((name for name, place in PAGES.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")

    def at_home(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        place = PAGES.get(path, path.removeprefix("docs/"))
        if path not in PAGES and not path.startswith("docs/") or (ROOT / path).is_dir():
            return text
        return f"[{text}]({'../' * page.file.src_uri.count('/')}{place}{anchor})"

    markdown = LINK.sub(at_home, markdown)
    return markdown.replace("](docs/", "](") if source in PAGES else markdown  # pictures
