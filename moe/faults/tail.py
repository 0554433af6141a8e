"""Faults of the layer's end: scaling factor, shared expert, who reduces."""

from dataclasses import replace
from typing import Final

import torch

from moe.faults.kinds import FaultContext, Params, Plan, plan_fault, value_fault
from moe.formats import Stage
from moe.stages import TailOutput
from topology.sync import Reducer


def shared_expert_per_rank(finished: TailOutput, context: FaultContext) -> TailOutput:
    """What a rank adds of the shared expert is added once for every rank instead of once."""
    return _more_of_shared(finished, context.num_ranks - 1)


def shared_expert_missing(finished: TailOutput, context: FaultContext) -> TailOutput:
    """What a rank adds of the shared expert is left out."""
    return _more_of_shared(finished, -1)


def shared_expert_split(finished: TailOutput, context: FaultContext) -> TailOutput:
    """What a rank adds of the shared expert is divided by the number of ranks."""
    return _more_of_shared(finished, 1 / context.num_ranks - 1)


def reduced_sum_stale(finished: TailOutput, context: FaultContext) -> TailOutput:
    """The sum over the ranks is the one that the forward before left in the buffer."""
    before: TailOutput | None = context.earlier.get(Stage.TAIL)
    if finished.reduced is None or before is None or before.reduced is None:
        return finished
    if before.reduced.shape != finished.reduced.shape:
        return finished
    added = finished.output.to(torch.float32) - finished.reduced.to(torch.float32)
    output = (before.reduced.to(torch.float32) + added).to(torch.bfloat16)
    return replace(finished, output=output, reduced=before.reduced)


def _more_of_shared(finished: TailOutput, times: float) -> TailOutput:
    """The output with so much more of the shared expert; a summand that waits for its sum, too."""
    if finished.shared is None:
        return finished
    extra = finished.shared.output.to(torch.float32) * times
    output = (finished.output.to(torch.float32) + extra).to(torch.bfloat16)
    waits = finished.summand is not None and finished.reduced is None
    return replace(finished, output=output, summand=output if waits else finished.summand)


def scaling_factor_twice(plan: Plan, params: Params, rank: int) -> Plan:
    """The routed scaling factor acts twice, where it should once.

    A tail with routes of all ranks multiplies by it once more, whether or not the sum over a
    rank's routes has it already: SGLang 0.5.21 does so behind flashinfer, by reading of
    deepseek_v2.py::forward_deepep.
    """
    factor = plan.routed_scaling_factor
    if plan.sync.reducer is Reducer.COMBINE:
        return replace(plan, tail_scaling_factor=plan.tail_scaling_factor * factor)
    return replace(plan, routed_scaling_factor=factor**2)


def scaling_factor_missing(plan: Plan, params: Params, rank: int) -> Plan:
    """The routed scaling factor acts nowhere."""
    return replace(plan, routed_scaling_factor=1.0, tail_scaling_factor=1.0)


def reduced_in_tail_too(plan: Plan, params: Params, rank: int) -> Plan:
    """The tail sums over the ranks what the glue behind it will sum again."""
    if plan.sync.reducer is not Reducer.GLUE_OUT:
        return plan
    return replace(plan, sync=replace(plan.sync, reducer=Reducer.TAIL))


def where_the_factor_acts(plan: Plan, params: Params) -> Stage:
    """With the sum over a rank's routes, where the format folds it in; else in the tail."""
    return Stage.POST_PERMUTE if plan.dispatch_format.folds_scaling_factor else Stage.TAIL


def where_the_factor_acts_again(plan: Plan, params: Params) -> Stage:
    """In the tail, if routes of all ranks arrive there; else with the sum over a rank's."""
    return Stage.TAIL if plan.sync.reducer is Reducer.COMBINE else Stage.POST_PERMUTE


TAIL_FAULTS: Final = (
    plan_fault(
        Stage.TAIL,
        scaling_factor_twice,
        "routed_scaling_factor applied a second time",
        "vllm-project/vllm#45037; sglang-0.5.21 behind flashinfer",
        where_the_factor_acts_again,
    ),
    plan_fault(
        Stage.TAIL,
        scaling_factor_missing,
        "routed_scaling_factor applied nowhere",
        "sgl-project/sglang#8511",
        where_the_factor_acts,
    ),
    value_fault(
        Stage.TAIL,
        shared_expert_per_rank,
        "the shared expert counted once a rank",
        "sgl-project/sglang#31476",
    ),
    value_fault(
        Stage.TAIL,
        shared_expert_missing,
        "a rank's part of the shared expert never added",
        "divyamakkar0/JAXformer#21",
    ),
    value_fault(
        Stage.TAIL,
        shared_expert_split,
        "the shared expert divided by the number of ranks, though it is not summed over them",
        "our own reading of sgl-project/sglang#35535, from the other side",
    ),
    value_fault(
        Stage.TAIL,
        reduced_sum_stale,
        "the sum over the ranks as the forward before left it; needs run.rounds >= 2",
        "NVIDIA/nccl#1924",
    ),
    plan_fault(
        Stage.TAIL,
        reduced_in_tail_too,
        "partial sums summed in the tail and by the reduce-scatter behind it",
        "vllm-project/vllm#49122",
    ),
)
