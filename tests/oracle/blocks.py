"""transformers' MoE blocks on random float64 weights, and the same weights for the golden."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseMoeBlock
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe.formats import ActivationKind, GatedActivation, ScoringFunc
from moe.golden import GoldenRouting

T, H, WIDTH, E, K, VOCAB = 64, 48, 32, 16, 4, 40
W13_W2 = ("gate_up", "down")
SILU = GatedActivation()


class CastsToFloat64(TorchFunctionMode):
    """Reads every cast to float32 as one to float64: some routers cast whatever they are given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **kwargs)


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


class BlockWeights:
    """A block's state dict, by name, as golden weights."""

    intermediate_size = WIDTH

    def __init__(self, block: nn.Module) -> None:
        self.state = block.state_dict()
        self.gate_weight = self.state["gate.weight"]
        self.correction_bias = self.state.get("gate.e_score_correction_bias")
        self.tid2eid = self.state.get("gate.tid2eid")

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.state["experts.gate_up_proj"][expert],
            self.state["experts.down_proj"][expert],
        )

    def shared(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if "shared_experts.gate_up_proj.weight" in self.state:
            w13, w2 = (self.state[f"shared_experts.{name}_proj.weight"] for name in W13_W2)
            return w13, w2
        names = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
        if names[0] not in self.state:
            return None
        gate, up, down = (self.state[name] for name in names)
        return torch.cat([gate, up]), down


class GptOssBlock(GptOssMLP):
    """Returns its output alone, and its router under the other blocks' name for one."""

    @property
    def gate(self) -> nn.Module:
        return self.router

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output, _ = super().forward(hidden_states)
        return output


class GptOssWeights(BlockWeights):
    """Of matrices that lie input first, with gate and up columns taking turns."""

    def __init__(self, block: nn.Module) -> None:
        self.state = block.state_dict()
        self.gate_weight = self.state["router.weight"]
        self.correction_bias = self.tid2eid = None

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        in_turns, w2 = super().expert(expert)
        return torch.cat([in_turns[:, ::2], in_turns[:, 1::2]], dim=1).T, w2.T


@dataclass(frozen=True, kw_only=True)
class Family:
    """One transformers block, and what the golden is told of it.

    ``router_scales``: the block multiplies the scaling factor into the weights, not into their sum.
    """

    block: Callable[[], nn.Module]
    routing: GoldenRouting
    routed_scaling_factor: float = 1.0
    router_scales: bool = True
    activation: GatedActivation = SILU
    weights: Callable[[nn.Module], BlockWeights] = BlockWeights


def _config(cls: type, **changes: object) -> object:
    sizes = {"hidden_size": H, "num_hidden_layers": 1, "num_experts_per_tok": K}
    return cls(**sizes, **changes)


_DEEPSEEK_SIZES = {
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}


def _deepseek_v3() -> nn.Module:
    return DeepseekV3MoE(_config(DeepseekV3Config, n_group=4, topk_group=2, **_DEEPSEEK_SIZES))


def _glm4() -> nn.Module:
    return Glm4MoeMoE(_config(Glm4MoeConfig, n_group=1, topk_group=1, **_DEEPSEEK_SIZES))


def _qwen3(norm_topk_prob: bool) -> nn.Module:
    config = _config(
        Qwen3MoeConfig,
        moe_intermediate_size=WIDTH,
        num_experts=E,
        norm_topk_prob=norm_topk_prob,
    )
    return Qwen3MoeSparseMoeBlock(config)


def _mixtral() -> nn.Module:
    config = _config(MixtralConfig, intermediate_size=WIDTH, num_local_experts=E)
    return MixtralSparseMoeBlock(config)


def _deepseek_v4_hash() -> nn.Module:
    config = _config(
        DeepseekV4Config,
        num_hash_layers=1,
        vocab_size=VOCAB,
        swiglu_limit=2.0,
        **_DEEPSEEK_SIZES,
    )
    return DeepseekV4SparseMoeBlock(config, layer_idx=0)


_OAI = {
    "num_local_experts": E,
    "intermediate_size": WIDTH,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 2.0,
}


def _gpt_oss() -> nn.Module:
    return GptOssBlock(_config(GptOssConfig, **_OAI))


def _minimax_m3() -> nn.Module:
    changes = {"shared_intermediate_size": WIDTH, "routed_scaling_factor": 2.5}
    return MiniMaxM3VLSparseMoeBlock(_config(MiniMaxM3VLTextConfig, **_OAI, **changes))


def _routing(scoring_func: ScoringFunc, *, renormalize: bool = True, **changes) -> GoldenRouting:
    return GoldenRouting(top_k=K, scoring_func=scoring_func, renormalize=renormalize, **changes)


_OAI_SWIGLU = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.5, limit=2.0)

FAMILIES = {
    "deepseek_v3": Family(
        block=_deepseek_v3,
        routing=_routing(ScoringFunc.SIGMOID, n_group=4, topk_group=2),
        routed_scaling_factor=2.5,
    ),
    "glm4_moe": Family(
        block=_glm4, routing=_routing(ScoringFunc.SIGMOID), routed_scaling_factor=2.5
    ),
    "qwen3_moe": Family(block=lambda: _qwen3(True), routing=_routing(ScoringFunc.SOFTMAX)),
    "qwen3_moe_plain": Family(
        block=lambda: _qwen3(False), routing=_routing(ScoringFunc.SOFTMAX, renormalize=False)
    ),
    "mixtral": Family(block=_mixtral, routing=_routing(ScoringFunc.SOFTMAX)),
    "deepseek_v4_hash": Family(
        block=_deepseek_v4_hash,
        routing=_routing(ScoringFunc.SQRTSOFTPLUS, hashed=True),
        routed_scaling_factor=2.5,
        activation=GatedActivation(limit=2.0),
    ),
    "gpt_oss": Family(
        block=_gpt_oss,
        routing=_routing(ScoringFunc.SOFTMAX),
        activation=_OAI_SWIGLU,
        weights=GptOssWeights,
    ),
    "minimax_m3": Family(
        block=_minimax_m3,
        routing=_routing(ScoringFunc.SIGMOID),
        routed_scaling_factor=2.5,
        router_scales=False,
        activation=_OAI_SWIGLU,
    ),
}


_LEFT_OUT = ("router.bias", "_proj_bias")


def drawn(family: Family) -> nn.Module:
    """The family's block in float64, every tensor drawn.

    A hash table lists distinct experts; biases that the layer modelled does not have are zero.
    """
    block = family.block().double()
    generator = torch.Generator().manual_seed(11)
    for name, tensor in block.state_dict().items():
        if name == "gate.tid2eid":
            tensor.copy_(torch.rand(VOCAB, E, generator=generator).argsort(dim=1)[:, :K])
        elif name.endswith(_LEFT_OUT):
            tensor.zero_()
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 3)
    return block


def assert_equal_to_1e_12(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-12 of each value, or of the largest one where terms cancel."""
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())
