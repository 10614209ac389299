"""The journal: what makes the TransferQueue survive the end of its process. Loads no torch.

transfer_queue -> append(entry) -> [journal] -> run folder / journal.db -> load() at the next start
"""
