"""Agent sessions: chat template, token builder, tool calls, loops, and the runner of groups of trajectories."""
