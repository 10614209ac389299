"""SAPO: a smooth gate in place of the clip."""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss, weighted
from asyncrl.algorithms.losses.ratios import bounded_log_ratio


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLoss:
    """`-A (4 / tau) sigmoid(tau (r - 1))`, tau = tau_pos where A > 0, else tau_neg; r the ratio.

    At r = 1 the gradient is -A * d log_prob, and it fades with tau in both directions instead of stopping at a bound. A larger
    tau_neg lets tokens with A < 0 fade sooner. The aggregation is seq-mean-token-mean.

    Source: SAPO, arXiv 2511.20347, the gate f of its objective. Raises ValueError when a tau is not positive.
    Facts: pg_clipfrac and pg_clipfrac_lower (0: nothing is clipped), ppo_kl (-log ratio).
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if tau <= 0:
            raise ValueError(f"{name} = {tau} must be positive, such as 1")
    log_ratio_n = bounded_log_ratio(inputs)
    tau_n = torch.where(inputs.advantages_n > 0, tau_pos, tau_neg).to(log_ratio_n.dtype)
    gate_n = torch.sigmoid(tau_n * (log_ratio_n.exp() - 1)) * (4 / tau_n)
    none_n = torch.zeros_like(gate_n.detach())
    facts = {"pg_clipfrac": none_n, "ppo_kl": -log_ratio_n.detach(), "pg_clipfrac_lower": none_n}
    return PolicyLoss(loss_n=weighted(-inputs.advantages_n * gate_n, inputs), facts=facts)
