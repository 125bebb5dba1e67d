"""The sizes of real models, as published. Everything else about them is arithmetic."""

from dataclasses import dataclass

from harness.registry import Registry


@dataclass(frozen=True, slots=True)
class Model:
    """`kv_heads` is None for latent attention, the ranks for the others. `head_dim` is N in a latent model."""

    name: str
    embed_dim: int
    layers: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_head_dim: int | None = None
    v_head_dim: int | None = None
    qk_norm: bool = False  # one more weight for each channel of a q and a k head
    window: int | None = None  # keys that any layer keeps; None: all of them
    params: int | None = None  # of the whole model; None: not known
    existing: bool = True  # False: to be designed, so no variant is the one it has

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank is not None


MODELS: Registry[Model] = Registry("model")


def _deepseek(name: str, embed_dim: int, layers: int, heads: int, q_lora_rank: int | None, params: int) -> Model:
    ranks = (q_lora_rank, 512, 64, 128)  # of queries and of keys and values, then the channels with RoPE and of values
    return Model(name, embed_dim, layers, heads, 128, None, *ranks, params=params)


# Llama, Qwen2.5 and Mistral: attention is counted without biases (Qwen2.5 has 10,240 a layer).
for _model in (
    Model("llama-2-7b", 4096, 32, 32, 128, 32, params=6_738_415_616),
    Model("llama-2-70b", 8192, 80, 64, 128, 8, params=68_976_648_192),
    Model("llama-3-8b", 4096, 32, 32, 128, 8, params=8_030_261_248),
    Model("llama-3.1-70b", 8192, 80, 64, 128, 8, params=70_553_706_496),
    Model("llama-3.1-405b", 16384, 126, 128, 128, 8, params=405_853_388_800),
    # Version 0.1; the later ones have no window (`--window none`).
    Model("mistral-7b", 4096, 32, 32, 128, 8, window=4096, params=7_241_732_096),
    Model("qwen2.5-72b", 8192, 80, 64, 128, 8, params=72_706_203_648),
    Model("qwen3-8b", 4096, 36, 32, 128, 8, qk_norm=True, params=8_190_735_360),
    _deepseek("deepseek-v2-lite", 2048, 27, 16, None, 15_706_484_224),
    _deepseek("deepseek-v2", 5120, 60, 128, 1536, 235_741_434_880),
    _deepseek("deepseek-v3", 7168, 61, 128, 1536, 671_026_419_200),
):
    MODELS.add(_model.name, _model)
