"""Sight: what a run leaves for its user to see. It reads what the others hand over and changes nothing.

    run_folder     runs/<name>/, made once, never overwritten        metrics        metrics.jsonl, a line a step
    events         the same numbers for TensorBoard                  curve          curve.png from one or many metrics.jsonl
    trajectories   sampled trajectories as readable text             progress       the bar, or a plain line a step
    no_signal      warns when nothing can be learned                 loop_lag       how late the event loop runs
    spans          what the time of a traced session went to         lineage        what is told about traced groups
    trace_record   its lines, trace_file: trace.jsonl                json_lines     files of lines that a kill may tear
    trace_view     `asyncrl trace` as a table or JSON lines          perfetto       the same for ui.perfetto.dev
    trace_command  which groups it shows                             incidents      what went wrong and was dealt with
    loop_watch     who blocks the event loop                         lengths        of what was generated and what was trained
    sight          all of it behind the calls that the trainer makes

Functions that touch files are plain ones: their callers on the loop go through `world.offload`.
"""
