"""Tuned thresholds as a YAML file: plain data, checked when it is read, with the fingerprint of the tuned weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from harness import store
from harness.errors import BadInput
from harness.kernels.names import OPTIONS, BadOption, read_options

VERSION = 1

Share = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Options = dict[str, float | int | str | bool]  # of a kernel, as after its `?`


class TuningError(BadInput):
    """Thresholds that cannot be found, read, or used for this model."""


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Head(_Plain):
    """The thresholds of one head, and what they did to the calibration inputs."""

    options: Options
    rel_l1: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of the worst batch
    sparsity: Share
    pv_skipped: Share = 0.0  # of the visible blocks: scored, but not multiplied with their values
    monotone: bool = True  # False: somewhere a sparser threshold was the more exact one


class Tuned(_Plain):
    version: Literal[1] = 1
    family: str
    model: str  # its class
    weights: str  # sha256 of all parameters
    kernel: str
    options: Options = {}  # for all heads: block sizes and the like
    l1: Limit
    pv_l1: Limit | None = None  # None: no PV threshold was looked for
    seed: int = 0
    layers: Annotated[dict[str, Annotated[tuple[Head, ...], Field(min_length=1)]], Field(min_length=1)]

    @property
    def limit(self) -> float:
        """What each head's relative L1 was held to in the end."""
        return self.l1 if self.pv_l1 is None else max(self.l1, self.pv_l1)


def save(tuned: Tuned, path: str | Path) -> None:
    path = Path(path)
    text = yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False, width=120, default_flow_style=None)
    head = f"# Thresholds of block-sparse attention, found by `harness tune-sparse {tuned.family}`.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write_atomically(path, (head + text).encode())


def load(path: str | Path) -> Tuned:
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TuningError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise TuningError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise TuningError(f"{path}: holds no tuned thresholds: it is nested too deeply") from None
    if not isinstance(document, dict):
        raise TuningError(f"{path}: holds no tuned thresholds: must be a mapping, as `harness tune-sparse` writes it")
    if document.get("version") != VERSION:
        raise TuningError(f"{path}: version {document.get('version')!r}: must be {VERSION}")
    try:
        tuned = Tuned.model_validate(_with_tuples(document))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise TuningError(f"{path}: {place}: {first['msg']}") from error
    try:
        refuse_bad_options(tuned)
    except TuningError as error:
        raise TuningError(f"{path}: {error}") from error
    return tuned


def refuse_bad_options(tuned: Tuned) -> None:
    """Before a model is loaded, and with the layer and the head."""
    if tuned.kernel not in OPTIONS:
        raise TuningError(f"kernel: {tuned.kernel!r} has no thresholds; those that have: {', '.join(OPTIONS)}")
    for layer, heads in tuned.layers.items():
        for number, head in enumerate(heads):
            try:
                read_options(kernel_name(tuned.kernel, {**tuned.options, **head.options}))
            except BadOption as error:
                raise TuningError(f"layers.{layer}, head {number}: {error.rule}") from error


def kernel_name(name: str, options: Mapping[str, Any]) -> str:
    """With its options as they are written behind it: `sparse?topk=0.5`."""
    return f"{name}?{urlencode(options)}" if options else name


def _with_tuples(document: dict[str, Any]) -> dict[str, Any]:
    """YAML has lists alone, and strict types take no list for a tuple."""
    layers = document.get("layers")
    if not isinstance(layers, dict):
        return document
    return {**document, "layers": {name: tuple(v) if isinstance(v, list) else v for name, v in layers.items()}}


def fingerprint(model: nn.Module) -> str:
    """Of every parameter's name, shape and bits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
