"""A day as Markdown, ready to paste into docs/results.md. Standard library alone."""

from __future__ import annotations


def page(day: dict) -> str:
    """Return the page: the machine, then one table per item."""
    machine = day["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("jax", "jaxlib", "driver") if machine.get(name))
    commit = day.get("commit") or f"package {day.get('package_version', 'unknown')}"
    if day.get("uncommitted_changes"):
        commit += " with uncommitted changes"
    lines = [
        f"### {machine.get('device_kind', 'unknown device')}, {day['date'][:10]}",
        "",
        f"{versions}; commit {commit}; `{day['command']}`; {day['seconds']:.0f} s"
        + ("" if day["sizes"] == "full" else "; tiny sizes, which say nothing of a GPU")
        + ("" if day["finished"] else "; cut off"),
        "",
    ]
    if day["constants"]:
        fitted = ", ".join(
            f"{name} {value:.2f}" if name.endswith("efficiency") else f"{name} {value * 1e6:.3g} us"
            for name, value in sorted(day["constants"].items())
        )
        lines += [f"Constants for `inspect --constants=gpu_day.json`: {fitted}.", ""]
    for item in day["items"]:
        lines += item_lines(item)
    return "\n".join(lines)


def item_lines(item: dict) -> list[str]:
    """Return one item's table."""
    lines = [f"**{item['number']}. {item['title']}** ({item['status']}, {item['seconds']:.0f} s)", ""]
    if not item["parts"]:
        return [*lines, item.get("reason", ""), ""]
    lines += ["| what | result |", "|---|---|"]
    for part in item["parts"]:
        for what, result in part.get("rows", []):
            lines.append(f"| {_cell(what)} | {_cell(result)} |")
        if part["status"] != "ok":
            lines.append(f"| {_cell(part['name'])} | {part['status']}: {_cell(part.get('reason', ''))} |")
    return [*lines, ""]


def summary_line(item: dict) -> str:
    """Return one item in a line for the terminal."""
    return f"{item['number']}. {item['title']}: {item['status']} in {item['seconds']:.0f} s" + (
        f" ({item['reason']})" if item.get("reason") else ""
    )


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())
