"""What travels between stages: KVBatchMeta (keys and tags), TensorDict with ragged columns, DataProto (padded), and their invariants."""
