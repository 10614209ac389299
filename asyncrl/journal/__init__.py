"""The journal: what makes the TransferQueue survive the end of its process. Loads no torch.

transfer_queue -> append(entry) -> [journal] -> run folder / journal.db -> load() at the next start

    port      what the store sees of any journal             entries   what is said in one, and what comes back
    sqlite    the one on disk, put together of:              model     the one in memory, which keeps the same
      opening   its files: one process, whole, checked       tables    its tables, and how entries change them
      writer    the thread that commits and acknowledges     reading   from its tables to what it keeps
    summary   what `asyncrl inspect` shows
"""
