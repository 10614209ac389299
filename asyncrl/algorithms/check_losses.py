"""Stored cases of policy losses, KL and values against our functions: policy_losses.json, kl.json, values.json.

Place: `check.py` calls these through CHECKS; see `checking.py`.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from asyncrl.algorithms.aggregation import AggregationMode, token_weights
from asyncrl.algorithms.check_correction import stored_options
from asyncrl.algorithms.checking import Case, Check, Compared, Json, compare, compare_metrics
from asyncrl.algorithms.correction import Correction, correct
from asyncrl.algorithms.kl import AdaptiveKL, FixedKL, kl_in_reward, kl_penalty
from asyncrl.algorithms.losses import POLICY_LOSSES, LossInputs, LossSpec
from asyncrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from asyncrl.algorithms.token_log_probs import logits_log_probs
from asyncrl.algorithms.values import value_loss

_CONTROLLER_RTOL = 1e-12


def check_policy_loss(case: Case) -> Iterator[Compared]:
    """Loss, gradient and metrics. `bypass_mode` weighs and rejects by the correction of log_prob against old_log_prob, inside."""
    log_prob_BR, mask_BR = case.floats("log_prob").requires_grad_(), case.mask()
    mode = case.raw["loss_mode"]
    metrics: dict[str, float] = {}
    weights_BR = case.floats("rollout_is_weights") if case.raw["use_rollout_is_weights"] else None
    options: Mapping[str, Json] = case.params
    if mode == "bypass_mode":
        options = {name: value for name, value in case.params.items() if name != "rollout_correction"}
        is_reinforce, correction = _bypass(case)
        mode = "reinforce" if is_reinforce else "vanilla"
        weights_BR = correction.weights_BR if is_reinforce else None
        mask_BR = correction.accepted_BR
        metrics |= correction.metrics
    spec = POLICY_LOSSES[mode]
    inputs = _loss_inputs(case, spec, options, log_prob_BR, mask_BR, weights_BR)
    result = spec.policy_loss(inputs, options)
    loss = (result.loss_n * _weights(case, mask_BR, spec.aggregation)[mask_BR]).sum()
    (gradient_BR,) = torch.autograd.grad(loss, log_prob_BR)
    metrics |= {name: float(fact_n.mean()) if fact_n.numel() else 0.0 for name, fact_n in result.facts.items()}
    yield compare(loss, case.outputs["loss"], name="loss")
    yield compare(gradient_BR, case.outputs["grad_log_prob"], name="grad_log_prob", mask=case.mask())
    yield from compare_metrics(metrics, case.outputs["metrics"])


def _bypass(case: Case) -> tuple[bool, Correction]:
    """(is the loss reinforce?, weights and accepted tokens of the policy against the rollout)."""
    stored = case.params["rollout_correction"]
    correction = correct(case.floats("log_prob"), case.floats("old_log_prob"), case.mask(), stored_options(stored))
    return stored.get("loss_type") == "reinforce", correction


def _loss_inputs(
    case: Case,
    spec: LossSpec,
    options: Mapping[str, Json],
    log_prob_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    weights_BR: torch.Tensor | None,
) -> LossInputs:
    log_prob_n = log_prob_BR[mask_BR]
    old_log_prob_n, advantages_n = case.floats("old_log_prob")[mask_BR], case.floats("advantages")[mask_BR]
    return LossInputs(
        log_prob_n=log_prob_n,
        old_log_prob_n=old_log_prob_n,
        advantages_n=advantages_n,
        rows_n=mask_BR.nonzero()[:, 0],
        is_weights_n=None if weights_BR is None else weights_BR[mask_BR],
        selected_n=spec.selected(log_prob_n, old_log_prob_n, advantages_n, options, torch.Generator().manual_seed(0)),
    )


def _weights(case: Case, mask_BR: torch.Tensor, fixed: AggregationMode | None = None) -> torch.Tensor:
    """Token weights as the case aggregates. The total over the ranks is scaled by dp_size, which undoes an average of gradients."""
    totals = case.raw.get("global") or {}
    num_rows = totals.get("global_batch_size")
    if case.raw.get("effective_agg") == "mean over rows":
        num_rows = len(mask_BR)  # all of them, where ours are those with a policy token
    weights_BR = token_weights(
        mask_BR,
        fixed or case.raw["loss_agg_mode"],
        num_tokens=totals.get("batch_num_tokens"),
        num_rows=num_rows,
        scale=totals.get("loss_scale_factor") or mask_BR.shape[1],
    )
    return weights_BR * float(totals.get("dp_size", 1))


def check_kl_penalty(case: Case) -> Iterator[Compared]:
    """An estimate a token and its gradient."""
    log_prob_BR = case.floats("logprob").requires_grad_()
    value_BR = kl_penalty(log_prob_BR, case.floats("ref_logprob"), case.raw["estimator"])
    (gradient_BR,) = torch.autograd.grad(value_BR.sum(), log_prob_BR)
    yield compare(value_BR, case.outputs["value"], name="value")
    yield compare(gradient_BR, case.outputs["grad_logprob"], name="grad_logprob")


def check_kl_loss(case: Case) -> Iterator[Compared]:
    """The aggregated penalty and its gradient."""
    log_prob_BR, mask_BR = case.floats("logprob").requires_grad_(), case.mask()
    value_BR = kl_penalty(log_prob_BR, case.floats("ref_logprob"), case.raw["estimator"])
    loss = (value_BR[mask_BR] * _weights(case, mask_BR)[mask_BR]).sum()
    (gradient_BR,) = torch.autograd.grad(loss, log_prob_BR)
    yield compare(loss, case.outputs["loss"], name="loss")
    yield compare(gradient_BR, case.outputs["grad_logprob"], name="grad_logprob", mask=mask_BR)


def check_kl_controller(case: Case) -> Iterator[Compared]:
    """The coefficient after each step, in float64."""
    controller = _controller(case)
    coefficients = []
    for current_kl, n_steps in zip(case.inputs["current_kl"], case.inputs["n_steps"], strict=True):
        controller = controller.after(current_kl, n_steps)
        coefficients.append(controller.coef)
    yield compare(coefficients, case.outputs["coef_after"], rtol=_CONTROLLER_RTOL, atol=0, name="coef_after")


def check_kl_reward(case: Case) -> Iterator[Compared]:
    """Rewards after the penalty, the mean KL, and the coefficient before and after."""
    controller, mask_BR = _controller(case), case.mask()
    scores_BR, log_prob_BR, ref_BR = map(case.floats, ("token_level_scores", "old_log_prob", "ref_log_prob"))
    rewards_BR, mean_kl = kl_in_reward(scores_BR, log_prob_BR, ref_BR, mask_BR, controller.coef, case.raw["estimator"])
    yield compare(rewards_BR, case.outputs["token_level_rewards"], name="token_level_rewards")
    yield compare(mean_kl, case.outputs["mean_kl"], name="mean_kl")
    yield compare(controller.coef, case.outputs["coef_used"], name="coef_used")
    yield compare(controller.after(mean_kl, len(mask_BR)).coef, case.outputs["coef_after"], name="coef_after")


def _controller(case: Case) -> FixedKL | AdaptiveKL:
    coef = case.params["kl_coef"]
    if case.params["type"] == "fixed":
        return FixedKL(coef=coef)
    return AdaptiveKL(coef=coef, target=case.params["target_kl"], horizon=case.params["horizon"])


def check_value_loss(case: Case) -> Iterator[Compared]:
    """The aggregated value loss, its gradient and how much is clipped."""
    predictions_BR, mask_BR = case.floats("vpreds").requires_grad_(), case.mask()
    values_n, returns_n = case.floats("values")[mask_BR], case.floats("returns")[mask_BR]
    result = value_loss(predictions_BR[mask_BR], values_n, returns_n, cliprange_value=case.params["cliprange_value"])
    loss = (result.loss_n * _weights(case, mask_BR)[mask_BR]).sum()
    (gradient_BR,) = torch.autograd.grad(loss, predictions_BR)
    yield compare(loss, case.outputs["vf_loss"], name="vf_loss")
    yield compare(result.facts["vf_clipfrac"].mean(), case.outputs["vf_clipfrac"], name="vf_clipfrac")
    yield compare(gradient_BR, case.outputs["grad_vpreds"], name="grad_vpreds", mask=mask_BR)


def check_entropy(case: Case) -> Iterator[Compared]:
    """Token entropies and log-probs of the labels from logits; the aggregated entropy and its gradient."""
    logits_BRV, mask_BR = case.floats("logits").requires_grad_(), case.mask()
    labels_BR = torch.tensor(case.inputs["labels"])
    log_prob_N, entropy_N = logits_log_probs(logits_BRV.flatten(0, 1), labels_BR.flatten())
    entropy_BR = entropy_N.view(mask_BR.shape)
    total = (entropy_BR * _weights(case, mask_BR)).sum()
    (gradient_BRV,) = torch.autograd.grad(total, logits_BRV)
    yield compare(entropy_BR, case.outputs["token_entropy"], name="token_entropy", mask=mask_BR)
    yield compare(log_prob_N.view(mask_BR.shape), case.outputs["log_prob"], name="log_prob", mask=mask_BR)
    yield compare(total, case.outputs["entropy"], name="entropy")
    yield compare(gradient_BRV, case.outputs["grad_logits"], name="grad_logits", mask=mask_BR[..., None].expand_as(gradient_BRV))


def check_aggregation(case: Case) -> Iterator[Compared]:
    """A mode of aggregation and its gradient."""
    loss_BR, mask_BR = case.floats("loss_mat").requires_grad_(), case.mask("loss_mask")
    total = (loss_BR * _weights(case, mask_BR)).sum()
    (gradient_BR,) = torch.autograd.grad(total, loss_BR)
    yield compare(total, case.outputs["loss"], name="loss")
    yield compare(gradient_BR, case.outputs["grad"], name="grad", mask=mask_BR)


def check_masked_stats(case: Case) -> Iterator[Compared]:
    """Sum, mean, variances, means of rows, whitening."""
    values_BR, mask_BR = case.floats("values"), case.mask("mask")
    ours = {
        "sum": masked_sum(values_BR, mask_BR),
        "mean": masked_mean(values_BR, mask_BR),
        "row_mean": masked_mean(values_BR, mask_BR, 1),
        "var_unbiased": masked_var(values_BR, mask_BR),
        "var_biased": masked_var(values_BR, mask_BR, unbiased=False),
    }
    for name, got in ours.items():
        yield compare(got, case.outputs[name], name=name)
    for name, is_centred in (("whitened", True), ("whitened_keep_mean", False)):
        yield compare(masked_whiten(values_BR, mask_BR, shift_mean=is_centred), case.outputs[name], name=name, mask=mask_BR)


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "policy_losses": check_policy_loss,
        "kl/penalty": check_kl_penalty,
        "kl/loss": check_kl_loss,
        "kl/controller": check_kl_controller,
        "kl/reward": check_kl_reward,
        "values/value_loss": check_value_loss,
        "values/entropy": check_entropy,
        "values/agg_loss": check_aggregation,
        "values/masked_stats": check_masked_stats,
    }
)
"""By the file's name, and the kind of its cases."""
