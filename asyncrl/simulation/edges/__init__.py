"""Models of what the controller stands on: engines, tools, reward, actor, journal, rows, text."""
