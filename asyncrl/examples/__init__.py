"""The quick start: its problems, demonstrator, tokenizer and tiny model, and the one command that runs all of it."""
