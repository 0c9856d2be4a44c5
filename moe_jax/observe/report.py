"""One page about a run in one file: report.html, with its pictures, without scripts or links to the network.

Inputs: the files of a run folder. Outputs: report.html. Absolute paths in the config are shortened to their last part,
so that the page shows no folders or user names of the machine.
"""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.observe.metrics_file import RunSummary, summarize_run
from moe_jax.observe.plots import draw_all
from moe_jax.observe.progress import with_prefix
from moe_jax.observe.run_folder import RunFolder, read_text, write_atomically

_CAPTIONS = {
    "loss.png": "Cross-entropy on the training batches and on held-out text, above the learning rate.",
    "device_load.png": "Tokens of the fullest device over the mean of all, per layer. A step waits for the fullest.",
    "expert_load.png": "Tokens per expert against an even share, one panel per layer.",
}

# A path from the root or a home folder: `/a/b`, `~/b`, not a division or the inside of a relative path or of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~\-])(?:~[\w.\-]*)?/(?:[^\s'\"/]+/)*([^\s'\"/]+)/?")

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #656d76; --line: #d8dee4; --card: #f6f8fa; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --quiet: #9198a1; --line: #30363d; --card: #161b22; --page: #0d1117; }
  img { filter: brightness(.9); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.6rem 0 .8rem; }
.lead { color: var(--quiet); margin: 0 0 1.8rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 0; }
.numbers div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem .9rem; }
.numbers dt { color: var(--quiet); font-size: .8rem; }
.numbers dd { margin: 0; }
.numbers .value { font-size: 1.35rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.numbers .aside { color: var(--quiet); font-size: .8rem; }
figure { margin: 2rem 0; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: .6rem;
  padding: .6rem; }
figcaption { color: var(--quiet); font-size: .875rem; margin-top: .5rem; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; white-space: nowrap; }
td { overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; overflow-x: auto;
  font: .8rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; margin: 0; }
summary { cursor: pointer; color: var(--quiet); margin: .8rem 0; }
"""


def write_report(folder: str | os.PathLike[str], pictures: Sequence[Path] | None = None) -> Path:
    """Write report.html from whatever the run folder holds.

    Args:
      folder: the run folder.
      pictures: what `draw_all` returned; None draws them now.

    Returns:
      The path of the page.

    Raises:
      UserError: a file of the run is damaged, or the folder cannot be written.
    """
    run = RunFolder(folder)
    summary = summarize_run(run)
    environment = run.read_environment()
    # The folder's own name, also when it is given as "." or with a link.
    title = html.escape(run.path.resolve().name)
    date = environment.get("date")
    steps = "no steps" if summary.steps is None else f"{summary.steps:,} steps"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="lead">moe_jax run, {steps}{f", {html.escape(str(date))}" if date else ""}</p>',
        _number_cards(headline_numbers(summary)),
        *(_figure(picture) for picture in (draw_all(run) if pictures is None else pictures)),
        "<h2>Config</h2>",
        _text_block(read_text(run.config) or "(no config.gin)"),
    ]
    operative = read_text(run.operative_config)
    if operative:
        body.append(f"<details><summary>All values used, defaults included</summary>{_text_block(operative)}</details>")
    body += ["<h2>Environment</h2>", _table(environment) if environment else "<p>(no environment.json)</p>"]
    return write_atomically(run.report, _page(title, "\n".join(body)))


def headline_numbers(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) for each number that the run's records state."""
    s = summary
    below = s.below_unigram_entropy
    rows: list[tuple[str, float | None, str, str]] = [
        ("held-out loss, before", s.held_out_loss_first, ".3f", "nats per token"),
        ("held-out loss, after", s.held_out_loss_last, ".3f", "nats per token"),
        ("held-out loss, averaged", s.held_out_loss_ema, ".3f", "moving average of parameters"),
        ("unigram entropy", s.unigram_entropy, ".3f", "" if below is None else f"loss ends {_percent_below(below)} it"),
        ("training loss, last step", s.loss_last, ".3f", "nats per token"),
        ("tokens/s", s.tokens_per_second, "si", "median"),
        ("model FLOP/s", s.model_flops_per_second, "si", "median, all devices"),
        ("step", s.step_seconds, "s", "median"),
        ("peak memory per device", s.peak_device_bytes, "bytes", ""),
        ("device load, mean", s.device_load_mean, ".2f", "max / mean, 1 is balanced"),
        ("device load, worst", s.device_load_worst, ".2f", "of any layer and step"),
        ("dropped tokens", s.dropped_fraction, ".3%", "mean over steps"),
        ("overflow steps", s.overflow_steps, ",.0f", "took more than one pass"),
        ("skipped steps", s.skipped_steps or None, ",.0f", "loss or gradient not finite"),
        ("steps run again", s.steps_run_again or None, ",.0f", "a bucket overflowed in the common program"),
        ("compilations", s.compilations or None, ",.0f", f"{s.compile_seconds:.1f} s in all"),
        ("re-jit stall", s.rejit_stall_seconds, ".1f", "seconds waited"),
    ]
    return [(label, _formatted(value, form), remark) for label, value, form, remark in rows if value is not None]


def without_absolute_paths(text: str) -> str:
    """Shorten every absolute path to its last part: `'/data/ann/books.txt'` becomes `'.../books.txt'`."""
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def _formatted(value: float, form: str) -> str:
    if form == "si":
        return with_prefix(value)
    if form == "s":
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"
    if form == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    return format(value, form)


def _percent_below(fraction: float) -> str:
    return f"{abs(fraction):.0%} {'below' if fraction >= 0 else 'above'}"


def _number_cards(numbers: Sequence[tuple[str, str, str]]) -> str:
    cards = [
        f'<div><dt>{html.escape(label)}</dt><dd class="value">{html.escape(value)}</dd>'
        f'<dd class="aside">{html.escape(remark)}</dd></div>'
        for label, value, remark in numbers
    ]
    return f'<dl class="numbers">{"".join(cards)}</dl>' if cards else "<p>No records yet.</p>"


def _figure(picture: Path) -> str:
    caption = _CAPTIONS.get(picture.name, picture.stem)
    data = base64.b64encode(picture.read_bytes()).decode("ascii")
    return (
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _text_block(text: str) -> str:
    return f"<pre>{html.escape(without_absolute_paths(text.strip()))}</pre>"


def _table(record: Mapping[str, Any]) -> str:
    cells = [(name.replace("_", " "), without_absolute_paths(_words(value))) for name, value in record.items()]
    rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(words)}</td></tr>" for name, words in cells]
    return f"<table>{''.join(rows)}</table>"


def _words(value: Any) -> str:
    """Write plain data as a phrase: {"data": 1, "expert": 8} as `data 1, expert 8`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_words(item) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    return str(value)


def _page(title: str, body: str) -> str:
    # The empty icon keeps browsers from asking a server for one.
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}: moe_jax run</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
