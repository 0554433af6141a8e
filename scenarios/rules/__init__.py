"""What may not be combined, and why: rules as rows of tables, checked all at once."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from scenarios.models import MoeModel
from scenarios.rules.dispatch import DISPATCH_RULES
from scenarios.rules.inputs import INPUT_RULES
from scenarios.rules.kernels import KERNEL_RULES
from scenarios.rules.policy import POLICY_RULES
from scenarios.rules.recipes import GROUP_RULES, RECIPE_RULES
from scenarios.rules.rule import Rule, RuleKind, Sized, Subject
from scenarios.rules.sizes import SIZE_RULES
from scenarios.rules.topology import TOPOLOGY_RULES
from scenarios.schema import Scenario

__all__ = [
    "MODEL_RULES",
    "SCENARIO_RULES",
    "BrokenRule",
    "Rule",
    "RuleKind",
    "RuleReport",
    "check_rules",
    "waived_kinds",
]

SCENARIO_RULES: Final = (
    *TOPOLOGY_RULES,
    *DISPATCH_RULES,
    *RECIPE_RULES,
    *POLICY_RULES,
    *INPUT_RULES,
)
MODEL_RULES: Final = (*SIZE_RULES, *GROUP_RULES, *KERNEL_RULES)

_REAL_BACKENDS: Final = ("deep_gemm", "deep_ep")


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that a scenario breaks, the key to change, and what is wrong."""

    name: str
    kind: RuleKind
    field: str
    message: str
    source: str

    @property
    def refusal(self) -> str:
        """What is wrong, how to run it all the same where a scenario may, and who says so."""
        waiver = "; `allow_unsupported: true` waives this" if self.kind is RuleKind.POLICY else ""
        return f"{self.message}{waiver} [{self.kind} rule {self.name}: {self.source}]"


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What the rules say: ``problems`` refuse the scenario, ``notes`` go into its result."""

    problems: tuple[BrokenRule, ...]
    notes: tuple[str, ...]


def check_rules(
    scenario: Scenario,
    model: MoeModel | None,
    readable: Collection[str] = frozenset(Scenario.model_fields),
) -> RuleReport:
    """Check every rule that can be judged.

    Args:
        scenario: complete, or as far as its sections validated.
        model: None if it could not be resolved; its rules are then left out.
        readable: the sections of ``scenario`` that are right; a rule that reads another is left
            out.
    """
    broken = _broken(SCENARIO_RULES, scenario, readable)
    if model is not None:
        broken += _broken(MODEL_RULES, Sized(scenario, model), readable)
    waived = waived_kinds(scenario, readable)
    notes = tuple(
        f"{rule.field}: {rule.message} [{rule.kind} rule {rule.name}, not enforced "
        f"here; {rule.source}]"
        for rule in broken
        if rule.kind in waived
    )
    return RuleReport(tuple(rule for rule in broken if rule.kind not in waived), notes)


def _broken(
    rules: tuple[Rule[Subject], ...], subject: Subject, readable: Collection[str]
) -> list[BrokenRule]:
    broken = []
    for rule in rules:
        message = rule.check(subject) if rule.reads <= set(readable) else None
        if message is not None:
            row = BrokenRule(rule.name, rule.kind, rule.field, message, rule.source)
            broken.append(row)
    return broken


def waived_kinds(scenario: Scenario, readable: Collection[str]) -> set[RuleKind]:
    """Kinds that the scenario waives, or may waive in a section that cannot be read."""
    waived = set()
    if "allow_unsupported" not in readable or scenario.allow_unsupported:
        waived.add(RuleKind.POLICY)
    if not {"moe", "run"} <= set(readable) or not _wants_shapes(scenario, waived):
        waived.add(RuleKind.KERNEL_SHAPE)
    return waived


def _wants_shapes(scenario: Scenario, waived: Collection[RuleKind]) -> bool:
    """Whether a size that a kernel refuses is an error: asked for, or one of real kernels."""
    backends = scenario.run.backends
    real = backends.gemm in _REAL_BACKENDS or backends.transport in _REAL_BACKENDS
    return scenario.moe.strict_shapes or (real and RuleKind.POLICY not in waived)
