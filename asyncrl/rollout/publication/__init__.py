"""New weights on their way to a vLLM: by shared memory, by NCCL, or as a directory of safetensors."""
