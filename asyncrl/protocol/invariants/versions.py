"""Invariants of weight versions: which weights sampled a token, and how old they may be when it is trained on."""

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.keys import TrajectoryKey
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants.tokens import Tokens, refuse_tags
from asyncrl.protocol.ragged import values_of


def only_actions_have_a_version(meta: KVBatchMeta, columns: TensorDict) -> None:
    versions, mask = values_of(columns["token_versions"]), values_of(columns["response_mask"])
    wrong = torch.where(mask, versions < 0, versions != -1)
    for row, position, at in Tokens(columns["token_versions"]).first(wrong):
        allowed = "a version from 0" if bool(mask[at]) else "-1"
        raise FieldError(
            f"{meta.keys[row]}: field 'token_versions' is {int(versions[at])} at position {position}, "
            f"where 'response_mask' is {bool(mask[at])}; allowed: {allowed}"
        )


def versions_never_fall(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Along the actions of a trajectory; and the first version of a session's trajectory is not below that of an earlier index."""
    tokens = Tokens(columns["token_versions"])
    actions, bounds = tokens.chosen(values_of(columns["response_mask"]))
    versions = values_of(columns["token_versions"])[actions]
    falls = versions[1:] < versions[:-1]
    acting = (bounds.diff() > 0).nonzero()[:, 0]
    starts = bounds[acting]
    falls[starts[1:] - 1] = False  # from one row to the next
    for at in falls.nonzero()[:1, 0].tolist():
        row, position = tokens.place(int(actions[at + 1]))
        raise FieldError(
            f"{meta.keys[row]}: field 'token_versions' falls from {int(versions[at])} to {int(versions[at + 1])} "
            f"at position {position}"
        )
    _refuse_falling_sessions(meta, dict(zip(acting.tolist(), versions[starts].tolist(), strict=True)))


def tags_spell_the_versions(meta: KVBatchMeta, columns: TensorDict) -> None:
    """min/max_global_steps of the actions; without any, the dispatch version."""
    actions, bounds = Tokens(columns["token_versions"]).chosen(values_of(columns["response_mask"]))
    versions, counts = values_of(columns["token_versions"])[actions].double(), bounds.diff()  # only floats are reduced by segment
    dispatched = torch.tensor([int(tag.get("global_steps", 0)) for tag in meta.tags], device=versions.device)
    for tag, reduction in (("min_global_steps", "min"), ("max_global_steps", "max")):
        of_actions = torch.segment_reduce(versions, reduction, lengths=counts)  # of no actions: infinity, which nobody takes
        expected = dispatched.masked_scatter(counts > 0, of_actions[counts > 0].long())
        refuse_tags(meta, tag, expected, "what 'token_versions' of the actions says (without any: the tag global_steps)")


def actions_are_fresh(meta: KVBatchMeta, columns: TensorDict, *, version: int, max_staleness: int) -> None:
    """0 <= version - token_version <= max_staleness on every action, with `version` the weights that are about to learn from it."""
    versions, mask = values_of(columns["token_versions"]), values_of(columns["response_mask"])
    wrong = mask & ((versions > version) | (versions < version - max_staleness))
    for row, position, at in Tokens(columns["token_versions"]).first(wrong):
        raise FieldError(
            f"{meta.keys[row]}: field 'token_versions' is {int(versions[at])} at position {position}; "
            f"{_allowed(version, max_staleness)}"
        )


def tags_are_fresh(meta: KVBatchMeta, *, version: int, max_staleness: int) -> None:
    """The same from min_global_steps and max_global_steps: no value is read, so it runs on every batch. Rows with actions only."""
    for key, tag in zip(meta.keys, meta.tags, strict=True):
        if not tag.get("policy_len", 1) or tag.get("is_padding"):
            continue
        for name in ("min_global_steps", "max_global_steps"):
            if name in tag and not 0 <= version - int(tag[name]) <= max_staleness:
                raise FieldError(f"{key}: tag {name!r} is {tag[name]}; {_allowed(version, max_staleness)}")


def _allowed(version: int, max_staleness: int) -> str:
    oldest = max(0, version - max_staleness)
    return f"allowed: {oldest} to {version}, for weights of version {version} and max_staleness {max_staleness}"


def _refuse_falling_sessions(meta: KVBatchMeta, first_versions: dict[int, int]) -> None:
    newest: dict[tuple[str, int], tuple[TrajectoryKey, int]] = {}
    for key, version in sorted((TrajectoryKey.parse(meta.keys[row]), version) for row, version in first_versions.items()):
        earlier, floor = newest.setdefault((key.uid, key.session_id), (key, version))
        if version < floor:
            raise FieldError(f"{key}: its first token version is {version}, but the earlier {earlier} began with {floor}")
        newest[key.uid, key.session_id] = (key, version)
