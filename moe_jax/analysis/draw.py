"""A timeline as pictures: a PNG, and a Chrome trace that Perfetto (ui.perfetto.dev) opens.

Inputs: a `Timeline`. Outputs: files. In training the two longest loops are the blocks, forward and backward.
"""

from __future__ import annotations

import json
import pathlib
from collections import defaultdict

from moe_jax.cluster.timeline import Timeline

ROWS = ("compute", "inside nodes", "across nodes", "wait")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
FIXED = {"wait": "tab:red", "other compute": "tab:gray"}


def write_chrome_trace(timeline: Timeline, path: pathlib.Path) -> None:
    """Write every event as a complete event ('X'), in microseconds, one thread per row."""
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(ROWS)
    ]
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": ROWS.index(event.row),
                "name": event.label or event.name,
                "ts": event.begin * 1e6,
                "dur": (event.end - event.begin) * 1e6,
                "args": {"instruction": event.name},
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def draw_timeline(timeline: Timeline, path: pathlib.Path, title: str) -> None:
    """Draw the step and a middle turn of each of the two longest loops as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for loop, _, begin, end in timeline.turns:
        turns[loop].append((begin, end))
    longest = sorted(turns, key=lambda loop: -(turns[loop][-1][1] - turns[loop][0][0]))[:2]
    middle = [(f"one turn of {loop}", *turns[loop][len(turns[loop]) // 2]) for loop in longest]
    windows = [("whole step", 0.0, max(timeline.seconds, 1e-9)), *sorted(middle, key=lambda turn: turn[1])]
    # What decides an event's colour: the innermost named scope of a kernel, the role of a transfer. Waits are red,
    # unnamed compute grey, the longest groups have one colour each, the others are light grey.
    groups, totals = [], defaultdict(float)
    for event in timeline.events:
        name = event.label.split("/")[-1] if event.row == "compute" else event.label.split(" ")[0]
        groups.append("wait" if event.row == "wait" else name)
        totals[groups[-1]] += event.end - event.begin
    named = sorted((group for group in totals if group not in FIXED), key=lambda group: -totals[group])
    colours = {group: COLOURS[place] if place < len(COLOURS) else "lightgray" for place, group in enumerate(named)}
    colours |= {group: colour for group, colour in FIXED.items() if group in totals}
    figure = Figure(figsize=(14, 2.6 * len(windows) + 0.8), layout="constrained")
    figure.suptitle(title)
    for axes, (name, begin, end) in zip(figure.subplots(len(windows), squeeze=False)[:, 0], windows, strict=True):
        bars = defaultdict(list)  # (row, group) -> bars
        for event, group in zip(timeline.events, groups, strict=True):
            if event.end > begin and event.begin < end:
                first, last = max(event.begin, begin), min(event.end, end)
                bars[ROWS.index(event.row), group].append((1e3 * first, 1e3 * (last - first)))
        for row, group in sorted(bars):
            place = (len(ROWS) - 1 - row - 0.4, 0.8)
            axes.broken_barh(bars[row, group], place, color=colours[group], linewidth=0)
        axes.set_yticks(range(len(ROWS)), ROWS[::-1])
        axes.set_ylim(-0.6, len(ROWS) - 0.4)
        axes.set_xlim(1e3 * begin, 1e3 * end)
        axes.set_xlabel("modelled ms")
        axes.set_title(name, loc="left", fontsize=10)
    handles = [matplotlib.patches.Patch(color=colour, label=group) for group, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)
