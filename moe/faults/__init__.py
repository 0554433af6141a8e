"""Named faults: what real systems got wrong, injectable into one stage of one rank."""

from moe.faults.acting import (
    FaultTap,
    blinded_checks,
    edit_golden,
    edit_plan,
    plan_edits,
    wrap_collectives,
)
from moe.faults.arm import ArmedFault, UnknownFaultError, arm, fault_named
from moe.faults.catalog import FAULTS
from moe.faults.classes import CLASSES, NO_FAULT_OF, FaultClass
from moe.faults.kinds import Fault, FaultKind
from moe.faults.voids import VOID_WHERE

__all__ = [
    "CLASSES",
    "FAULTS",
    "NO_FAULT_OF",
    "VOID_WHERE",
    "ArmedFault",
    "Fault",
    "FaultClass",
    "FaultKind",
    "FaultTap",
    "UnknownFaultError",
    "arm",
    "blinded_checks",
    "edit_golden",
    "edit_plan",
    "fault_named",
    "plan_edits",
    "wrap_collectives",
]
