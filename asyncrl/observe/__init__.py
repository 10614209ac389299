"""Sight: what a run leaves for its user to see. It reads what the others hand over and changes nothing.

    run_folder     runs/<name>/, made once, never overwritten        metrics        metrics.jsonl, a line a step
    events         the same numbers for TensorBoard                  curve          curve.png from one or many metrics.jsonl
    trajectories   sampled trajectories as readable text             progress       the bar, or a plain line a step
    no_signal      warns when nothing can be learned                 loop_lag       how late the event loop runs
    sight          all of it behind the calls that the trainer makes

Functions that touch files are plain ones: their callers on the loop go through `world.offload`.
"""
