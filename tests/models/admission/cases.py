"""The cases of admission that are searched: all with few places."""

from itertools import product

from tests.models.admission.model import Case


def cases(num_places: int) -> list[Case]:
    """All with at most `num_places` places, with a publication that is owed and without."""
    sizes = range(1, num_places + 1)
    grid = (
        Case(max_staleness=staleness, batch=batch, updates=updates, is_lagging=lagging)
        for staleness, batch, updates, lagging in product(range(num_places), sizes, sizes, (False, True))
    )
    return [case for case in grid if case.limit <= num_places]


SMALL = cases(5)
LARGE = [case for case in cases(8) if case.max_staleness <= 5]
HUGE = cases(8)
