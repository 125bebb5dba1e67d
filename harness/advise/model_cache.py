"""What the cache of a real model weighs, from its config.json alone: the layers that it has, and a formula for each.

Equal, byte for byte, to what transformers allocates for it. No torch here, and no transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.case import ITEM_BYTES
from harness.errors import BadInput
from harness.registry import nearest

WIDE = 4  # bytes of a state that is kept in float32 at least
FULL, SLIDING, LINEAR, HYBRID, INDEXED = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "hybrid",
    "indexed_attention",
)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Of one layer: elements for each token, at most `most` tokens of them; elements of a state, as large at any
    length, in float32 at least (`wide_state`) and in the model's dtype (`state`)."""

    kind: str
    per_token: int = 0
    most: int | None = None
    wide_state: int = 0
    state: int = 0

    def bytes(self, tokens: int, *, batch: int, dtype: str) -> int:
        item = ITEM_BYTES[dtype]
        kept = tokens if self.most is None else min(tokens, self.most)
        return batch * ((self.per_token * kept + self.state) * item + self.wide_state * max(item, WIDE))


@dataclass(frozen=True, slots=True)
class ModelCache:
    model_type: str
    layers: tuple[LayerCache, ...]

    def bytes(self, tokens: int, *, batch: int = 1, dtype: str = "bfloat16") -> int:
        return sum(layer.bytes(tokens, batch=batch, dtype=dtype) for layer in self.layers)

    def longest(self, memory: int, *, batch: int, dtype: str) -> int | None:
        """The most tokens whose cache fits; None: any number does."""
        if self.bytes(0, batch=batch, dtype=dtype) > memory:
            return 0
        if not any(layer.per_token and layer.most is None for layer in self.layers):
            top = max((layer.most or 0 for layer in self.layers), default=0)
            if self.bytes(top, batch=batch, dtype=dtype) <= memory:
                return None
        low, high = 0, 1
        while self.bytes(high, batch=batch, dtype=dtype) <= memory:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle, batch=batch, dtype=dtype) <= memory else (low, middle)
        return low


class _Config:
    """A config's values; one that is missing is told by name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __call__(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that has a value."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is None:
            raise BadInput(f"{self.where}: {names[0]}: required for {self.values['model_type']}, and missing")
        return default

    def get(self, name: str) -> Any:
        return self.values.get(name)


def _grouped(config: _Config) -> LayerCache:
    heads = config("num_attention_heads")
    head_dim = config("head_dim", default=config("hidden_size") // heads)
    return LayerCache(FULL, 2 * config("num_key_value_heads", default=heads) * head_dim)


def _latent(config: _Config) -> LayerCache:
    return LayerCache("latent", config("kv_lora_rank") + config("qk_rope_head_dim"))


def _indexed(config: _Config) -> LayerCache:
    return replace(
        _latent(config), kind="latent + indexer", per_token=_latent(config).per_token + config("index_head_dim")
    )


def _delta_net(config: _Config) -> LayerCache:
    keys = config("linear_num_key_heads") * config("linear_key_head_dim")
    values = config("linear_num_value_heads") * config("linear_value_head_dim")
    conv = (2 * keys + values) * config("linear_conv_kernel_dim")
    return LayerCache("Gated DeltaNet", wide_state=values * config("linear_key_head_dim"), state=conv)


def _kimi_delta(config: _Config) -> LayerCache:
    inner = config("linear_num_heads") * config("linear_head_dim")
    conv = 3 * inner * config("linear_conv_kernel_dim")
    return LayerCache("KDA", wide_state=inner * config("linear_head_dim"), state=conv)


def _lightning(config: _Config) -> LayerCache:
    heads = config("num_attention_heads")
    return LayerCache("Lightning", state=heads * config("head_dim", default=config("hidden_size") // heads) ** 2)


def _mamba2(heads: str, head_dim: str, state: str, groups: str, conv: str) -> Callable[[_Config], LayerCache]:
    def layer(config: _Config) -> LayerCache:
        inner = config(heads) * config(head_dim)
        convolved = (inner + 2 * config(groups) * config(state)) * config(conv)
        return LayerCache("Mamba2", wide_state=inner * config(state), state=convolved)

    return layer


Types = Callable[[_Config, int], Sequence[str]]


def _all(kind: str) -> Types:
    return lambda config, layers: [kind] * layers


_full = _all(FULL)


def _windowed(config: _Config, layers: int) -> Sequence[str]:
    return [FULL if config.get("sliding_window") is None else SLIDING] * layers


def _from_a_layer_on(config: _Config, layers: int) -> Sequence[str]:
    """Qwen's: the first `max_window_layers` are full, the others slide, where windows are used at all."""
    first = config("max_window_layers", default=layers) if config.get("use_sliding_window") else layers
    return [FULL if number < first else SLIDING for number in range(layers)]


def _every(nth: int, this: str, others: str, key: str | None = None) -> Types:
    """`this` in every nth layer, or in as many as the config says under `key`."""

    def types(config: _Config, layers: int) -> Sequence[str]:
        step = nth if key is None else config(key, default=nth)
        return [this if (number + 1) % step == 0 else others for number in range(layers)]

    return types


def _indices(config: _Config, layers: int) -> Sequence[str]:
    full = config("attn_layer_indices", default=())
    return [FULL if number in full else LINEAR for number in range(layers)]


@dataclass(frozen=True, slots=True)
class _Kind:
    """`types`: what the layers are where the config has no `layer_types`."""

    attention: Callable[[_Config], LayerCache] = _grouped
    types: Types = _full
    linear: Callable[[_Config], LayerCache] | None = None


_MAMBA = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("llama", "olmo2", "granite", "diffllama", "gemma", "qwen2_moe", "qwen3_moe"), _Kind()),
    **dict.fromkeys(("mistral", "mixtral", "phi3"), _Kind(types=_windowed)),
    **dict.fromkeys(("qwen2", "qwen3"), _Kind(types=_from_a_layer_on)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _Kind(_latent)),
    "gemma2": _Kind(types=_every(2, FULL, SLIDING)),
    "gemma3_text": _Kind(types=_every(6, FULL, SLIDING, "sliding_window_pattern")),
    "gemma3n_text": _Kind(types=_every(5, FULL, SLIDING)),
    "gpt_oss": _Kind(types=_every(2, FULL, SLIDING)),
    "deepseek_v32": _Kind(_indexed, types=_all(INDEXED)),
    "qwen3_next": _Kind(types=_every(4, FULL, LINEAR, "full_attention_interval"), linear=_delta_net),
    "kimi_linear": _Kind(_latent, types=_every(4, FULL, LINEAR), linear=_kimi_delta),
    "minimax": _Kind(types=_every(2, LINEAR, FULL), linear=_lightning),
    "mamba2": _Kind(
        types=_all(LINEAR), linear=_mamba2("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    ),
    "falcon_h1": _Kind(types=_all(HYBRID), linear=_MAMBA),
    "bamba": _Kind(types=_indices, linear=_MAMBA),
}


def read_model_cache(path: Path) -> ModelCache:
    """A local config.json, or the folder that it is in."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"--config {file}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"--config {file}: must hold a mapping of keys to values")
    return model_cache(values, where=str(file))


def model_cache(values: Mapping[str, Any], *, where: str = "config") -> ModelCache:
    if isinstance(values.get("text_config"), Mapping):  # of a model that also sees or hears
        values = values["text_config"]
    name = values.get("model_type")
    if name not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise BadInput(f"{where}: model_type = {name!r}: unknown; known: {known}{nearest(str(name), KINDS)}")
    config, kind = _Config(values, where), KINDS[name]
    count = config("num_hidden_layers")
    types = config.get("layer_types") or kind.types(config, count)
    if len(types) != count:
        raise BadInput(f"{where}: layer_types has {len(types)} entries, num_hidden_layers is {count}")
    shared = config.get("num_kv_shared_layers") or 0
    layers = [_layer(each, kind, config) for each in types]
    layers[count - shared :] = [LayerCache("shares another's")] * shared
    return ModelCache(name, tuple(layers))


def _layer(layer_type: str, kind: _Kind, config: _Config) -> LayerCache:
    if layer_type in (FULL, INDEXED):
        return kind.attention(config)
    if layer_type == SLIDING:
        # What a new token sees beside itself: transformers keeps no more.
        return replace(kind.attention(config), kind="sliding", most=config("sliding_window") - 1)
    if layer_type in (LINEAR, HYBRID) and kind.linear is not None:
        state = kind.linear(config)
        if layer_type == LINEAR:
            return state
        return replace(state, kind=f"{FULL} + {state.kind}", per_token=kind.attention(config).per_token)
    raise BadInput(f"{config.where}: layer_types: {layer_type!r}: unknown for {config('model_type')}")
