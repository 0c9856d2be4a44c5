"""Make a fixture of a schedule: python tests/inspection/condense.py OUT/schedule.hlo.gz FIXTURE.hlo.xz

Leaves out what the parser does not read: layouts, shardings, channels, most of the backend's settings. The report of
the fixture is the report of the original.
"""

import gzip
import lzma
import pathlib
import re
import sys

DROPPED = (
    r' ?scheduling_name="[^"]*"',
    r", metadata=\{\}",
    r", sharding=\{[^=]*?\}(?=, |$)",
    r", (?:channel_id=\d+|use_global_device_ids=true|frontend_attributes=\{[^}]*\}|constraint_layout=\w+)",
    r"/\*index=\d+\*/",
)


def condense_line(line: str) -> str:
    line, settings, rest = line.partition(", backend_config={")
    kept = re.search(r'"known_trip_count":\{"n":"\d+"\}|"lhs_contracting_dimensions":\["\d+"\]', rest)
    for pattern in DROPPED:  # in turn: one leaves an empty list behind that the next drops
        line = re.sub(pattern, "", line)
    line = re.sub(r"\]\{[\d,]*\}", "]", line)
    return f"{line}, backend_config={{{kept.group(0)}}}" if kept else line


if __name__ == "__main__":
    first, *lines = gzip.decompress(pathlib.Path(sys.argv[1]).read_bytes()).decode().split("\n")
    text = "\n".join([first.partition(",")[0] + ", is_scheduled=true", *map(condense_line, lines)])
    pathlib.Path(sys.argv[2]).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
