"""Lists of numbers become what torch makes of them, or are refused: none is rounded without a word."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import FieldError
from asyncrl.fields import CATALOGUE
from asyncrl.transfer_queue.encoding import encode

PLAIN: list[Any] = [0, 1, 2, 3, -1, True, False, 0.0, 1.0, -0.0, 0.5, 1e-46, 1e300, -3.0, float("nan"), float("inf")]
PLAIN += [2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), 2**200, None, "1", 1j, [1], np.int64(2), np.True_]


def torch_of(values: list[Any], dtype: torch.dtype) -> torch.Tensor | None:
    """None for what torch refuses, and for what is not equal to the whole number or bool that torch makes of it."""
    try:
        made = torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        return None
    return made if dtype.is_floating_point or made.tolist() == values else None


@given(st.sampled_from(["prompts", "token_versions", "rollout_log_probs", "response_mask"]), st.lists(st.sampled_from(PLAIN)))
def test_a_list_of_numbers_is_what_torch_makes_of_it_or_refused(name: str, values: list[Any]) -> None:
    expected = torch_of(values, getattr(torch, CATALOGUE[name].dtype))
    if expected is None:
        with pytest.raises(FieldError, match=f"field '{name}' of key 'a_0_0'"):
            encode(name, [values], ["a_0_0"], step=None)
    else:
        assert encode(name, [values], ["a_0_0"], step=None).values.tolist() == expected.view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("prompts", [1, 0.5], "0.5 would become 0"), ("response_mask", [1, 2], "2 would become True")],
)
def test_no_list_of_numbers_is_rounded_to_whole_ones(name: str, value: list[float], told: str) -> None:
    with pytest.raises(FieldError, match=f"field '{name}' of key 'a_0_0': list is not a tensor \\({told}\\)"):
        encode(name, [value], ["a_0_0"], step=None)
