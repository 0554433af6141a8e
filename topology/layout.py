"""The attention view and the MoE view of the same ranks."""

from dataclasses import dataclass

from topology.mesh import Group, ProcessMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of both views; each multiplies to the number of ranks.

    Ranks count attention-DP slowest and attention-TP fastest; in the MoE view EP slowest and
    MoE-TP fastest.

    Raises:
        ValueError: the two products differ.

    Source: SGLang 0.5.21, ``tp_size = attn_dp * attn_cp * attn_tp = moe_ep * moe_tp``.
    """

    attn_dp: int
    attn_tp: int = 1
    cp: int = 1
    ep: int
    moe_tp: int = 1

    def __post_init__(self) -> None:
        if self.attention.size != self.moe.size:
            raise ValueError(
                f"attention dp({self.attn_dp}) * cp({self.cp}) * tp({self.attn_tp}) = "
                f"{self.attention.size}, "
                f"but moe ep({self.ep}) * tp({self.moe_tp}) = {self.moe.size}"
            )

    @property
    def attention(self) -> ProcessMesh:
        """Who holds which tokens."""
        return ProcessMesh(("dp", "cp", "tp"), (self.attn_dp, self.cp, self.attn_tp))

    @property
    def moe(self) -> ProcessMesh:
        """Who holds which experts."""
        return ProcessMesh(("ep", "tp"), (self.ep, self.moe_tp))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.attention.size

    @property
    def world(self) -> Group:
        """All ranks."""
        return tuple(range(self.world_size))

    def groups(self) -> tuple[Group, ...]:
        """Every group that a forward may use, each once."""
        groups = [self.world, *self.moe.groups(("ep",)), *self.attention.groups(("tp",))]
        return tuple(dict.fromkeys(groups))

    def ep_group(self, rank: int) -> Group:
        """The ranks that share ``rank``'s experts among them, in EP order."""
        return self.moe.group(rank, ("ep",))

    def attention_tp_group(self, rank: int) -> Group:
        """The ranks that hold the same tokens as ``rank``, in attention-TP order."""
        return self.attention.group(rank, ("tp",))
