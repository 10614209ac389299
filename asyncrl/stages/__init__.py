"""The boxes of the way after sampling: balance, old_log_prob, ref_log_prob, values, correction, advantage, update_critic,
update_actor, and the numbers of a step."""
