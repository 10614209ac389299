"""Model compute: mesh, model, micro-batches, log-probs, actor and reference, optimizer, checkpoints, Hugging Face export."""
