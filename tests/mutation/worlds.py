"""Small worlds, one a topology that faults act in: a shipped scenario, cut down to a few ranks."""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType

import torch

from actors.driver import Outcome, run_scenario
from actors.kept import KeptWork
from moe.formats import Stage
from reports.result import Result
from scenarios.loader import LoadedScenario, load_scenario

ROOT = Path(__file__).parents[2]
SMALL = ("model.overrides.hidden_size=256", "model.overrides.n_routed_experts=8")


@dataclass(frozen=True)
class World:
    """A scenario file and what is set in it."""

    file: str
    sets: tuple[str, ...]

    def but(self, *sets: str) -> "World":
        """The same with more set in it."""
        return World(self.file, (*self.sets, *sets))

    @staticmethod
    def topology(
        name: str, attention: str, moe: str, tokens: str, *sets: str, ranks: int = 4
    ) -> "World":
        """A shipped topology on fewer ranks."""
        degrees = (f"parallel.attention={attention}", f"parallel.moe={moe}")
        return World(
            f"topologies/{name}.yaml",
            (f"parallel.world_size={ranks}", *degrees, f"batch.tokens={tokens}", *sets),
        )


A2A = World(
    "smoke/ep2_dp.yaml",
    (
        "parallel.world_size=4",
        "parallel.attention.dp=4",
        "parallel.moe.ep=4",
        "batch.tokens=[5, 0, 9, 3]",
    ),
)
DECODE = "batch.phase=decode"
LOW_LATENCY = A2A.but(
    DECODE,
    "moe.dispatcher=deepep_ll",
    "moe.switches.max_dispatch_tokens_per_rank=16",
    "model.overrides.num_experts_per_tok=2",
)
V2 = A2A.but("moe.dispatcher=deepep_v2", "moe.switches.max_dispatch_tokens_per_rank=32")
FLASHINFER = A2A.but("moe.dispatcher=flashinfer")
PAIRS_OF_EXPERTS = "{hidden_size: 256, moe_intermediate_size: 128, n_routed_experts: 16}"
TWO_OF_EIGHT = (
    "{hidden_size: 256, moe_intermediate_size: 256, num_experts: 8, num_experts_per_tok: 2}"
)

PADDED_OAI = (
    "model={preset: gpt_oss, overrides: {hidden_size: 192, intermediate_size: 192, "
    "num_local_experts: 8, num_experts_per_tok: 4}}"
)
SITU = (
    "model={preset: kimi_k3, overrides: {routed_expert_hidden_size: 256, "
    "moe_intermediate_size: 128, num_experts: 8, num_experts_per_token: 4}}"
)

WORLDS = MappingProxyType(
    {
        "a2a": A2A,
        "a2a fp32 scales": A2A.but("platform=sm90"),
        "a2a bf16": A2A.but("moe.recipe=bf16"),
        "a2a of halves": World.topology(
            "dp_tp_ep_a2a",
            "{dp: 2, tp: 2}",
            "{ep: 4}",
            "[6, 11]",
            f"model.overrides={PAIRS_OF_EXPERTS}",
        ),
        "a2a of chunks": World.topology(
            "tp_ep_a2a",
            "{dp: 1, tp: 4}",
            "{ep: 4}",
            "[14]",
            *SMALL,
            "model.overrides.moe_intermediate_size=128",
        ),
        "tp": World.topology(
            "pure_tp",
            "{dp: 1, tp: 2}",
            "{ep: 1, tp: 2}",
            "[7]",
            "moe.layout=compact",
            f"model.overrides={TWO_OF_EIGHT}",
            "moe.layout=compact",
            ranks=2,
        ),
        "ep and tp": World.topology(
            "ep_tp_hybrid",
            "{dp: 1, tp: 4}",
            "{ep: 2, tp: 2}",
            "[9]",
            "moe.layout=compact",
            "model.overrides={hidden_size: 256, intermediate_size: 256}",
            "moe.layout=compact",
        ),
        "summed in the tail": World.topology(
            "dp_ep_all_reduce",
            "{dp: 2, tp: 2}",
            "{ep: 4}",
            "[4, 7]",
            *SMALL,
            "model.overrides.moe_intermediate_size=256",
        ),
        "slabs": World.topology(
            "dp_max_len_decode",
            "{dp: 2, tp: 2}",
            "{ep: 4}",
            "[3, 4]",
            *SMALL,
            "model.overrides.moe_intermediate_size=128",
        ),
        "scattered": World.topology(
            "dp_ep_reduce_scatter",
            "{dp: 4}",
            "{ep: 4}",
            "[5, 0, 3, 2]",
            *SMALL,
            "model.overrides.moe_intermediate_size=128",
        ),
        "scattered shards": World.topology(
            "dp_fp8_gather",
            "{dp: 4}",
            "{ep: 4}",
            "[5, 0, 3, 2]",
            *SMALL,
            "model.overrides.moe_intermediate_size=256",
        ),
        "hashed": World(
            "topologies/hash_dp.yaml",
            (
                "parallel={world_size: 4, attention: {dp: 4}, moe: {ep: 4}}",
                "batch.tokens=[4, 0, 3, 2]",
                *SMALL,
                "model.overrides.moe_intermediate_size=128",
            ),
        ),
        "slabs ll": LOW_LATENCY,
        "v2": V2,
        "v2 expanded": V2.but(DECODE),
        "v2 in place": V2.but(DECODE, "moe.layout=compact", "allow_unsupported=true"),
        "flashinfer decode": FLASHINFER.but(DECODE),
        "flashinfer extend": FLASHINFER,
        "capped slabs": World(
            A2A.file,
            (
                "parallel.attention={dp: 1, tp: 2}",
                "parallel.moe={ep: 1, tp: 2}",
                "moe.dispatcher=standard",
                "moe.layout=masked",
                "moe.switches.masked_m_cap=true",
                "model.overrides.moe_intermediate_size=1024",
                "model.overrides.num_experts_per_tok=1",
                "batch.tokens=[270]",
            ),
        ),
        "experts per tensor": A2A.but("moe.recipe=fp8_per_tensor", "platform=sm90"),
        "experts mxfp8": A2A.but("moe.recipe=mxfp8"),
        "experts mxfp4": A2A.but("moe.recipe=mxfp4_w4a8"),
        "experts mxfp4 as fp8": A2A.but("moe.recipe=mxfp4_as_fp8"),
        "experts oai": A2A.but(PADDED_OAI, "moe.recipe=mxfp4_w4a8"),
        "experts oai in segments": A2A.but(
            PADDED_OAI, "moe={dispatcher: standard, recipe: mxfp4_w4a8, layout: compact}"
        ),
        "experts situ": A2A.but(SITU, "moe.recipe=mxfp4_w4a8"),
        "scales": A2A.but("model.overrides.moe_intermediate_size=512"),
        "scales of tensors": A2A.but("moe.recipe=fp8_per_tensor"),
        "scales mx": V2.but("moe.recipe=mxfp8", "model.overrides.moe_intermediate_size=256"),
        "scales ll fp32": LOW_LATENCY.but("platform=sm90"),
        "scales ll sm120": LOW_LATENCY.but("platform=sm120"),
        "cp": World.topology(
            "cp_gather",
            "{dp: 1, cp: 4}",
            "{ep: 4}",
            "[13]",
            *SMALL,
            "model.overrides.moe_intermediate_size=128",
        ),
    }
)


def load(world: str, *injects: str, sets: tuple[str, ...] = ()) -> LoadedScenario:
    """A world with faults, and more set in it."""
    settings = ("run.runtime=loopback", "inputs.modes=[random]", *WORLDS[world].sets, *sets)
    path = ROOT / "scenarios" / WORLDS[world].file
    return load_scenario(path, overrides=settings, injects=injects)


@dataclass(frozen=True, eq=False)
class Ran:
    """What tests read of a run; traces and judges are let go.

    output  [own rows of all ranks, round by round, H] int16; no rows unless every rank came back
    """

    result: Result
    output: torch.Tensor

    @classmethod
    def of(cls, outcome: Outcome) -> "Ran":
        """What stays of an outcome."""
        reports = [report for run in outcome.runs for report in run.reports]
        rows = [
            report.trace[Stage.GLUE_OUT]["hidden_states"].view(torch.int16) for report in reports
        ]
        return cls(outcome.result, torch.cat(rows) if rows else torch.empty(0, dtype=torch.int16))


@cache
def outcome(world: str, *injects: str, sets: tuple[str, ...] = ()) -> Ran:
    """A run with all that is asked; tests share it."""
    return Ran.of(run_scenario(load(world, *injects, sets=sets)))


@cache
def judged(world: str, *injects: str, sets: tuple[str, ...] = ()) -> Ran:
    """A run that is not asked about determinism; tests share it."""
    return Ran.of(
        run_scenario(load(world, *injects, sets=sets), kept=_kept(world, sets), asks=False)
    )


@lru_cache(maxsize=1)
def _kept(world: str, sets: tuple[str, ...]) -> KeptWork:
    """Of a clean run of one world, for its faults: they come one after the other."""
    kept = KeptWork()
    run_scenario(load(world, sets=sets), kept=kept, asks=False)
    return kept
