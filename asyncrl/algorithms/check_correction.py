"""Off-policy correction against stored numbers: `rollout_correction.json`, and the corrected values of the same kind.

Place: `check.py` calls it. Weights and metrics within the files' tolerance; the mask after rejection, `accepted_BR` here, exactly.
"""

import math
from collections.abc import Iterator, Mapping

from asyncrl.algorithms.checking import Case, Check, Compared, Json, compare, compare_exact, compare_metrics
from asyncrl.algorithms.correction import DEFAULT_THRESHOLD, CorrectionOptions, correct


def stored_options(params: Mapping[str, Json]) -> CorrectionOptions:
    """Options of stored parameters, which also name what is idle: a threshold of weights that there are not."""
    rollout_is, rollout_rs = params.get("rollout_is"), params.get("rollout_rs")
    threshold = params.get("rollout_is_threshold")
    return CorrectionOptions(
        rollout_is=rollout_is,
        rollout_is_threshold=threshold if rollout_is and threshold is not None else DEFAULT_THRESHOLD,
        rollout_is_batch_normalize=bool(rollout_is and params.get("rollout_is_batch_normalize")),
        rollout_rs=rollout_rs,
        rollout_rs_threshold=params.get("rollout_rs_threshold") if rollout_rs else None,
    )


def check_correction(case: Case) -> Iterator[Compared]:
    """Weights, accepted tokens and metrics of one case."""
    mask_BR = case.mask()
    got = correct(case.floats("old_log_prob"), case.floats("rollout_log_prob"), mask_BR, stored_options(case.params))
    weights = case.outputs.get("weights")
    if weights is not None and got.weights_BR is None:
        yield Compared(passed=False, worst=math.inf, what="weights: absent, expected some")
    elif weights is not None and got.weights_BR is not None:
        yield compare(got.weights_BR, weights, mask=mask_BR, name="weights")
    if "response_mask" in case.outputs:
        yield compare_exact(got.accepted_BR, case.outputs["response_mask"], name="response_mask")
    yield from compare_metrics(got.metrics, case.outputs.get("metrics", {}))


CHECKS: Mapping[str, Check] = {"rollout_correction": check_correction, "corrected/rollout_correction": check_correction}
