"""Rollout engines: the embedded one (continuous batching on a thread of its own) and a scripted one; sampling and stop rules."""
