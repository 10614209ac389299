"""An engine behind HTTP: a vLLM server, or any that takes and returns token ids with their log-probs."""
