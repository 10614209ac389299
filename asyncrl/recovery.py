"""What a restart finds in the store: the groups that are under way, and what admission must know of them.

journal -> TransferQueue -> [recovery] -> wiring (Admission, Feed), trainer.admit (half-done groups)

Recovery has no way of its own. The trainer repeats the recorded steps by the same lines that made them, and admission, replay and
runner go on with what is there. Source of the rules: docs/proofs/recovery.md.
"""

from dataclasses import dataclass

from asyncrl.agents.prompts import PROMPT_FIELDS, prompt_of
from asyncrl.keys import TRAIN
from asyncrl.ports import Prompt
from asyncrl.replay import Found
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.under_way import GroupUnderWay


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A group whose sessions have not all settled, and its prompt as it was admitted."""

    prompt: Prompt
    found: GroupUnderWay


def found_groups(queue: TransferQueue, *, step: int) -> Found:
    """Of all groups, for weights that have seen `step` steps."""
    counters = queue.counters()
    prefix = "dropped/"
    return Found(
        alive=tuple(group.uid for group in queue.groups_under_way(TRAIN)),
        records={number: record.uids for number, record in sorted(queue.records.items()) if number > step},
        num_admitted=counters.get("admitted", 0),
        num_trained=queue.num_trained,
        num_dropped={name.removeprefix(prefix): number for name, number in counters.items() if name.startswith(prefix)},
    )


async def open_groups(queue: TransferQueue) -> tuple[Open, ...]:
    """In the order of admission. Their prompts come from the store: the dataset is not asked."""
    unsettled = [group for group in queue.groups_under_way(TRAIN) if not group.is_settled]
    return tuple([Open(prompt=await _prompt(queue, group), found=group) for group in unsettled])


async def _prompt(queue: TransferQueue, group: GroupUnderWay) -> Prompt:
    columns = await queue.kv_batch_get([group.uid], partition_id=TRAIN, fields=PROMPT_FIELDS)
    return prompt_of(group.uid, group.tag, {name: columns.get(name).tolist()[0] for name in PROMPT_FIELDS})
