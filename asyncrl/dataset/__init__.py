"""Rows of parquet, json and jsonl files, checked and ready for the feed: files -> [dataset] -> feed -> agents.

Owns: finding the files, reading them, checking every row before the first step, and dropping over-long prompts. Not: chat
templates (the caller measures), order and epochs (`feed.py`). Importing it loads neither torch nor pyarrow.

1. Every row that the dataset holds can be rendered: a message list with roles and text. What cannot be used is a DataError of
   one line that names file, row and key; nothing is skipped silently.
2. A file gives the same rows in all three formats, but for the nulls that parquet structs cannot tell apart (`parquet.py`).
3. Rows keep the order of the files as named, of directories and globs by name, and of each file from its first row.
"""

from asyncrl.dataset.collate import collate_fn
from asyncrl.dataset.messages import check_messages
from asyncrl.dataset.readers import SourceRow, read_table
from asyncrl.dataset.rows import RLHFDataset, to_prompt

__all__ = ["RLHFDataset", "to_prompt", "collate_fn", "read_table", "SourceRow", "check_messages"]
