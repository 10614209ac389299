"""The cases of recovery that are searched: all small sizes, and each fault and option on its own and with others."""

from itertools import product

from tests.models.recovery.state import Case

SIZES = [
    Case(max_staleness=staleness, batch=batch, group=group, turns=turns, every=every)
    for staleness, batch, group, turns, every in product((0, 1, 2), (1, 2), (1, 2), (1, 2), (1, 2))
]

SMALL_SIZES = [case for case in SIZES if case.places * case.group * case.turns <= 8]
"""Those with at most some hundred thousand states."""

OPTIONS = [
    Case(updates=2),
    Case(updates=2, every=3),
    Case(updates=2, batch=2),
    Case(updates=3),
    Case(max_staleness=1, updates=2),
    Case(power=True),
    Case(power=True, every=2),
    Case(power=True, turns=2),
    Case(power=True, batch=2),
    Case(power=True, max_staleness=1),
    Case(power=True, max_staleness=1, every=2),
    Case(power=True, updates=2),
    Case(sigterm=True),
    Case(sigterm=True, every=3),
    Case(sigterm=True, updates=2),
    Case(sigterm=True, max_staleness=1, every=2),
    Case(sigterm=True, power=True, every=2),
    Case(in_flight=True, max_staleness=1),
    Case(in_flight=True, max_staleness=1, every=2),
    Case(in_flight=True, max_staleness=1, group=2),
    Case(in_flight=True, max_staleness=1, turns=2),
    Case(in_flight=True, max_staleness=1, updates=2),
    Case(in_flight=True, max_staleness=1, power=True),
    Case(in_flight=True, max_staleness=2),
    Case(evaluate=1, between=True),
    Case(evaluate=2),
    Case(evaluate=2, between=True),
    Case(evaluate=1, every=2),
    Case(evaluate=1, power=True),
    Case(evaluate=2, power=True),
    Case(evaluate=1, updates=2),
    Case(evaluate=1, updates=2, every=3, between=True),
    Case(evaluate=1, sigterm=True),
    Case(evaluate=2, max_staleness=1, between=True),
    Case(evaluate=1, max_staleness=1, power=True),
    Case(evaluate=1, sigterm=True, power=True, updates=2),
]

QUICK = [
    Case(),
    Case(every=2, turns=2),
    Case(batch=2, group=2),
    Case(max_staleness=1, turns=2),
    Case(max_staleness=2),
    Case(updates=2),
    Case(power=True, every=2),
    Case(power=True, evaluate=1),
    Case(sigterm=True, every=2),
    Case(in_flight=True, max_staleness=1),
    Case(evaluate=2, between=True),
]
"""A few seconds: what every run of the tests searches."""

WALKS = [
    Case(max_staleness=1, batch=2, group=2, turns=2, every=2, in_flight=True, power=True, sigterm=True),
    Case(max_staleness=2, batch=2, group=2, turns=2, every=2, updates=2, in_flight=True, power=True, evaluate=2, between=True),
    Case(max_staleness=3, batch=4, group=2, turns=3, every=3, power=True, evaluate=3),
    Case(max_staleness=2, batch=3, group=4, turns=2, every=4, updates=2, in_flight=True, power=True, sigterm=True, evaluate=1),
    Case(max_staleness=4, batch=2, group=2, turns=3, every=2, in_flight=True, power=True, evaluate=1, between=True),
]
"""Too large to be searched; a history at random."""
