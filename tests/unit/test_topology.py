"""Where a rank and a linear stand."""

from megatron_snip.topology import DataAxis, Placement, Topology

DENSE = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 512, 256)
EXPERT = Placement("decoder.layers.0.mlp.experts.linear_fc1", 0, "column", 256, 512, expert=3)


def test_experts_have_their_own_data_ranks() -> None:
    topology = Topology(data=DataAxis(1, 4), expert_data=DataAxis(0, 2))
    assert topology.data_axis(DENSE) == topology.data
    assert topology.data_axis(EXPERT) == topology.expert_data


def test_flops_are_those_of_three_gemms_and_active_experts() -> None:
    tokens = 7
    gemm = 2 * tokens * DENSE.in_features * DENSE.out_features
    assert DENSE.info.flops_per_token * tokens == 3 * gemm
    two = Placement(EXPERT.name, 0, "column", 256, 512, expert=3, num_active=2.0)
    assert two.info.flops_per_token == 2 * EXPERT.info.flops_per_token


def test_experts_of_a_layer_share_a_name_and_not_an_instance() -> None:
    other = Placement(EXPERT.name, 0, "column", 256, 512, expert=4)
    assert EXPERT.name == other.name
    assert EXPERT.instance != other.instance
    assert DENSE.instance == DENSE.name
