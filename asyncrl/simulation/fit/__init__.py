"""A scenario fitted from a real run: its folder in, the models of its edges out.

runs/<name> -> [fit] -> Scenario | TOML text -> simulate

    run_data   what config.toml, metrics.jsonl and trace.jsonl tell
    measures   every number, and where it came from
    scenario   all of it together
    own_run    how well it explains the run that it came from
"""

from asyncrl.simulation.fit.scenario import Fitted, fit, fit_text, fitted

__all__ = ["Fitted", "fit", "fit_text", "fitted"]
