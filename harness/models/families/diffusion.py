"""What all families of diffusers have in common: tiny random models, checkpoints, batches, a few denoising steps.

A file of a family says what is its own in a `Diffusion`, and ends with `FAMILY = Diffusion(...).family`.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.build import randomise
from harness.models.families.family import Batch, Family, FamilyError, Structure

STEPS = 4
TIMES = (750.0, 250.0)  # of 1000: of the rows of a batch


@dataclass(frozen=True)
class ExactNoise:
    """Random values that every dtype holds exactly: the float64 copy of a model sees the very same inputs."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        noise = torch.randn(shape, generator=self.generator)
        return ((noise * 16).round() / 16).to(self.device, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """
    attention_class       that of every attention that must be swapped
    attentions_per_layer  as many, in each layer
    layer_keys            of the config: the number of layers is their sum
    inputs                model, noise, batch size -> arguments of a forward pass but `timestep`; `hidden_states` is the
                          latent
    timestep              times from 0 to 1000, (B,), and the model's dtype -> what the model takes
    channel_dim           where the latent has its channels: those beyond the output's are conditioning, held through
                          the steps
    hide_text             model, arguments -> the arguments that change when the last row's second half of the text is
                          padding
    """

    name: str
    title: str
    model_class: Any
    tiny: Mapping[str, Any]
    attention_class: str
    attentions_per_layer: int = 1
    layer_keys: Sequence[str] = ("num_layers",)
    inputs: Callable[[Any, ExactNoise, int], dict[str, Any]]
    # By default whole: for models that take its sines in float32, whatever their dtype.
    timestep: Callable[[Tensor, torch.dtype], Tensor] = lambda times, dtype: times.long()
    scheduler: Callable[[], Any]
    channel_dim: int
    hide_text: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None

    @property
    def family(self) -> Family:
        return Family(
            name=self.name,
            title=self.title,
            library="diffusers",
            build=self.build,
            load=partial(_load, self.model_class),
            inspect=self.structure,
            batches=self.batches,
            output=lambda result: result.sample,
            generate=self.generate,
        )

    def build(self, overrides: Mapping[str, Any]) -> nn.Module:
        _refuse_unknown(self.name, overrides, self.model_class)
        config = {**self.tiny, **overrides}
        try:
            model = self.model_class(**config)
        except Exception as error:  # whatever the library raises at a value it cannot build
            raise FamilyError(f"{self.name}: {self.model_class.__name__} with {config} raised {error!r}") from error
        randomise(model, torch.Generator().manual_seed(0))  # what starts as zeros would hide everything before it
        return model.eval()

    def structure(self, model: Any) -> Structure:
        config = model.config
        layers = sum(getattr(config, key) for key in self.layer_keys)
        return Structure(
            layers=layers,
            attentions=self.attentions_per_layer * layers,
            attention_class=self.attention_class,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            config_class=f"{type(model).__name__}'s config",  # diffusers has one class for all
            hidden_size=config.num_attention_heads * config.attention_head_dim,
        )

    def batches(self, model: Any, generator: torch.Generator) -> Mapping[str, Batch]:
        noise = ExactNoise(generator, model.device, model.dtype)

        def arguments(size: int) -> dict[str, Any]:
            times = torch.tensor(TIMES[:size], device=model.device)
            return {**self.inputs(model, noise, size), "timestep": self.timestep(times, model.dtype)}

        found = {"plain": arguments(1), "two times": arguments(2)}
        if self.hide_text is not None:
            found["masked text"] = {**found["two times"], **self.hide_text(model, found["two times"])}
        return {key: Batch(kwargs) for key, kwargs in found.items()}

    @torch.no_grad()
    def generate(self, model: Any, generator: torch.Generator) -> Tensor:
        """The latent after a few denoising steps."""
        kwargs = self.inputs(model, ExactNoise(generator, model.device, model.dtype), 1)
        hidden, dim, channels = kwargs.pop("hidden_states"), self.channel_dim, _out_channels(model)
        latent, condition = hidden.split([channels, hidden.shape[dim] - channels], dim)
        steps = self.scheduler()
        steps.set_timesteps(STEPS, device=model.device)
        for t in steps.timesteps:
            hidden = torch.cat([latent, condition], dim=dim)
            predicted = model(hidden_states=hidden, timestep=self.timestep(t.expand(1), model.dtype), **kwargs).sample
            predicted = predicted.narrow(dim, 0, channels)  # where a variance is predicted too, it stands behind
            # Some schedulers compute in float32 whatever they are given.
            latent = steps.step(predicted, t, latent).prev_sample.to(model.dtype)
        return latent


def half_hidden_text(hidden: Tensor, text: int, length: int) -> Tensor:
    """(B, length) bool, True = attends: of a joint sequence, text first, without the last row's second half of it."""
    visible = torch.ones(hidden.shape[0], length, dtype=torch.bool, device=hidden.device)
    visible[-1, text // 2 : text] = False
    return visible


def _out_channels(model: Any) -> int:
    """Of the latent: a predicted variance, which HunyuanDiT's config does not count, is none of it."""
    found = model.config.get("out_channels") or model.config.in_channels
    if found > model.config.in_channels:
        raise FamilyError(
            f"out_channels = {found}: must not exceed in_channels = {model.config.in_channels} to denoise in steps"
        )
    return int(found)


def _refuse_unknown(name: str, overrides: Mapping[str, Any], model_class: Any) -> None:
    known = [key for key in inspect.signature(model_class.__init__).parameters if key != "self"]
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise FamilyError(f"{name}: unknown config key {key!r}; {meant}")


def _load(model_class: Any, path: Path) -> nn.Module:
    """From the model's own folder, or from a pipeline's, where it stands in `transformer`."""
    expected = model_class.__name__
    folder = next((place for place in (path, path / "transformer") if (place / "config.json").is_file()), None)
    if folder is None:
        raise FamilyError(f"{path}: no config.json there nor in its folder transformer: must be a saved {expected}")
    try:
        found = json.loads((folder / "config.json").read_text())["_class_name"]
        if found != expected:
            raise FamilyError(f"{folder}: holds a {found}: must be a {expected}")
        # All is loaded in float32; a list of what must stay so would only make diffusers ask for accelerate.
        lenient: Any = type(expected, (model_class,), {"_keep_in_fp32_modules": None})
        model, info = lenient.from_pretrained(
            folder, local_files_only=True, torch_dtype=torch.float32, low_cpu_mem_usage=False, output_loading_info=True
        )
        model.__class__ = model_class
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise FamilyError(f"{folder}: cannot be loaded as {expected}: {error!r}") from error
    # diffusers only warns, and what is missing stays random.
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            raise FamilyError(f"{folder}: {kind} of {expected}: {', '.join(map(str, info[kind]))}")
    return model.eval()
