"""vLLM as an engine: its AsyncLLM in this process, its workers beside."""
