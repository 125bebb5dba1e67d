"""`harness verify`: what it proves, and that each of its five steps can fail."""

import copy
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from harness.errors import BadInput
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.models.families.family import Batch, Family, Structure, all_families, find_family
from harness.models.families.names import family_names
from harness.models.verify import Verification, verify
from harness.models.verify.forward import Place, captured
from harness.models.verify.golden import draw_all, true_double
from harness.models.verify.result import STEPS
from harness.swaps import swap
from tests import support, verify_models
from tests.support import ROOT, called

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

HERE = ROOT / "tests"
MODELS, WRONG = HERE / "verify_models.py", HERE / "wrong_kernels.py"
DEEPER = {"transformers": {"num_hidden_layers": 3}, "diffusers": {"num_layers": 4}}
Tamper = Callable[[nn.Module], None]


class Result(support.Result):
    @property
    def marks(self) -> str:
        """One for each step: ✓, ✗ or -."""
        return "".join(re.findall(rf"^ +([✓✗-]) (?:{'|'.join(STEPS)}) ", self.out, re.MULTILINE))


Command = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    def cli(*arguments: str | Path) -> Result:
        return Result(**vars(called(capsys, "verify", *arguments)))

    return cli


def only_plain(family: Family) -> Family:
    """Quick: one batch, no generation."""

    def batches(model: nn.Module, generator: torch.Generator) -> dict[str, Batch]:
        return {"plain": family.batches(model, generator)["plain"]}

    return dataclasses.replace(family, batches=batches, generate=None)


def scaled(layer: str, factor: float = 1.01) -> Tamper:
    """One weight of one layer, by 1 %."""

    def tamper(model: nn.Module) -> None:
        weights = [p for p in model.get_submodule(layer).parameters() if p.ndim == 2]
        with torch.no_grad():
            weights[-1].mul_(factor)

    return tamper


def encoder(**options: Any) -> Verification:
    model, inputs = verify_models.encoder()
    return verify(model, inputs=inputs, **options)


def failed(found: Verification, step: str) -> str:
    """The step's message; it must be the first that failed."""
    assert found.failure is not None, "all passed"
    assert found.failure.name == step, found.steps
    return found.failure.message


# All families


def test_all_families_pass_and_are_written_down(cli: Command):
    result = cli("--all")
    assert result.code == 0, result.out
    assert result.marks == "✓" * 5 * len(family_names())
    assert "EQUAL  11 of 11 equal, kernel eager" in result.out
    (folder,) = Path("results").iterdir()  # and no `latest`, which is of runs that the gate knows
    assert re.fullmatch(r"verify-\d{8}T\d{6}Z", folder.name)
    assert sorted(path.name for path in folder.iterdir()) == [
        "environment.json",
        "layers.csv",
        "verify.csv",
        "verify.md",
    ]
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__
    table = pd.read_csv(folder / "verify.csv").set_index("family")
    assert tuple(table.index) == family_names()
    assert set(table["verdict"]) == {"equal"}
    assert (table["swapped"] == table["attentions"]).all()
    for column in ("worst_layer_err_ratio", "end_err_ratio"):
        assert table[column].between(0, 2, inclusive="right").all()
    assert [not pd.isna(value) for value in table["generated_err_ratio"]] == [
        name.startswith("diffusers") for name in table["library"]
    ]
    llama = table.loc["llama"].to_dict()
    assert [llama[key] for key in ("layers", "heads", "kv_heads", "head_dim")] == [2, 4, 2, 8]
    assert llama["attention_class"] == "LlamaAttention"
    layers = pd.read_csv(folder / "layers.csv")
    assert set(layers["status"]) == {"ok"}
    assert layers["err_ratio"].dtype == layers["max_abs_err"].dtype == float
    of_llama = layers[layers["family"] == "llama"]
    assert set(of_llama["batch"]) == {"plain", "left-padded", "right-padded", "decode"}
    plain = of_llama[of_llama["batch"] == "plain"]
    assert list(plain["layer"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn", "(end)"]
    assert list(plain["kind"]) == ["layer", "layer", "end"]
    markdown = (folder / "verify.md").read_text()
    assert markdown.startswith("# verify: EQUAL\n")
    for name in family_names():
        assert f"\n## {name}".replace("_", "\\_") in markdown
        assert re.search(rf"^ *{name} .* equal *$", result.out, re.MULTILINE), name


@pytest.mark.parametrize("name", family_names())
def test_one_percent_on_one_weight_is_reported_with_its_layer(name: str):
    family = find_family(name)
    deeper = DEEPER[family.library]
    _, report = swap(family.build(deeper), **family.swap_options)
    names = [row.name for row in report.swapped]
    middle = names[len(names) // 2]
    found = verify(only_plain(family), config=deeper, tamper=scaled(middle))
    assert re.match(
        rf"{re.escape(middle)}(\[1\])? departs first: error \S+ N \(plain batch\)$", failed(found, "forward")
    )
    before = found.layers["layer"].isin(names[: len(names) // 2])
    assert before.any()
    assert set(found.layers[before]["status"]) == {"ok"}
    assert found.layers[found.layers["kind"] == "end"]["status"].item() != "ok"


# Forward


def test_the_first_of_two_broken_layers_is_named():
    layers = [f"encoder.layers.{i}.self_attn" for i in range(3)]

    def tamper(model: nn.Module) -> None:
        scaled(layers[2], 2.0)(model)
        scaled(layers[1])(model)

    found = encoder(tamper=tamper)
    assert failed(found, "forward").startswith(f"{layers[1]} departs first: error ")
    only_last = encoder(tamper=scaled(layers[2]))
    assert failed(only_last, "forward").startswith(f"{layers[2]} departs first: error ")
    assert list(only_last.layers["status"][:2]) == ["ok", "ok"]


def test_what_is_wrong_behind_the_last_layer_is_the_end_s():
    def tamper(model: Any) -> None:
        with torch.no_grad():
            model.encoder.layers[2].linear2.weight.mul_(1.01)

    assert failed(encoder(tamper=tamper), "forward").startswith("the model's end departs, though no swapped layer does")


def test_a_swap_that_is_bypassed_fails_though_its_numbers_are_right():
    original = verify_models.Encoder().eval()

    def tamper(model: Any) -> None:
        model.encoder.layers[1].self_attn = copy.deepcopy(original.encoder.layers[1].self_attn)

    found = encoder(tamper=tamper)
    assert failed(found, "forward") == "bypassed: the model ran without the swapped encoder.layers.1.self_attn"
    assert set(found.layers["status"]) == {"ok"}


def test_a_library_s_own_attention_put_back_is_a_bypass():
    found = verify("llama", tamper=lambda model: model.set_attn_implementation("sdpa"))  # type: ignore[operator]
    assert failed(found, "forward").startswith("bypassed: the model ran without the swapped model.layers.0.self_attn, ")
    assert found.step("generate").message.startswith("bypassed: generation ran without")


def test_a_bypass_by_the_fast_path_alone_fails():
    original = verify_models.Encoder().eval()

    def tamper(model: Any) -> None:
        ours, theirs = model.encoder.layers[0].self_attn, original.encoder.layers[0].self_attn
        forward = ours.forward
        ours.forward = lambda *args, **options: (
            theirs if torch.backends.mha.get_fastpath_enabled() else forward
        )(*args, **options)  # fmt: skip

    found = encoder(tamper=tamper)
    assert failed(found, "forward") == "bypassed: the model ran without the swapped encoder.layers.0.self_attn"


def test_numbers_that_are_wrong_with_the_fast_path_alone_fail():
    def tamper(model: nn.Module) -> None:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output + 1.0 if torch.backends.mha.get_fastpath_enabled() else output

        model.register_forward_hook(hook)

    assert "with torch's fast path on (given batch)" in failed(encoder(tamper=tamper), "forward")


def test_the_fast_path_is_off_while_comparing_and_on_at_the_end():
    class Watched(verify_models.Encoder):
        seen: tuple[bool, ...] = ()

        def forward(self, x: Tensor, causal: bool = False) -> Tensor:
            Watched.seen += (torch.backends.mha.get_fastpath_enabled(),)
            return super().forward(x, causal)

    assert verify(Watched(), inputs=verify_models.noise(2, 7, 6)).passed
    # Five draws, each with its golden, and the swapped model; then all of it again as users run it.
    assert Watched.seen == (False,) * 11 + (True,) * 11


def test_what_a_layer_gave_is_kept_though_the_model_writes_over_it():
    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).add_(1.0)

    model = Over()
    with captured(model, ["layer"]) as seen:
        model(torch.zeros(2, 3))
    assert seen[Place("layer")].equal(torch.zeros(2, 3))


def test_a_layer_that_no_batch_runs_is_not_proven():
    class Half(verify_models.Encoder):
        def forward(self, x: Tensor, causal: bool = False) -> Tensor:
            return self.encoder.layers[0](self.embed(x))

    found = verify(Half(layers=2), inputs=verify_models.noise(2, 7, 6))
    assert failed(found, "forward") == "no batch runs encoder.layers.1.self_attn: nothing is known of it"


@pytest.mark.parametrize(("where", "passes"), [((1, 0), True), ((1, 20), False), ((0, 0), False)])
def test_rows_at_padding_are_left_open_and_no_others(where: tuple[int, int], passes: bool):
    family = dataclasses.replace(find_family("llama"), generate=None)

    def tamper(model: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if kwargs.get("attention_mask") is not None and not kwargs["attention_mask"][1, 0]:  # left-padded
                output.logits[where] += 1.0

        model.register_forward_hook(hook, with_kwargs=True)

    found = verify(family, tamper=tamper)
    assert found.passed is passes
    if not passes:
        assert failed(found, "forward").endswith("(left-padded batch)")


def test_an_overflow_of_the_reference_is_not_called_equal():
    with torch.no_grad():
        model = verify_models.Encoder(layers=1)
        model.embed.weight.mul_(1e30)
        model.encoder.layers[0].norm1 = nn.Identity()
        model.encoder.layers[0].norm2 = nn.Identity()
        model.encoder.layers[0].linear1.weight.mul_(1e30)
    assert not verify(model, inputs=verify_models.noise(2, 7, 6)).passed


# Swap


def test_the_swap_is_held_to_the_structure():
    family = find_family("llama")

    def inspect(model: nn.Module) -> Structure:
        return dataclasses.replace(family.inspect(model), attentions=3)

    message = failed(verify(dataclasses.replace(only_plain(family), inspect=inspect)), "swap")
    assert message == "2 of 3 replaced: model.layers.0.self_attn, model.layers.1.self_attn"


@pytest.mark.parametrize("kind", ["weight", "buffer", "more"])
def test_weights_that_the_swap_changed_are_found(kind: str, monkeypatch: pytest.MonkeyPatch):
    def careless(model: nn.Module, **options: Any) -> Any:
        swapped, report = swap(model, **options)
        with torch.no_grad():
            if kind == "weight":
                weight = swapped.get_parameter("encoder.layers.1.self_attn.q_proj.weight")
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
            elif kind == "buffer":
                swapped.get_buffer("shift").add_(1)
            else:
                swapped.extra = nn.Parameter(torch.zeros(5))
        return swapped, report

    monkeypatch.setattr("harness.models.verify.steps.swap", careless)
    model = verify_models.Encoder()
    model.register_buffer("shift", torch.zeros(2))
    layer = "encoder.layers.1.self_attn"
    expected = {
        "weight": f"{layer}.q_proj.weight is not the original's {layer}.in_proj_weight, bit for bit",
        "buffer": "shift is not the original's shift, bit for bit",
        "more": "6,789 parameters instead of 6,784",
    }
    assert failed(verify(model, inputs=verify_models.noise(2, 7, 6)), "swap") == expected[kind]


# Kernels


@pytest.mark.parametrize(
    ("kernel", "step", "message"),
    [
        ("scale_off", "forward", "model.layers.0.self_attn departs first: error "),
        ("swapped_groups", "forward", "model.layers.0.self_attn departs first: error "),
        ("mask_ignored", "forward", "model.layers.0.self_attn departs first: error "),
        ("zeros", "forward", "model.layers.0.self_attn departs first: error "),
        ("gives_nan", "forward", "model.layers.0.self_attn departs first: "),
        ("fast_softmax", "forward", "model.layers.0.self_attn departs first: error "),
        ("writes_q", "forward", "kernel wrote into its input q"),
        ("wrong_shape", "forward", "kernel returned (2, "),
        ("raises", "forward", "RuntimeError: no such tile"),
        ("refuses", "forward", "only for tensor cores"),
    ],
)
def test_wrong_kernels_are_found(kernel: str, step: str, message: str):
    found = verify(only_plain(find_family("llama")), kernel=f"{WRONG}:{kernel}")
    assert failed(found, step).startswith(message)


@pytest.mark.parametrize("kernel", ["plain", "textbook"])
def test_a_right_kernel_of_the_user_s_passes(cli: Command, kernel: str):
    result = cli("llama", "--kernel", f"{WRONG}:{kernel}")
    assert (result.code, result.marks) == (0, "✓✓✓✓✓"), result.out
    assert f"EQUAL  llama, kernel {WRONG}:{kernel}" in result.out


def test_a_wrong_kernel_on_the_command_line_exits_1(cli: Command):
    result = cli("llama", "--kernel", f"{WRONG}:scale_off", "--out", "here")
    assert result.code == 1
    assert result.marks == "✓✓✓✗✓"  # 1 % of the scale turns no token
    assert "NOT EQUAL" in result.out
    assert "llama: forward: model.layers.0.self_attn departs first: error " in result.out
    assert pd.read_csv("here/verify.csv")["verdict"].item() == "not equal"


def test_a_plugin_that_replaces_sdpa_is_told_and_compared_with_the_real_one(cli: Command, tmp_path: Path):
    (tmp_path / "patched.py").write_text(
        """
import torch.nn.functional as F
real = F.scaled_dot_product_attention
def mine(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    scale = 1.2 * (q.shape[-1] ** -0.5 if scale is None else scale)
    return real(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
F.scaled_dot_product_attention = mine
"""
    )
    result = cli("llama", "--kernel", f"{tmp_path}/patched.py:mine", "--out", "here")
    assert result.code == 1 and "NOT EQUAL" in result.out
    assert "replaces torch.nn.functional.scaled_dot_product_attention" in result.err


def test_a_kernel_that_raises_says_nothing_about_being_equal(cli: Command):
    result = cli("llama", "--kernel", f"{WRONG}:raises", "--out", "here")
    assert (result.code, result.marks) == (1, "✓✓✓✗-")
    assert "NOT VERIFIED" in result.out
    # Of the kernel's own line: that it was raised in another process is no concern of its author.
    assert re.search(r"forward  RuntimeError: no such tile at .*wrong_kernels.py:\d+\n", result.out)
    assert "KernelFailed" not in result.out
    assert "not run: forward failed" in result.out
    assert pd.read_csv("here/verify.csv")["verdict"].item() == "error"


# Generate


def test_a_token_that_differs_is_named():
    """The third pass of the generation alone is wrong, which no forward pass shows."""

    def tamper(model: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            cache = kwargs.get("past_key_values")
            if cache is not None and cache.get_seq_length() == 26:  # 24 of the prompt, 2 of which were generated
                output.logits[1] = output.logits[1].roll(1, -1)

        model.register_forward_hook(hook, with_kwargs=True)

    found = verify("llama", tamper=tamper)
    assert found.step("forward").status == "passed"
    message = failed(found, "generate")
    named = re.fullmatch(
        r"sequence 1, step 2: token (\d+) instead of (\d+); the original's logits are (\S+) apart", message
    )
    assert named, message
    assert (int(named[1]) - int(named[2])) % 97 == 1
    assert float(named[3]) > 0


def test_latents_that_differ_are_judged_by_the_rule():
    def tamper(model: nn.Module) -> None:
        calls = 0

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 4:  # the forward step's are over
                output.sample.mul_(1.001)

        model.register_forward_hook(hook)

    found = verify("flux", config={"num_layers": 1, "num_single_layers": 1}, tamper=tamper)
    assert found.step("forward").status == "passed"
    assert re.match(r"latents 1 x 16 x 4 depart: error \S+ N$", failed(found, "generate"))
    assert found.layers[found.layers["kind"] == "generated"]["status"].item() != "ok"


# A user's own model


@pytest.mark.parametrize(
    ("model", "marks", "found"),
    [
        ("encoder", "✓✓✓✓-", "3 layers of MultiheadAttention: 4 heads, 4 kv heads, groups of 1, "),
        ("encoder_by_keywords", "✓✓✓✓-", "1 batch: worst layer"),
        ("half", "✓✓✓✓-", "parameters, bfloat16"),
        ("twice", "✓✓✓✓-", "1 layer of MultiheadAttention"),
        ("two_batches", "✓✓✓✓-", "2 batches"),
        ("bare_attention", "✓✓✓✓-", "worst layer"),
        ("language_model", "✓✓✓✓✓", "Qwen2Config: 2 layers of Qwen2Attention: 4 heads, 2 kv heads, "),
        ("flux", "✓✓✓✓✓", "2 layers of FluxAttention"),
    ],
)
def test_a_user_s_model_passes(cli: Command, model: str, marks: str, found: str):
    result = cli(f"{MODELS}:{model}")
    assert (result.code, result.marks) == (0, marks), result.out
    assert found in result.out


def test_a_module_that_runs_twice_is_judged_each_time():
    model, inputs = verify_models.twice()
    found = verify(model, inputs=inputs)
    assert found.passed
    kinds = found.layers["kind"] == "layer"
    assert list(found.layers[kinds]["tensor"]) == ["attention", "attention (call 2)", "attention weights (call 2)"]
    assert inputs[0].equal(verify_models.noise(2, 5, 8))  # it writes into its input, which is a copy


@pytest.mark.parametrize(
    ("model", "code", "marks", "message"),
    [
        ("without_inputs", 2, "", "Encoder needs inputs: return a pair (model, inputs)"),
        ("odd_inputs", 2, "", "its inputs are int: must be a tensor, "),
        ("no_model", 2, "", "returned int: must be a module, or a pair (module, inputs)"),
        ("missing", 2, "", "no function 'missing' in "),
        ("cannot_be_built", 1, "✗----", "RuntimeError: no weights on this machine ("),
        ("without_attention", 1, "✓✗---", "no attention in Linear: neither nn.MultiheadAttention nor a model of "),
        ("unknown_subclass", 1, "✓✓✗--", "attention is Subclass, an unknown subclass of MultiheadAttention"),
        ("cannot_run", 1, "✓✓✓✗-", "KeyError: 'lengths' ("),
        ("rounds_behind_our_back", 1, "✓✓✓✗-", "(end) is torch.float32 in a float64 copy of the model: no golden"),
    ],
)
def test_what_is_wrong_with_a_user_s_model_is_told_as_such(
    cli: Command, model: str, code: int, marks: str, message: str
):
    result = cli(f"{MODELS}:{model}")
    assert (result.code, result.marks) == (code, marks), result
    assert message in (result.err if code == 2 else result.out)
    assert "bug in harness" not in result.err
    assert Path("results").exists() == (code != 2)
    if message.endswith("("):
        assert re.search(rf"{re.escape(message)}.*verify_models.py:\d+\)", result.out)


def test_a_model_is_found_in_a_module_of_the_current_folder_with_what_stands_beside_it(cli: Command):
    package = Path("shop")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text("from tests.verify_models import encoder\nfrom shop import parts\n")
    (package / "parts.py").touch()
    assert cli("shop.models:encoder").code == 0
    Path("beside.py").write_text("from tests.verify_models import encoder as made\n")
    Path("mine.py").write_text("from beside import made\n\ndef build():\n    return made()\n")
    assert cli("mine.py:build").code == 0


# The command line


def test_config_overrides_are_yaml_and_reach_the_model(cli: Command):
    result = cli("llama", "--config", "num_hidden_layers=3", "--config", "attention_bias=false")
    assert result.code == 0, result
    assert "3 layers of LlamaAttention" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown family 'nope'; known: cogvideox, "),
        (["llama", "--kernel", "nope"], "unknown kernel 'nope'; known: auto, "),
        (["llama", "--config", "num_layer=2"], "num_layer"),
        (["llama", "--config", "num_attention_heads"], "must be KEY=VALUE"),
        (["llama", "--config", "hidden_size=[1"], "the value is not valid YAML"),
        (["llama", "--config", "num_key_value_heads=3"], "num_key_value_heads"),
        (["llama", "--path", "nowhere"], "nowhere"),
        (["llama", "--path", ".", "--config", "num_hidden_layers=2"], "a checkpoint has its own config"),
        ([f"{MODELS}:encoder", "--path", "."], "path: only a family has one"),
        ([f"{MODELS}:encoder", "--config", "depth=2"], "config: only a family has one"),
        (["nowhere.py:build"], "nowhere.py: cannot be read: No such file or directory"),
        (["--all", "--config", "num_hidden_layers=2"], "--all takes no --config and no --path"),
        (["--all", "llama"], "not allowed with argument"),
        ([], "is required"),
    ],
)
def test_bad_input_exits_2_and_leaves_nothing(cli: Command, arguments: list[str], message: str):
    result = cli(*arguments)
    assert result.code == 2, result
    assert message in result.err
    assert "Traceback" not in result.err
    assert not Path("results").exists()


def test_a_local_checkpoint(cli: Command):
    model: Any = find_family("llama").build({"num_hidden_layers": 3})
    model.save_pretrained("saved")
    result = cli("llama", "--path", "saved")
    assert (result.code, result.marks) == (0, "✓✓✓✓✓"), result
    assert "3 layers of LlamaAttention" in result.out
    other = cli("qwen3", "--path", "saved")
    assert other.code == 2
    assert "LlamaForCausalLM" in other.err


def test_verbose_shows_every_layer(cli: Command):
    result = cli(f"{MODELS}:encoder", "--verbose")
    for layer in range(3):
        assert re.search(rf"given +encoder\.layers\.{layer}\.self_attn +ok +\d\.\d\d ", result.out)
    assert re.search(r"given +\(end\), fast path on +ok ", result.out)
    assert "encoder.layers.0" not in cli(f"{MODELS}:bare_attention").out


def test_quiet_prints_nothing(cli: Command):
    assert cli(f"{MODELS}:encoder", "--quiet") == Result(0, "", "")


def test_out_is_not_written_over(cli: Command):
    assert cli(f"{MODELS}:encoder", "--out", "a/b").code == 0
    again = cli(f"{MODELS}:encoder", "--out", "a/b")
    assert again.code == 2
    assert "a/b already holds verify.csv of another run" in again.err
    Path("file").touch()
    assert "file is a file" in cli(f"{MODELS}:encoder", "--out", "file").err


def test_a_family_that_cannot_be_loaded_does_not_stop_the_others(cli: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.models.families.family.all_families", lambda: ("nope", "llama"))
    result = cli("--all", "--out", "here")
    assert (result.code, result.marks) == (1, "✗----✓✓✓✓✓")
    assert "NOT VERIFIED  1 of 2 equal" in result.out
    assert list(pd.read_csv("here/verify.csv")["verdict"]) == ["error", "equal"]


def test_a_missing_library_is_told_with_the_command_that_installs_it(cli: Command, monkeypatch: pytest.MonkeyPatch):
    install = "pip install 'attention-harness[models]'"
    for module in ("harness.models.families.llama", "harness.models.families.language"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    one = cli("llama")
    assert one.code == 2
    assert f"llama needs transformers: {install}" in one.err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    every = cli("--all")
    assert every.code == 2
    assert f"--all needs transformers and diffusers: {install}" in every.err


FAMILIES = (
    "cogvideox", "deepseek_v2", "deepseek_v3", "flux", "gemma2", "gpt_oss", "hunyuandit", "llama", "mistral", "qwen3",
    "wan",
)  # fmt: skip


def test_all_are_all():
    assert all_families() == FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_builds_a_tiny_model_in_eval_mode(name: str):
    family = find_family(name)
    model = family.build({})
    assert family.name == name
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    structure = family.inspect(model)
    assert structure.attentions >= structure.layers >= 2
    assert structure.attentions == sum(type(m).__name__ == structure.attention_class for m in model.modules())


def test_help_teaches(cli: Command):
    text = cli("--help").out
    for word in (*STEPS, "--all", "my_model.py:build_model", "exit codes", *family_names()):
        assert word in re.sub(r"\s+", " ", text), word


# The library


def test_arguments_that_do_not_go_together_are_refused():
    with pytest.raises(BadInput, match="inputs: llama makes its own"):
        verify("llama", inputs=torch.zeros(1))
    with pytest.raises(BadInput, match="must give them itself"):
        verify(f"{MODELS}:encoder", inputs=torch.zeros(1))


def test_steps_are_told_of_as_they_end_and_the_model_is_left_alone():
    model, inputs = verify_models.encoder()
    before = copy.deepcopy(model.state_dict())
    told: list[str] = []
    found = verify(model, inputs=inputs, on_step=lambda step: told.append(step.name))
    assert told == [step.name for step in found.steps] == list(STEPS)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


# The golden


def tiny_llama(implementation: str) -> Any:
    model: Any = find_family("llama").build({})
    model.set_attn_implementation(implementation)
    return model


def test_a_golden_of_a_library_is_double_all_through():
    """By two implementations of attention, which agree to float64's last digits; `.double()` alone does not."""
    tokens = torch.arange(20)[None]
    goldens, spoilt = [], []
    with torch.no_grad():
        for implementation in ("sdpa", "eager"):
            double = tiny_llama(implementation).double()
            spoilt.append(double(tokens).logits)
            with true_double(torch.float32):
                goldens.append(double(tokens).logits)
    scale = goldens[0].abs().max()
    assert (goldens[0] - goldens[1]).abs().max() < 1e-14 * scale
    assert all((each - goldens[0]).abs().max() > 1e-8 * scale for each in spoilt)
    assert torch.get_default_dtype() == torch.float32


def test_true_double_widens_what_asks_for_float32_and_nothing_else():
    x = torch.rand(3, dtype=torch.float64)
    with true_double(torch.float32):
        wide = [x.float(), x.to(torch.float32), x.type(torch.float32), x.softmax(0, dtype=torch.float32)]
        wide += [torch.ones(2), torch.arange(3) / 3, torch.arange(3, dtype=torch.float32), x.to(torch.half).float()]
        assert {t.dtype for t in wide} == {torch.float64}
        assert x.to(torch.complex64).dtype == torch.complex128
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        assert x.view(torch.int64).dtype == torch.int64
        assert torch.ones(2, dtype=torch.int32).view(torch.float32).shape == (2,)
        numpy_made = torch.from_numpy(torch.eye(3).numpy().astype("float32"))
        assert torch.linalg.solve(numpy_made, x).equal(x)
    assert x.float().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_true_double_draws_the_reference_s_random_numbers(dtype: torch.dtype):
    def draws(own: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        given = torch.zeros(4, dtype=own)
        first = [torch.randn(4, generator=generator), torch.rand(4, generator=generator, dtype=own)]
        torch.manual_seed(3)
        return [*first, torch.randn_like(given), torch.rand_like(given)]

    plain = draws(dtype)
    with true_double(dtype):
        golden = draws(torch.float64)
    assert all(g.dtype == torch.float64 and g.equal(p.double()) for g, p in zip(golden, plain, strict=True))


def test_true_double_multiplies_experts_in_float64():
    a, b, offs = torch.rand(6, 4).double(), torch.rand(3, 4, 8).double(), torch.tensor([2, 2, 5], dtype=torch.int32)
    with true_double(torch.float32):
        out = torch._grouped_mm(a, b, offs=offs)
    expected = torch.cat([a[:2] @ b[0], a[2:5] @ b[2]])
    assert out[:5].equal(expected)
    single = torch._grouped_mm(a.float(), b.float(), offs=offs)[:5]
    assert torch.allclose(single.double(), expected, atol=1e-6)


def test_draws_are_jittered_by_an_eps_and_seen_alike_by_reference_and_golden():
    model = nn.Linear(3, 3)
    seen: list[tuple[Tensor, Tensor]] = []

    def run(drawn: nn.Module, batches: Any) -> None:
        seen.append((drawn.get_parameter("weight").detach().clone(), batches["given"].kwargs["x"]["inner"][0]))

    x = torch.rand(300)
    draw_all(model, {"given": Batch({"x": {"inner": (x,)}})}, run, seed=0)
    references, goldens = seen[::2], seen[1::2]
    assert len(references) == 5
    assert references[0][0].equal(model.weight) and references[0][1].equal(x)
    for r, g in zip(references, goldens, strict=True):
        assert all(
            wide.dtype == torch.float64 and wide.equal(narrow.double()) for narrow, wide in zip(r, g, strict=True)
        )
    for moved in references[1:]:
        for now, before in zip(moved, (model.weight.detach(), x), strict=True):
            shift = ((now - before) / before).abs()
            assert 0 < shift.max() <= 2 * torch.finfo(torch.float32).eps


def test_an_error_of_decode_alone_is_seen_though_tokens_may_agree() -> None:
    def wrong_when_alone(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        scale = call.scale * (1.001 if q.shape[2] == 1 else 1.0)
        return eager(q, k, v, dataclasses.replace(call, scale=scale))

    found = verify("llama", kernel=Kernel("wrong when alone", wrong_when_alone, gives_weights=True))
    step = found.failure
    assert step is not None and step.name == "forward"
    assert "model.layers.0.self_attn (call 2) departs first" in step.message
    assert "(decode batch)" in step.message


@pytest.mark.parametrize("build", ["padded_encoder", "one_layer_three_times", "with_weights"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_models_of_torch_that_share_and_nest_are_equal(build: str) -> None:
    assert verify(f"{MODELS}:{build}").verdict == "equal"


def test_a_user_s_function_that_leaves_is_no_pass(cli: Command) -> None:
    found = cli(f"{MODELS}:leaves")
    assert found.code == 1
    assert "SystemExit" in found.out


@pytest.mark.parametrize("wrong", ["out", "weights"])
def test_every_output_is_judged(wrong: str) -> None:
    def tripled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = eager(q, k, v, call)
        return (3 * out, weights) if wrong == "out" or weights is None else (out, 3 * weights)

    found = verify(f"{MODELS}:with_weights", kernel=Kernel("tripled", tripled, gives_weights=True))
    assert found.verdict == "not equal"
    assert found.failure is not None
    assert ("weights departs" in found.failure.message) == (wrong == "weights")


def test_the_module_is_left_in_its_mode() -> None:
    model, inputs = verify_models.with_weights()
    model.train()
    assert verify(model, inputs=inputs).passed
    assert all(module.training for module in model.modules())
