"""The shipped sweep of dispatchers and layouts against the server's matrix, written by hand."""

from itertools import product
from pathlib import Path

import pytest

from scenarios.sweep import load_path

# What an SGLang 0.5.21 server accepts, by hand: dispatcher -> topologies, and layout by phase.
# Context parallelism is for prefill. Mooncake and NIXL are deepep_ll without it.
# Source: SGLang 0.5.21, server_args.py; layers/moe/token_dispatcher/; models/deepseek_v4.py.
EVERY_TOPOLOGY = ("pure_tp", "dp_tp", "tp_ep", "dp_ep", "dp_tp_ep", "cp_ep")
WHOLE_EXPERTS = ("tp_ep", "dp_ep", "dp_tp_ep")
BOTH, MASKED, COMPACT = ("masked", "compact"), ("masked",), ("compact",)
MATRIX = {
    "standard": (EVERY_TOPOLOGY, {"extend": BOTH, "decode": BOTH}),
    "flashinfer": (("dp_ep",), {"extend": BOTH, "decode": BOTH}),
    "deepep_normal": ((*WHOLE_EXPERTS, "cp_ep"), {"extend": COMPACT, "decode": COMPACT}),
    "deepep_ll": ((*WHOLE_EXPERTS, "cp_ep"), {"extend": MASKED, "decode": MASKED}),
    "deepep_v2": (WHOLE_EXPERTS, {"extend": COMPACT, "decode": MASKED}),
    "mooncake": (WHOLE_EXPERTS, {"extend": MASKED, "decode": MASKED}),
    "nixl": (WHOLE_EXPERTS, {"extend": MASKED, "decode": MASKED}),
}


@pytest.fixture(scope="module")
def dispatch_layout():
    return load_path(Path(__file__).parents[3] / "scenarios" / "sweeps" / "dispatch_layout.yaml")


def test_the_legal_rows_of_dispatch_layout_are_the_matrix_of_the_server(dispatch_layout):
    wanted = {
        (topology, dispatcher, layout, phase)
        for dispatcher, (topologies, layouts) in MATRIX.items()
        for topology, phase in product(topologies, layouts)
        for layout in layouts[phase]
        if (topology, phase) != ("cp_ep", "decode")
    }
    axes = ("topology", "moe.dispatcher", "moe.layout", "batch.phase")
    got = {tuple(row.values[axis] for axis in axes) for row, _ in dispatch_layout.legal}
    assert got == wanted


def test_dispatch_layout_has_every_recipe_and_platform_of_every_combination(dispatch_layout):
    assert len(dispatch_layout.legal) == 58 * len(["bf16", "fp8_block128"]) * len(["sm90", "sm100"])


def test_dispatch_layout_has_a_use_for_each_of_its_values(dispatch_layout):
    assert dispatch_layout.values_without_a_row() == []


def test_topologies_of_dispatch_layout_with_several_groups_have_an_idle_one(dispatch_layout):
    rows = dispatch_layout.legal
    tokens = {row.values["topology"]: loaded.scenario.batch.tokens for row, loaded in rows}
    assert all(0 in counts for counts in tokens.values() if len(counts) > 1)
    assert {name for name, counts in tokens.items() if len(counts) > 1} == {
        "dp_tp",
        "dp_ep",
        "dp_tp_ep",
    }
