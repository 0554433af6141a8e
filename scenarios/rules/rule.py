"""What a rule is, and what it may look at."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Generic, TypeVar

from moe.formats import GemmLayout, QuantRecipe
from scenarios.layouts import layout_choice
from scenarios.models import MoeModel
from scenarios.schema import Scenario

# Activation groups and weight blocks of every quantised recipe divide it.
BLOCK: Final = 128


class RuleKind(StrEnum):
    """How strictly a rule holds.

    semantic      the combination means nothing: refused always
    policy        an SGLang server refuses it, though it has a meaning: refused unless waived by
                  ``allow_unsupported``
    kernel_shape  the real kernels refuse the size: refused with real kernels or ``strict_shapes``,
                  noted otherwise
    """

    SEMANTIC = "semantic"
    POLICY = "policy"
    KERNEL_SHAPE = "kernel_shape"


@dataclass(frozen=True)
class Sized:
    """A scenario together with the sizes of its model."""

    scenario: Scenario
    model: MoeModel

    @property
    def partition(self) -> int:
        """Columns of one rank's share of an expert's intermediate axis."""
        return self.model.moe_intermediate_size // self.scenario.parallel.moe.tp

    @property
    def num_physical_experts(self) -> int:
        """Expert slots over all ranks, redundant ones included."""
        return self.model.n_routed_experts + self.scenario.moe.redundant_experts

    @property
    def is_quantised(self) -> bool:
        """Whether the recipe has scales."""
        return self.scenario.moe.recipe != QuantRecipe.BF16

    @property
    def num_local_experts(self) -> int:
        """Expert slots of a rank."""
        return self.num_physical_experts // self.scenario.parallel.moe.ep

    @cached_property
    def has_slabs(self) -> bool:
        """Whether GEMM1 writes one slab an expert; no, as long as the topology is none."""
        try:
            return layout_choice(self.scenario, self.model).layout is GemmLayout.MASKED
        except ValueError:  # refused by the rules on topologies
            return False


Subject = TypeVar("Subject", Scenario, Sized)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Subject]):
    """One row of a rule table.

    name    what the rule demands, as an identifier
    kind    how strictly it holds
    field   the scenario key to change, dotted
    reads   top-level sections that ``check`` looks at
    check   the subject -> what is wrong with it, or None
    source  where upstream says so
    """

    name: str
    kind: RuleKind
    field: str
    reads: frozenset[str]
    check: Callable[[Subject], str | None]
    source: str


def sections(*names: str) -> frozenset[str]:
    """The ``reads`` of a rule."""
    return frozenset(names)
