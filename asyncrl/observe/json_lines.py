"""Files of JSON lines that are appended to: what a killed run left of its last line is cut off, or passed over.

metrics, trace -> [json_lines]
"""

import os
from pathlib import Path

_CHUNK = 1 << 16


def cut_unfinished_line(path: Path) -> None:
    """Cut off a last line without its end. A file that is not there stays so. Blocking."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
    if end < size:
        os.truncate(path, end)
