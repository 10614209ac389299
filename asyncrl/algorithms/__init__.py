"""Pure tensor functions: advantages, losses, KL estimators and aggregation. They know tensors and nothing of batches or stores."""
