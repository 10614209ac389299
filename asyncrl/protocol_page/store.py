"""The store's verbs as they were seen: the life of a key as a diagram, what is in which transaction, and what each ending does.

lives (calls) -> [store] -> docs/data-protocol.md
"""

import re
from collections.abc import Iterable, Sequence
from typing import get_args

from asyncrl.journal.entries import Op, PutCounters
from asyncrl.protocol_page.lives import RESTART, STATES, Call, all_calls, verbs
from asyncrl.protocol_page.tables import docstring_of, mermaid
from asyncrl.reference import markdown
from asyncrl.transfer_queue import TransferQueue

ENDINGS = ("drop", "kv_clear", "retire", "purge", "revive", RESTART)


def life_diagram() -> str:
    """Every way from one state to another that was seen, with the verbs that took it."""
    edges: dict[tuple[str, str], dict[str, None]] = {}
    for call in all_calls():
        start, end = call.before.state, call.after.state
        if start != end or call.verb in ("put_turn", "settle_session", "revive", "reopen_group"):
            edges.setdefault((start, end), {})[call.verb] = None
        elif call.by == "step" and call.verb == "kv_batch_put":
            edges.setdefault((start, end), {})["stages"] = None
    return mermaid([(start, end, ", ".join(labels)) for (start, end), labels in edges.items()])


def verbs_table() -> str:
    """One line a verb and lease; not those that only read."""
    rows: dict[tuple[str, str], list[Call]] = {}
    calls = [call for call in all_calls() if call.verb != RESTART]
    for call in sorted(calls, key=lambda call: (verbs().index(call.verb), call.by)):  # group, session, step
        rows.setdefault((call.verb, call.by), []).append(call)
    told_rows = [(verb, by or "-", _first_sentence(verb), *_transaction(calls)) for (verb, by), calls in rows.items()]
    return markdown(("verb", "lease", "what it does", "its transaction", "synced"), told_rows)


def _transaction(calls: Sequence[Call]) -> tuple[str, str]:
    """All that was seen in it, and whether it waits for a sync at store.sync = "normal"."""
    kinds = dict.fromkeys(type(op) for call in calls for op in call.ops)
    if not kinds:
        return "nothing", "-"
    counters = dict.fromkeys(name for call in calls for op in call.ops if isinstance(op, PutCounters) for name in op.counters)
    spelled = [f"`{kind.__name__}`{f' of {_code(counters)}' if kind is PutCounters else ''}" for kind in kinds]
    return ", ".join(spelled), "yes" if all(call.is_synced for call in calls) else "no"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def operations_table() -> str:
    """What a transaction is made of."""
    return markdown(("operation", "meaning"), [(kind.__name__, docstring_of(kind)) for kind in get_args(Op)])


def _first_sentence(verb: str) -> str:
    text = docstring_of(getattr(TransferQueue, verb), paragraph=0)
    found = re.match(r".*?\.(?= |$)", text)
    return (found[0] if found else text).removesuffix(".")


def endings_table() -> str:
    """What each ending does to a group of one prompt and two sessions, by where the group stood."""
    endings = [call for call in all_calls() if call.verb in ENDINGS]
    endings.sort(key=lambda call: (ENDINGS.index(call.verb), STATES.index(call.before.state), call.step or 0))
    head = ("verb", "of a group", "visible keys", "stage columns", "rows in the journal", "open leases", "turns kept", "counters")
    return markdown(head, list(dict.fromkeys(map(_effect, endings))))


def _effect(call: Call) -> tuple[str, ...]:
    before, after = call.before, call.after
    changed = [name for name in after.counters if after.counters[name] != before.counters.get(name, 0)]
    return (
        f"restart at step {call.step}" if call.verb == RESTART else call.verb,
        before.state.replace("_", " ") + (" in step 1" if before.state in ("recorded", "retired") else ""),
        _change(before.num_visible, after.num_visible),
        _change(before.stage_fields, after.stage_fields),
        _change(before.num_kept, after.num_kept),
        _change(before.num_leases, after.num_leases),
        _change(before.num_turns, after.num_turns),
        ", ".join(f"`{name}` {_change(before.counters.get(name, 0), after.counters[name])}" for name in changed) or "-",
    )


def _change(before: int, after: int) -> str:
    return f"{before} → {after}" if before != after else str(after)
