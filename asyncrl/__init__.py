"""asyncrl: an event-driven trainer for language-model agents that call tools over many turns.

Importing the package loads nothing else: `--help`, `fields` and every check of bad input must answer before torch is imported.
"""

__version__ = "0.1.0"
