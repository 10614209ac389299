"""What travels between stages: KVBatchMeta (keys, tags), TensorDict of ragged columns, DataProto (padded); their invariants."""
