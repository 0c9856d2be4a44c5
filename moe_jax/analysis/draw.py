"""A timeline as pictures: a PNG, and a Chrome trace that Perfetto (ui.perfetto.dev) opens.

Inputs: a `Timeline`. Outputs: files. The PNG shows the whole step, and below it a middle turn of each of the two
longest loops (in training: one block forward and one backward). matplotlib is imported when it is drawn.
"""

from __future__ import annotations

import json
import pathlib
from collections import defaultdict

from moe_jax.cluster.timeline import Event, Timeline

ROWS = ("compute", "inside nodes", "across nodes", "wait")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")


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


def middle_turns(timeline: Timeline, most: int = 2) -> list[tuple[str, float, float]]:
    """Return (loop, begin, end) of a middle turn of the longest loops, in order of time."""
    turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for loop, _, begin, end in timeline.turns:
        turns[loop].append((begin, end))
    longest = sorted(turns, key=lambda loop: -(turns[loop][-1][1] - turns[loop][0][0]))[:most]
    middle = [(loop, *turns[loop][len(turns[loop]) // 2]) for loop in longest]
    return sorted(middle, key=lambda turn: turn[1])


def draw_timeline(timeline: Timeline, path: pathlib.Path, title: str) -> None:
    """Draw the step and its middle turns as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    windows = [("whole step", 0.0, max(timeline.seconds, 1e-9))]
    windows += [(f"one turn of {loop}", begin, end) for loop, begin, end in middle_turns(timeline)]
    colours = _colours(timeline.events)
    figure = Figure(figsize=(14, 2.6 * len(windows) + 0.8), layout="constrained")
    figure.suptitle(title)
    for axes, (name, begin, end) in zip(figure.subplots(len(windows), squeeze=False)[:, 0], windows, strict=True):
        for row, row_name in enumerate(ROWS):
            shown = [e for e in timeline.events if e.row == row_name and e.end > begin and e.begin < end]
            for group in sorted({_group(event) for event in shown}):
                bars = [
                    (1e3 * max(e.begin, begin), 1e3 * (min(e.end, end) - max(e.begin, begin)))
                    for e in shown
                    if _group(e) == group
                ]
                axes.broken_barh(bars, (len(ROWS) - 1 - row - 0.4, 0.8), color=colours[group], linewidth=0)
        axes.set_yticks(range(len(ROWS)), ROWS[::-1])
        axes.set_ylim(-0.6, len(ROWS) - 0.4)
        axes.set_xlim(1e3 * begin, 1e3 * end)
        axes.set_xlabel("modelled ms")
        axes.set_title(name, loc="left", fontsize=10)
    handles = [matplotlib.patches.Patch(color=colour, label=group) for group, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)


def _group(event: Event) -> str:
    """Return what decides an event's colour: the innermost named scope of a kernel, the role of a transfer."""
    if event.row == "compute":
        return event.label.split("/")[-1]
    return "wait" if event.row == "wait" else event.label.split(" ")[0]


def _colours(events: list[Event]) -> dict[str, str]:
    """Return group -> colour: waits red, unnamed compute grey, the longest groups one each, the others light grey."""
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        totals[_group(event)] += event.end - event.begin
    fixed = {"wait": "tab:red", "other compute": "tab:gray"}
    named = sorted((group for group in totals if group not in fixed), key=lambda group: -totals[group])
    colours = {group: COLOURS[place] if place < len(COLOURS) else "lightgray" for place, group in enumerate(named)}
    return {**colours, **{group: colour for group, colour in fixed.items() if group in totals}}
