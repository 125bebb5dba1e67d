"""What all language models of transformers share as families: tiny random models, padded batches, greedy decoding."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.cell.build import randomise
from harness.models.families.family import Batch, Family, FamilyError, Structure

# A family adds its own. Windows must be shorter than what padding leaves of a prompt, or nothing would be hidden.
TINY: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,  # tied, and so little trained, a model repeats its last token
}
BATCH = 2
LENGTH = 24
PADDING = 7  # tokens of the last row; the others have none
NEW_TOKENS = 12
STEPS = 4  # single tokens of the decode batch


def _head_dim(config: Any) -> int:
    """Never hidden / heads where the config says otherwise."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def language_family(
    name: str,
    title: str,
    *,
    model_class: type[PreTrainedModel],
    attention_class: str,
    tiny: Mapping[str, Any],
    head_dim: Callable[[Any], int] = _head_dim,
    swap_options: Mapping[str, Any] | None = None,
) -> Family:
    """A family of causal language models; `tiny` is what its small config has beyond TINY."""
    config_class: Any = model_class.config_class

    def build(overrides: Mapping[str, Any]) -> nn.Module:
        _refuse_unknown_keys(name, config_class, overrides)
        try:
            config = config_class(**{**TINY, **tiny, **overrides})
            model = model_class(config).eval()
            randomise(model, torch.Generator().manual_seed(0))
            with torch.no_grad():
                # As large as what the layers add, or all tokens look alike and greedy decoding repeats one for ever.
                embed = model.get_input_embeddings()
                embed.weight.div_(embed(torch.arange(embed.num_embeddings)).std())
                # Some combinations, such as 4 heads on 3 key/value heads, only show when the model runs.
                model(input_ids=torch.zeros(1, 2, dtype=torch.long))
            if config.dtype is not None:  # of the config alone the library makes nothing
                model.to(config.dtype)
        except Exception as error:  # the library has no class of its own for what it refuses
            asked = ", ".join(f"{key} = {value!r}" for key, value in overrides.items()) or "the tiny config"
            raise FamilyError(f"{name}: {asked}: {type(error).__name__}: {_one_line(error)}") from error
        return model

    def load(path: Path) -> nn.Module:
        model = load_checkpoint(path)
        if not isinstance(model, model_class):
            raise FamilyError(f"{path}: is a {type(model).__name__}, and {name} is {model_class.__name__}")
        return model

    def inspect(model: nn.Module) -> Structure:
        config: Any = model.config
        heads = config.num_attention_heads
        return Structure(
            layers=config.num_hidden_layers,
            attentions=config.num_hidden_layers,
            attention_class=attention_class,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim(config),
            config_class=type(config).__name__,
            hidden_size=config.hidden_size,
        )

    return Family(
        name=name,
        title=title,
        library="transformers",
        build=build,
        load=load,
        inspect=inspect,
        batches=batches,
        output=lambda result: result.logits,  # (B, L, vocabulary)
        generate=generate,
        swap_options=dict(swap_options or {}),
    )


def load_checkpoint(path: Path) -> nn.Module:
    """A causal language model from a local folder, in the dtype it was saved in; the network is never asked."""
    if not (path / "config.json").is_file():
        raise FamilyError(f"{path}: is no checkpoint folder: it has no config.json")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, output_loading_info=True)
    except Exception as error:  # whatever a broken file makes the library, or its readers, raise
        raise FamilyError(f"{path}: cannot be loaded: {type(error).__name__}: {_one_line(error)}") from error
    # transformers fills these with random numbers and goes on.
    if missing := sorted(found["missing_keys"]):
        raise FamilyError(f"{path}: the checkpoint lacks {len(missing)} weights: {', '.join(missing[:5])}")
    return model.eval()


def batches(model: nn.Module, generator: torch.Generator) -> dict[str, Batch]:
    return {
        "plain": Batch({"input_ids": _tokens(model, generator)}),
        "left-padded": _padded(model, slice(PADDING), generator),
        "right-padded": _padded(model, slice(LENGTH - PADDING, LENGTH), generator),
        "decode": Batch({"input_ids": _tokens(model, generator)}, run=decode_in_steps),
    }


def decode_in_steps(model: nn.Module, input_ids: Tensor) -> SimpleNamespace:
    """A prefill, then single tokens through the KV cache: equal tokens alone would hide an error in their logits."""
    prompt, *steps = input_ids.split((LENGTH - STEPS, *[1] * STEPS), dim=1)
    result = model(input_ids=prompt, use_cache=True)
    found = [result.logits]
    for step in steps:
        result = model(input_ids=step, past_key_values=result.past_key_values, use_cache=True)
        found.append(result.logits)
    return SimpleNamespace(logits=torch.cat(found, dim=1))  # (B, L, vocabulary)


def generate(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Greedy, from a left-padded batch through the KV cache; only the new tokens, and always as many."""
    prompt = _padded(model, slice(PADDING), generator).kwargs
    tokens = model.generate(  # type: ignore[operator]
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        do_sample=False,
        num_beams=1,
        use_cache=True,
        min_new_tokens=NEW_TOKENS,  # no end of sequence before that
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    new: Tensor = tokens[:, LENGTH:]  # (B, NEW_TOKENS)
    return new


def _tokens(model: nn.Module, generator: torch.Generator) -> Tensor:
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    tokens = torch.randint(embeddings.num_embeddings, (BATCH, LENGTH), generator=generator)
    return tokens.to(embeddings.weight.device)


def _padded(model: nn.Module, padding: slice, generator: torch.Generator) -> Batch:
    """`padding` are those tokens of the last row."""
    tokens = _tokens(model, generator)
    real = torch.ones_like(tokens, dtype=torch.bool)  # (B, L), False = padding
    real[-1, padding] = False
    # Without these a model would count the padding at the left as positions.
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    return Batch({"input_ids": tokens, "attention_mask": real.long(), "position_ids": positions}, real=real)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _refuse_unknown_keys(name: str, config_class: Any, overrides: Mapping[str, Any]) -> None:
    """transformers would keep them as attributes that nothing reads."""
    known = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map}
    known.add("attn_implementation")
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            listed = f"near: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
            raise FamilyError(f"{name}: config key {key!r} is unknown to {config_class.__name__}; {listed}")
