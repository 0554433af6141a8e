"""Example results of each verdict, written out by hand: no run stands behind them."""

from collections.abc import Callable

import pytest

from moe.formats import Stage
from reports.result import (
    Backend,
    Check,
    CheckVerdict,
    Confidence,
    Finding,
    GoldenDistance,
    Mode,
    RankInfo,
    RankVerdict,
    Result,
    StageRow,
    Traffic,
    Verdict,
    Visibility,
)

TOKENS = (17, 0, 33, 64, 5, 64, 1, 40)
OWN_WORST = {Stage.GEMM1: 0.61, Stage.ACTIVATION: 0.34, Stage.GEMM2: 0.57, Stage.TAIL: 0.08}


def scenario(num_ranks: int) -> dict:
    tokens = [TOKENS[rank % 8] for rank in range(num_ranks)]
    return {
        "name": "ep8_dp",
        "model": {"preset": "deepseek_v4", "overrides": {"hidden_size": 512}, "layer": "moe"},
        "parallel": {
            "world_size": num_ranks,
            "attention": {"dp": num_ranks, "tp": 1, "cp": 1},
            "moe": {"ep": num_ranks, "tp": 1},
        },
        "moe": {"dispatcher": "deepep_normal", "recipe": "fp8_block128", "runner": "deep_gemm"},
        "platform": "sm100",
        "batch": {"phase": "extend", "tokens": tokens, "routing": {"kind": "router"}},
        "inputs": {"modes": ["random"], "seed": 7},
        "run": {"runtime": "ray", "device": "cpu"},
        "inject": [],
    }


def stage_row(stage: Stage, rank: int) -> StageRow:
    own = OWN_WORST.get(stage)
    return StageRow(
        mode=Mode.RANDOM,
        stage=stage,
        rank=rank,
        own_worst=None if own is None else own - 0.01 * (rank % 8),
        end_to_end_worst=None if own is None else 0.0021,
        verdict=CheckVerdict.AGREE,
    )


def example_result(num_ranks: int = 8, **changes: object) -> Result:
    fields: dict[str, object] = {
        "name": "ep8_dp",
        "about": "attention DP 8 x EP 8 over DeepEP normal, fp8 block scales, one idle rank",
        "scenario": scenario(num_ranks),
        "model": {
            "name": "deepseek_v4",
            "hidden_size": 512,
            "moe_intermediate_size": 256,
            "n_routed_experts": 4 * num_ranks,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
        },
        "verdict": Verdict.AGREE,
        "as_expected": True,
        "summary": "All 12 stages on all 8 ranks agree, for 224 tokens; worst 0.61 of its band.",
        "checks": [
            Check(
                name="accounts",
                verdict=CheckVerdict.AGREE,
                detail="1,344 routes sent, received, computed, combined",
            ),
            Check(
                name="contract",
                verdict=CheckVerdict.AGREE,
                detail="ids, dtypes and layouts hold at every stage",
            ),
            Check(
                name="band",
                mode=Mode.RANDOM,
                verdict=CheckVerdict.AGREE,
                detail="worst 0.61 at gemm1, rank 0",
            ),
            Check(
                name="exact",
                mode=None,
                verdict=CheckVerdict.NOT_APPLICABLE,
                detail="no exact inputs in this scenario",
            ),
        ],
        "stages": [stage_row(stage, rank) for rank in range(num_ranks) for stage in Stage],
        "visibility": [
            Visibility(
                mode=Mode.RANDOM,
                stage=Stage.GEMM1,
                smallest_relative_effect=0.004,
                note="band / |value| of the loosest cell",
            ),
            Visibility(mode=Mode.RANDOM, stage=Stage.DISPATCH, note="compared bitwise: any bit"),
        ],
        "ranks": [
            RankInfo(rank=r, node="node-0", pid=4000 + r, device="cpu", verdict=RankVerdict.OK)
            for r in range(num_ranks)
        ],
        "backends": {
            "gemm": Backend(name="torch", version="2.13.0", reason="no GPU on this machine"),
            "transport": Backend(name="gloo", version="2.13.0", reason="device is cpu"),
        },
        "traffic": [
            Traffic(
                stage=stage,
                op="all_to_all_v",
                group=list(range(num_ranks)),
                payload_bytes=[540 * TOKENS[r % 8] for r in range(num_ranks)],
            )
            for stage in (Stage.DISPATCH, Stage.COMBINE)
        ],
        "golden": [
            GoldenDistance(
                mode=Mode.RANDOM,
                stage=Stage.GLUE_OUT,
                same_recipe_to_ideal=0.0412,
                run_to_same_recipe=0.0023,
            )
        ],
        "timing": {"forward": 0.058, "golden": 0.121, "verdict": 0.092},
        "environment": {"torch": "2.13.0", "python": "3.11.7", "cores": 2},
        "reproduce": "python run.py scenarios/ep8_dp.yaml --set inputs.seed=7",
    }
    return Result(**(fields | changes))


def discrepant_result(num_ranks: int = 8) -> Result:
    found = {
        "mode": Mode.RANDOM,
        "stage": Stage.GEMM1,
        "rank": 5,
        "token": 147,
        "slot": 2,
        "expert": 21,
        "columns": (128, 256),
        "got": -1.8125,
        "want": -0.90631,
        "band": 0.0117,
        "tensor": "gate_up",
        "check": "band",
        "detail": "64 rows of expert 21 are outside the band, in columns 128-255 only.",
    }
    finding = Finding(
        **found,
        diagnosis="Scale exponent of expert 21 off by one in K block 1",
        confidence=Confidence.HIGH,
    )
    behind = finding.model_copy(
        update={
            "stage": Stage.COMBINE,
            "rank": 2,
            "token": 40,
            "slot": None,
            "expert": None,
            "columns": None,
            "tensor": "combined",
            "got": float("nan"),
            "diagnosis": "unexplained: one row",
            "confidence": Confidence.NONE,
        }
    )
    bad = {(5, Stage.GEMM1): 77.4, (2, Stage.COMBINE): float("inf")}
    rows = [stage_row(stage, rank) for rank in range(num_ranks) for stage in Stage]
    rows = [
        row.model_copy(update={"own_worst": bad[key], "verdict": CheckVerdict.DISCREPANCY})
        if (key := (row.rank, row.stage)) in bad
        else row
        for row in rows
    ]
    return example_result(
        num_ranks,
        verdict=Verdict.DISCREPANCY,
        as_expected=False,
        summary="gemm1 on rank 5 is wrong at token 147: scale of expert 21 off by one in block 1.",
        checks=[
            Check(
                name="accounts", verdict=CheckVerdict.AGREE, detail="every route is accounted for"
            ),
            Check(
                name="band",
                mode=Mode.RANDOM,
                verdict=CheckVerdict.DISCREPANCY,
                detail="64 rows at gemm1, rank 5",
            ),
        ],
        first_divergence=found,
        findings=[finding, behind],
        stages=rows,
    )


def failed_result(num_ranks: int = 8) -> Result:
    def info(rank: int) -> RankInfo:
        lost = rank == 5
        return RankInfo(
            rank=rank,
            node="node-0",
            pid=4000 + rank,
            device="cpu",
            verdict=RankVerdict.DIED if lost else RankVerdict.RELEASED,
            stage=Stage.COMBINE,
            cause="killed by signal 9 (out of memory?)"
            if lost
            else "waited in all_to_all_v for rank 5",
        )

    return example_result(
        num_ranks,
        verdict=Verdict.FAILED,
        as_expected=False,
        summary="Rank 5 died in combine: killed by signal 9; 7 ranks were waiting for it.",
        checks=[
            Check(name="accounts", verdict=CheckVerdict.FAILED, detail="rank 5 owes its verdict")
        ],
        stages=[],
        visibility=[],
        golden=[],
        traffic=[],
        ranks=[info(rank) for rank in range(num_ranks)],
    )


def unsupported_result() -> Result:
    return example_result(
        verdict=Verdict.UNSUPPORTED,
        as_expected=True,
        summary="This machine has no GPU, and gemm: deep_gemm needs one of sm90 or sm100.",
        notes=["run.backends.gemm: deep_gemm asks for CUDA; torch runs the same rules on a CPU."],
        checks=[],
        stages=[],
        visibility=[],
        golden=[],
        traffic=[],
        ranks=[],
        backends={},
        timing={},
    )


RESULTS = {
    "agree": example_result,
    "discrepancy": discrepant_result,
    "failed": failed_result,
    "unsupported": unsupported_result,
}


@pytest.fixture
def agreeing() -> Result:
    return example_result()


@pytest.fixture
def discrepant() -> Result:
    return discrepant_result()


@pytest.fixture
def failed() -> Result:
    return failed_result()


@pytest.fixture(params=RESULTS)
def any_result(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]()


@pytest.fixture
def make_discrepant() -> Callable[[int], Result]:
    return discrepant_result
