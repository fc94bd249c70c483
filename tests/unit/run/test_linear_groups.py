"""Each linear is in one kind, and its layer in one third."""

import pytest

from megatron_snip.run.evaluation import KINDS, THIRDS, linear_groups
from megatron_snip.types import linear_name

MODULES = {
    "self_attention.linear_qkv": "attention",
    "cross_attention.linear_kv": "attention",
    "mtp_model_layer.self_attention.linear_proj": "attention",
    "mlp.linear_fc1": "mlp",
    "mlp.shared_experts.linear_fc2": "mlp",
    "mlp.experts.linear_fc1": "experts",
    "mixer.in_proj": "mamba",
    "something.linear": "others",
}


def test_a_linear_is_in_the_group_of_its_module() -> None:
    names = {linear_name(1, module): kind for module, kind in MODULES.items()}
    groups = linear_groups(names)
    for name, kind in names.items():
        assert [group for group in KINDS if name in groups[group]] == [kind]
    dense = linear_groups(["decoder.layers.0.mlp.linear_fc1"])
    assert dense == dict.fromkeys(("mlp", "first_third"), frozenset(dense["mlp"]))


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (8, [3, 3, 2])]
)
def test_thirds_follow_the_layers_of_the_model(num_layers: int, sizes: list[int]) -> None:
    """Those of multi-token prediction are the last."""
    blocks = ["decoder"] * (num_layers - 1) + ["mtp"]
    layers = [(block, i if block == "decoder" else 0) for i, block in enumerate(blocks)]
    names = [linear_name(1 + i, "mlp.linear_fc1", block) for block, i in layers]
    groups = linear_groups(names)
    found = [name for third in THIRDS for name in names if name in groups.get(third, ())]
    assert found == names
    assert [len(groups[third]) for third in THIRDS if third in groups] == sizes
