"""Rewards: from a finished session to one finite number, or to an error that says why there is none.

Where it stands: session -> [rewards] -> trajectory rows. The session waits for its score, so a group is terminal only when its
rewards are in.

    scoring.open_scorer          the door: checks the function, starts the workers or opens the judge, yields a Scorer
      managers.manager_of        how a session is scored: `naive`, `dapo` (over-long penalty), `gdpo` (components)
        limits.Limits            `rate_limited`, `judge`: calls at once, calls and tokens a minute
        judge.Judge              a model scores: judge_prompt -> judge_endpoint (HTTP, by aiohttp) -> judge_verdict
        worker_pool.WorkerPool   sync functions: FIFO over a few warm processes, a deadline a call
          worker_process         one process seen from the loop        worker  the same process from inside
        on_loop.LoopFunction     `async def` functions: on the event loop, under the same deadline
      rules.RULES                the built-in functions                spec    names -> functions
      results                    what a function may return            frames  bytes on the pipes

Invariants: (1) a failure never becomes a number; (2) one hanging, crashing or lying call costs its own session and no other;
(3) no process, pipe, connection or thread outlives the scorer; (4) nothing here loads torch, and nothing but the judge aiohttp.
"""
