"""Adapters merged into their weights: what the layers compute with and without them."""

import torch

from asyncrl.algorithms.low_rank import adapted_weights, is_adapter, merge_all, merged


def test_a_merged_weight_computes_what_weight_and_adapter_do() -> None:
    weight_OI, a_RI, b_OR, x_nI = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (2, 4), (5, 2), (7, 4)))
    want = x_nI @ weight_OI.T + (x_nI @ a_RI.T) @ b_OR.T
    torch.testing.assert_close(x_nI @ merged(weight_OI, a_RI, b_OR).T, want, rtol=1e-12, atol=1e-12)


def test_a_bfloat16_weight_is_rounded_once() -> None:
    weight, a, b = (torch.randn(*shape).bfloat16() for shape in ((50, 40), (8, 40), (50, 8)))
    want = (weight.double() + b.double() @ a.double()).bfloat16()
    got = merged(weight, a, b)
    assert got.dtype == torch.bfloat16
    assert float((got != want).float().mean()) < 0.01, "float32 sums may fall on the other side of a tie"


def test_names_are_paired_and_the_rest_stays_as_it_is() -> None:
    tensors = {
        "norm.weight": torch.ones(2),
        "q_proj.weight": torch.zeros(2, 2),
        "q_proj.lora_A.weight": torch.ones(1, 2),
        "q_proj.lora_B.weight": torch.ones(2, 1),
    }
    assert [name for name in tensors if is_adapter(name)] == ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]
    assert adapted_weights(tensors) == {"q_proj.weight": ("q_proj.lora_A.weight", "q_proj.lora_B.weight")}
    whole = merge_all(tensors)
    assert list(whole) == ["norm.weight", "q_proj.weight"]
    assert whole["q_proj.weight"].tolist() == [[1, 1], [1, 1]]
    assert whole["norm.weight"] is tensors["norm.weight"]
