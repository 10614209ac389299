"""Settings for all tests: one hypothesis profile without time limits; torch seeded and single-threaded wherever it is loaded."""

import sys

import pytest
from hypothesis import settings

# hypothesis has a profile of its own for CI machines, with a limit a example: that would be a hidden time assertion.
for _profile in ("default", "ci"):
    settings.register_profile(_profile, deadline=None, max_examples=40)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    """pytest-randomly seeds Python and numpy only. Tests without torch must not pay for importing it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)
