"""What a rule is, and what it may look at."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Generic, TypeVar

from moe.formats import GemmLayout, QuantRecipe
from moe.recipes import RECIPES
from scenarios.layouts import has_bf16_wire, layout_choice, padded_sizes
from scenarios.models import MoeModel
from scenarios.schema import Scenario

# Activation groups and weight blocks of every quantised recipe divide it.
BLOCK: Final = 128


class RuleKind(StrEnum):
    """How strictly a rule holds.

    semantic      the combination means nothing: refused always
    policy        an SGLang server refuses it, though it has a meaning: refused unless waived by
                  ``allow_unsupported``
    kernel_shape  the real kernels refuse the size: refused with ``strict_shapes``, and with real
                  kernels unless waived like a policy; noted otherwise
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
    def hidden_size(self) -> int:
        """Columns of a row in front of the experts, padding included."""
        return padded_sizes(self.model, self.scenario.moe.recipe)[0]

    @property
    def intermediate_size(self) -> int:
        """Columns of an expert's intermediate axis, padding included."""
        return padded_sizes(self.model, self.scenario.moe.recipe)[1]

    @property
    def partition(self) -> int:
        """Columns of one rank's share of an expert's intermediate axis, padding included."""
        return self.intermediate_size // self.scenario.parallel.moe.tp

    @property
    def input_group(self) -> int:
        """Columns that share a scale in front of GEMM1; 1 where there is none."""
        moe = self.scenario.moe
        return (
            RECIPES[moe.recipe].input_group(moe.dispatcher, bf16_wire=has_bf16_wire(self.scenario))
            or 1
        )

    @property
    def middle_group(self) -> int:
        """The same in front of GEMM2."""
        layout = GemmLayout.MASKED if self.has_slabs else GemmLayout.CONTIG
        recipe = RECIPES[self.scenario.moe.recipe]
        block = recipe.weight_block or (1, 1)
        return max(recipe.middle_group(self.model.activation, layout) or 1, *block)

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
