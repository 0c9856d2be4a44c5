"""The page of runs as one file: `moe_jax.watch` serves it, and a report holds the data of its run in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).with_name("watch.html")


def page_of(data: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return the page and its Content-Security-Policy, which the page also states itself.

    Args:
      data: of one run, as `FollowedRun.refresh` returns it, with "about" as `write_report` adds it; None: the page asks
        its server.
    """
    text = _TEMPLATE.read_text(encoding="utf-8")
    hashes = []
    for name in ("script", "style"):
        inline = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1].encode("utf-8")
        hashes.append(f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'")
    policy = f"default-src 'none'; {'; '.join(hashes)}; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no text ends the element
    return text.replace("POLICY", policy, 1).replace("EMBEDDED", embedded, 1), policy
