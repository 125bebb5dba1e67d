"""Configs: what is accepted, and that every refusal gives file, line, key, value and rule."""

import errno
import os
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.suite.config import ABSENT, ConfigError, Suite, load_suite
from harness.suite.grid import AXES, MAX_CLASHES
from harness.suite.schema import REGIMES, Limits, Timing
from harness.variants.masks import MASKS
from harness.variants.specs import VARIANTS
from harness.yaml_lines import MAX_BYTES, MAX_DEPTH, YamlError, parse
from tests.fuzzed_configs import at_most

BASE = """\
name: demo
grid:
  variant: [mha]
  embed_dim: 64
  heads:
    - 4
    - 8
  seq_len: [16]
"""
GRID = {"variant": "mha", "embed_dim": 64, "heads": 4, "seq_len": 16}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text, **options):
        Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_suite("c.yaml", **options)

    return load


@pytest.fixture
def refuse(load):
    def refuse(text, **options) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            load(text, **options)
        return caught.value

    return refuse


def refuse_dict(config) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_suite(config)
    return caught.value


# What is accepted


def test_a_minimal_config_takes_the_defaults(load):
    suite = load(BASE)
    assert (suite.name, suite.description, suite.seed, suite.threads) == ("demo", "", 0, None)
    assert suite.regimes is None
    assert suite.timing == Timing(enabled=True, budget_s=0.5, min_blocks=11, max_blocks=101)
    assert suite.limits == Limits(timeout_s=600.0, max_memory=None)
    assert suite.source == BASE
    assert suite.path == Path("c.yaml")
    assert [case.heads for case in suite.cases] == [4, 8]
    case = suite.cases[0]
    assert (case.mask, case.phase, case.dtype, case.batch, case.kernel) == ("none", "prefill", "float32", 1, "eager")
    assert case.bias is True


def test_every_key_arrives(load):
    suite = load(
        BASE + "description: what for\nseed: 7\nthreads: 2\nregimes: [tiny, plain]\n"
        "timing: {enabled: false, budget_s: 2, min_blocks: 3, max_blocks: 3}\n"
        "limits: {timeout_s: 300, max_memory: 8GiB}\n"
    )
    assert (suite.description, suite.seed, suite.threads, suite.regimes) == ("what for", 7, 2, ("tiny", "plain"))
    assert suite.timing == Timing(enabled=False, budget_s=2.0, min_blocks=3, max_blocks=3)
    assert suite.limits == Limits(timeout_s=300.0, max_memory=8 << 30)


def test_a_mapping_gives_the_same_suite_and_a_source_that_gives_it_again(load):
    config = {"name": "demo", "seed": 3, "timing": {"budget_s": 1}, "exclude": [{"mask": "causal", "batch": 2}]}
    config["limits"] = {"max_memory": "1.5GB"}
    config["grid"] = {**GRID, "heads": (4, 8), "mask": ["none", "causal"], "batch": [1, 2], "head_dim": None}
    suite = load_suite(config)
    assert suite.path is None
    again = load(suite.source)
    assert (again.name, again.seed, again.cases, again.timing) == (suite.name, 3, suite.cases, suite.timing)
    assert again.limits == suite.limits == Limits(max_memory=1_500_000_000)
    assert load_suite(yaml.safe_load(suite.source)).source == suite.source


def test_the_example_of_the_spec_collapses_what_does_not_apply(load):
    suite = load(
        "name: tradeoffs\ngrid:\n  variant: [mha, mqa, gqa, mla]\n  embed_dim: [256, 512]\n  heads: [8]\n"
        "  kv_heads: [2]\n  seq_len: [128, 512]\n  mask: [none, causal, padding]\n  phase: [prefill, decode]\n"
        "  dtype: [float32]\n  batch: [1]\n  kernel: [eager]\n"
    )
    assert len(suite.cases) == 4 * 2 * 2 * 3 * 2
    assert [c.kv_heads for c in suite.cases[::12]] == [8, 8, 1, 1, 2, 2, None, None]


def test_include_takes_the_defaults_and_not_the_values_of_the_grid(load):
    suite = load(
        BASE + "  mask: [causal]\n  batch: 4\ninclude:\n  - {variant: mqa, embed_dim: 32, heads: 2, seq_len: 8}\n"
    )
    extra = suite.cases[-1]
    assert (extra.variant, extra.mask, extra.batch) == ("mqa", "none", 1)


def test_include_is_a_grid_of_its_own_and_does_not_repeat_cases(load):
    suite = load(BASE + "include:\n  - {variant: [mha, mqa], embed_dim: 64, heads: [8, 16], seq_len: 16}\n")
    assert [(c.variant, c.heads) for c in suite.cases] == [
        *[("mha", 4), ("mha", 8)],
        *[("mha", 16), ("mqa", 8), ("mqa", 16)],
    ]


def test_include_alone_is_enough():
    assert len(load_suite({"name": "x", "include": [GRID]}).cases) == 1


def test_null_means_the_default_where_it_may():
    axes = ("kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")
    null = load_suite({"name": "x", "grid": {**GRID, "variant": "mla", **dict.fromkeys(axes)}})
    assert null.cases == load_suite({"name": "x", "grid": {**GRID, "variant": "mla"}}).cases


def test_aliases_work_and_know_their_lines(load, refuse):
    text = "name: x\ninclude:\n- variant: mha\n  embed_dim: &dims [32, 64]\n  heads: 4\n  seq_len: *dims\n"
    assert [(c.embed_dim, c.seq_len) for c in load(text).cases] == [(32, 32), (32, 64), (64, 32), (64, 64)]
    error = refuse(text.replace("seq_len", "mask"))
    assert {p.line for p in error.problems if p.key == "include[0].mask"} == {4}


def test_a_byte_order_mark_is_fine(load):
    assert load(b"\xef\xbb\xbf" + BASE.encode()).name == "demo"


# The message


def test_the_message_gives_file_line_key_value_and_rule(refuse):
    error = refuse(BASE.replace("- 8", "- abc"))
    assert str(error) == "c.yaml:7: grid.heads: 'abc': must be a positive whole number"
    assert (error.file, error.line, error.key, error.value) == ("c.yaml", 7, "grid.heads", "abc")
    assert error.rule == "must be a positive whole number"


def test_a_mapping_has_no_lines():
    error = refuse_dict({"name": "x", "grid": {**GRID, "heads": "8"}})
    assert str(error) == "<config>: grid.heads: '8': must be a positive whole number"


def test_several_problems_are_several_lines_and_at_most_ten(refuse):
    error = refuse(BASE.replace("[16]", f"[{', '.join('abcdefghijklm')}]"))
    lines = str(error).splitlines()
    assert lines[0].startswith("c.yaml:8: grid.seq_len: 'a': ")
    assert len(lines) == 11
    assert lines[-1] == "... and 3 more"


def test_the_error_survives_pickling():
    error = refuse_dict({"name": "x"})
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_long_or_endless_value_is_shown_short():
    endless: list = []
    endless.append(endless)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, endless, deep, 10**5000, {"a": {"b": {"c": {"d": 1}}}}, list(range(10**5))):
        assert len(str(refuse_dict({"name": "x", "seed": value, "grid": GRID}))) < 400


# Lines, in every style YAML has


LINES = """\
# a comment
name: x
grid: {variant: [mha,
    mqa], embed_dim: [
    64,

    128],
  heads: 4, seq_len: 8}
include:
- variant: mha
  embed_dim: 64
  heads:
  - 1

  - 2
  seq_len:
    16
-
  variant: "mqa"
- heads: [1, "a

    b", &two 2,
    4, *two]
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 2),
        (("name",), 2),
        (("grid",), 3),
        (("grid", "variant"), 3),
        (("grid", "variant", 0), 3),
        (("grid", "variant", 1), 4),
        (("grid", "embed_dim"), 4),
        (("grid", "embed_dim", 0), 5),
        (("grid", "embed_dim", 1), 7),
        (("grid", "heads"), 8),
        (("grid", "heads", 0), 8),  # a scalar has no items: the nearest line is its own
        (("grid", "nonesuch"), 3),
        (("include",), 9),
        (("include", 0), 10),
        (("include", 0, "heads"), 12),
        (("include", 0, "heads", 0), 13),
        (("include", 0, "heads", 1), 15),
        (("include", 0, "seq_len"), 16),
        (("include", 1), 19),
        (("include", 1, "variant"), 19),
        (("include", 2, "heads", 1), 20),  # where it begins, not where it ends
        (("include", 2, "heads", 2), 22),
        (("include", 2, "heads", 4), 23),  # where the alias is used
        (("include", 7), 9),
    ],
)
def test_lines(path, line):
    assert parse(LINES).line_of(path) == line


def test_plain_data_is_what_safe_load_gives():
    text = LINES + "- [1, 1.5, 1e3, .inf, 0x10, 1_000, yes, ~, '8', null, 2024-01-02, <, '']\n- |\n  a\n  b\n"
    assert parse(text).plain() == yaml.safe_load(text)


def test_moving_a_mistake_moves_its_line(refuse):
    """Sabotage: the same mistake pushed down line by line must be followed."""
    for blank in range(30):
        text = BASE.replace("    - 8\n", "\n" * blank + "    - -8\n")
        assert refuse(text).line == 7 + blank
        newlines = "\n" * blank
        assert refuse(BASE + f"include: [{newlines}5]\n").line == 9 + blank
        assert refuse(BASE + f"timing: {{{newlines}budget_s: {newlines}x}}\n").line == 9 + blank


# Unknown keys and names


@pytest.mark.parametrize(
    ("extra", "line", "key", "says"),
    [
        ("sed: 3\n", 9, "sed", "unknown key; did you mean 'seed'? (known: name, description, seed, "),
        ("  kv_head: 3\n", 9, "grid.kv_head", "unknown key; did you mean 'kv_heads'? (known: variant, "),
        ("timing: {\n budget: 3}\n", 10, "timing.budget", "did you mean 'budget_s'? (known: enabled, budget_s, "),
        ("include:\n- {batsh: 2}\n", 10, "include[0].batsh", "unknown key; did you mean 'batch'?"),
        ("exclude:\n- {heads: 4}\n- {maks: 2}\n", 11, "exclude[1].maks", "unknown key; did you mean 'mask'?"),
        ("exclude:\n- {mask: nne}\n", 10, "exclude[0].mask", "unknown mask; did you mean 'none'?"),
        ("<<: {}\n", 9, "'<<'", "unknown key"),
        ('"a\\nb": 1\n', 9, "'a\\nb'", "unknown key"),
        ("  mask: [none, causl]\n", 9, "grid.mask", "unknown mask; did you mean 'causal'? (known: none, causal, "),
        ("  mask: null\n", 9, "grid.mask", "unknown mask (known: none, "),
        ("  phase: decoed\n", 9, "grid.phase", "did you mean 'decode'? (known: prefill, decode, train)"),
        ("  dtype: float23\n", 9, "grid.dtype", "did you mean 'float32'? (known: float64, float32, bfloat16, "),
        ("  kernel: egaer\n", 9, "grid.kernel", "did you mean 'eager'? (known: auto, compiled, eager, "),
        ("regimes: [plain,\n offst]\n", 10, "regimes", "did you mean 'offset'? (known: plain, peaked, "),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(refuse, extra, line, key, says):
    found = [p for p in refuse(BASE + extra).problems if says in p.rule]
    assert [(p.line, p.key) for p in found] == [(line, key)]


def test_an_unknown_variant_lists_them_all(refuse):
    error = refuse(BASE.replace("mha", "mhaa"))
    assert error.rule == f"unknown variant; did you mean 'mha'? (known: {', '.join(VARIANTS)})"
    assert len(MASKS) == 13


# Types and bounds


@pytest.mark.parametrize("axis", ["embed_dim", "heads", "seq_len", "batch", "kv_heads", "head_dim", "kv_lora_rank"])
@pytest.mark.parametrize("value", ["8", 8.0, True, 0, -1, [[8]], {"a": 1}, 10**9, float("nan"), b"8"])
def test_sizes_are_positive_bounded_whole_numbers(axis, value):
    error = refuse_dict({"name": "x", "grid": {**GRID, axis: [value]}})
    assert error.key == f"grid.{axis}"
    assert "must be" in error.rule


@pytest.mark.parametrize(
    ("axis", "limit"),
    [("embed_dim", 1_048_576), ("heads", 65_536), ("kv_heads", 65_536), ("seq_len", 16_777_216), ("batch", 65_536)],
)
def test_the_largest_size_is_accepted_and_the_next_is_not(axis, limit):
    grid = {**GRID, "embed_dim": 65_536}
    assert len(load_suite({"name": "x", "grid": {**grid, axis: limit}}).cases) == 1
    error = refuse_dict({"name": "x", "grid": {**grid, axis: limit + 1}})
    assert (error.value, error.rule) == (limit + 1, f"must be at most {limit}")


@pytest.mark.parametrize(
    "axis", ["variant", "embed_dim", "heads", "bias", "seq_len", "mask", "phase", "dtype", "batch"]
)
def test_null_is_refused_where_it_has_no_meaning(axis):
    assert refuse_dict({"name": "x", "grid": {**GRID, axis: None}}).value is None


@pytest.mark.parametrize("axis", AXES)
def test_an_empty_list_is_refused(axis):
    error = refuse_dict({"name": "x", "grid": {**GRID, axis: []}})
    assert (error.key, error.rule) == (f"grid.{axis}", "must not be an empty list")


def test_a_repeated_value_is_refused_on_its_own_line(refuse):
    error = refuse(BASE.replace("- 8", "- 4"))
    assert (error.line, error.value, error.rule) == (7, 4, "listed twice")


@pytest.mark.parametrize("missing", ["variant", "embed_dim", "heads", "seq_len"])
@pytest.mark.parametrize("where", ["grid", "include"])
def test_a_required_axis(missing, where):
    grid = {axis: value for axis, value in GRID.items() if axis != missing}
    error = refuse_dict({"name": "x", where: grid if where == "grid" else [GRID, grid]})
    assert error.key == {"grid": f"grid.{missing}", "include": f"include[1].{missing}"}[where]
    assert error.rule == "required key is missing"
    assert error.value is ABSENT


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("name", 3, "must be text"),
        ("name", None, "must be text"),
        ("name", "", "1 to 100 letters"),
        ("name", "a b", "letters"),
        ("name", "a/b", "letters"),
        ("name", "x\n", "letters"),
        ("name", "..", "only dots"),
        ("name", "x" * 101, "1 to 100"),
        ("description", 3, "must be text"),
        ("seed", -1, "must be a whole number of at least 0"),
        ("seed", True, "must be a whole number of at least 0"),
        ("seed", 2**63, "must be at most"),
        ("threads", 0, "must be a positive whole number"),
        ("threads", 1.0, "must be a positive whole number"),
        ("timing", None, "must be a mapping"),
        ("timing", [], "must be a mapping"),
        ("limits", None, "must be a mapping"),
        ("limits", 8, "must be a mapping"),
        ("regimes", [], "must not be an empty list"),
        ("regimes", ["tiny", "tiny"], "listed twice"),
        ("grid", None, "must be a mapping"),
        ("grid", 3, "must be a mapping"),
        ("include", None, "must be a list"),
        ("include", {}, "must be a list"),
        ("exclude", "mha", "must be a list"),
    ],
)
def test_top_level_values(key, value, says):
    error = refuse_dict({"name": "x", "grid": GRID, key: value})
    assert error.key == key
    assert says in error.rule


@pytest.mark.parametrize("value", [0, -1, 601, "1", True, None, float("nan"), float("inf")])
def test_the_timing_budget_is_a_number_of_seconds(value):
    error = refuse_dict({"name": "x", "grid": GRID, "timing": {"budget_s": value}})
    assert (error.key, error.rule) == ("timing.budget_s", "must be a number of seconds, 0 < s <= 600")


@pytest.mark.parametrize(
    ("timing", "key"),
    [
        ({"enabled": 1}, "enabled"),
        ({"min_blocks": 2}, "min_blocks"),
        ({"max_blocks": 3.0}, "max_blocks"),
        ({"min_blocks": 102}, "max_blocks"),
        ({"min_blocks": 9, "max_blocks": 8}, "max_blocks"),
    ],
)
def test_the_rest_of_timing(timing, key):
    assert refuse_dict({"name": "x", "grid": GRID, "timing": timing}).key == f"timing.{key}"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("100000kB", 10**8),
        ("100000000", 10**8),
        ("100000000B", 10**8),
        (10**8, 10**8),
        (None, None),
    ],
)
def test_sizes_of_memory(text, size):
    assert load_suite({"name": "x", "grid": GRID, "limits": {"max_memory": text}}).limits.max_memory == size


@pytest.mark.parametrize(
    "value",
    [
        *("", "8", "8Gi", "GiB", "-8GiB", "8 GiB ", "8GiB\n", "8,5GiB", "1e9", "٣GiB", "63MiB", "2000TiB", "9" * 99),
        *(8, 1e9, True, []),
    ],
)  # fmt: skip
def test_what_is_no_size_of_memory(value):
    error = refuse_dict({"name": "x", "grid": GRID, "limits": {"max_memory": value}})
    assert error.key == "limits.max_memory" and error.rule.startswith("must be a size of at least 64MiB")


@pytest.mark.parametrize("value", [0, -1, 604801, "1", True, None, float("nan"), float("inf")])
def test_the_time_limit_is_a_number_of_seconds(value):
    error = refuse_dict({"name": "x", "grid": GRID, "limits": {"timeout_s": value}})
    assert (error.key, error.rule) == ("limits.timeout_s", "must be a number of seconds, 0 < s <= 604800")


def test_limits_name_their_line_and_their_keys(refuse):
    error = refuse(BASE + "limits:\n  timeout_s: 5\n  max_memory: lots\n")
    assert str(error).startswith("c.yaml:11: limits.max_memory: 'lots': must be a size")
    error = refuse(BASE + "limits:\n  timeout: 5\n")
    assert str(error) == (
        "c.yaml:10: limits.timeout: 5: unknown key; did you mean 'timeout_s'? (known: timeout_s, max_memory)"
    )


def test_bias_is_a_bool():
    assert refuse_dict({"name": "x", "grid": {**GRID, "bias": 1}}).rule == "must be true or false"
    assert len(load_suite({"name": "x", "grid": {**GRID, "bias": [True, False]}}).cases) == 2


def test_every_regime_is_accepted():
    assert load_suite({"name": "x", "grid": GRID, "regimes": list(REGIMES)}).regimes == REGIMES


def test_an_empty_grid_is_refused_even_beside_an_include():
    assert refuse_dict({"name": "x", "grid": None, "include": [GRID]}).rule == "must be a mapping of axes"


def test_neither_grid_nor_include_is_refused():
    for config in ({"name": "x"}, {"name": "x", "include": []}):
        assert "required key is missing" in refuse_dict(config).rule


def test_keys_that_are_no_text_are_refused():
    assert refuse_dict({"name": "x", "grid": GRID, 3: 4}).rule == "keys must be text"
    assert "keys must be text" in str(refuse_dict({"name": "x", "grid": {**GRID, None: 4}}))


# Impossible cells, exclusions, limits


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "value", "says"),
    [
        ("- 8", "- 7", 7, "grid.heads", 7, "impossible for mha: must divide embed_dim (64)"),
        ("[mha]", "[mha, gqa]", 2, "grid.kv_heads", None, "impossible for gqa: gqa needs the kv_heads axis"),
        ("[mha]", "gqa\n  kv_heads: [2,\n    3]", 5, "grid.kv_heads", 3, "impossible for gqa: must divide heads (4)"),
        ("[mha]", "mla\n  rope_head_dim: 3", 4, "grid.rope_head_dim", 3, "must be even"),
        ("[mha]", "block_mla\n  phase:\n  - decode", 5, "grid.phase", "decode", "block_mla: this variant has only"),
        ("[16]", "[16,\n 1]\n  phase: decode", 9, "grid.seq_len", 1, "decode needs at least 2 tokens"),
    ],
)
def test_impossible_cells_name_their_place_and_exclude(refuse, old, new, line, key, value, says):
    error = refuse(BASE.replace(old, new))
    assert (error.line, error.key, error.value) == (line, key, value)
    assert says in error.rule
    assert "`exclude` can drop the combination" in error.rule


def test_an_impossible_cell_of_an_include_names_the_entry(refuse):
    error = refuse(BASE + "include:\n- {variant: mha, embed_dim: 8, heads: 4, seq_len: 8}\n-\n  variant: gqa\n"
                   "  embed_dim: 64\n  heads: 4\n  seq_len: 8\n")  # fmt: skip
    assert (error.line, error.key) == (12, "include[1].kv_heads")


def test_exclude_makes_an_impossible_grid_possible(load):
    text = BASE.replace("64", "[64, 100]") + "exclude:\n- {embed_dim: 100, heads: 8}\n"
    assert [(c.embed_dim, c.heads) for c in load(text).cases] == [(64, 4), (64, 8), (100, 4)]


def test_an_exclude_that_matches_nothing_is_refused(refuse):
    error = refuse(BASE + "exclude:\n- {heads: 4}\n- {heads: 16}\n")
    assert str(error) == "c.yaml:11: exclude[1]: {'heads': [16]}: matches no cell, so it drops nothing"


def test_an_exclude_of_nothing_and_of_everything_is_refused(refuse):
    assert (refuse(BASE + "exclude:\n- {}\n").line, refuse(BASE + "exclude:\n- {}\n").key) == (10, "exclude[0]")
    error = refuse(BASE + "exclude:\n- {variant: mha}\n")
    assert (error.line, error.rule) == (9, "drops every cell: nothing is left to run")


def test_a_grid_beyond_all_measure_is_refused_before_it_is_expanded(refuse):
    many = str(list(range(1, 5000)))
    error = refuse(BASE.replace("[16]", many) + f"  batch: {many}\n  head_dim: {many}\n")
    assert (error.line, error.key) == (2, "grid")
    assert "limit is 200000" in error.rule


def test_exclusions_beyond_all_measure_are_refused_before_they_are_applied(refuse):
    sizes, drops = str(list(range(1, 2001))), "".join(f"- {{seq_len: {n}}}\n" for n in range(1, 1001))
    error = refuse(BASE.replace("[16]", sizes) + f"exclude:\n{drops}")
    assert (error.line, error.key) == (9, "exclude")
    assert "1000 entries over 4000 cells are 4000000 comparisons, and the limit is 2000000" in error.rule


def test_a_grid_that_is_nearly_all_impossible_is_not_searched_to_its_end(refuse):
    sizes = str(list(range(1, 300)))
    error = refuse(f"name: a\ngrid: {{variant: mha, embed_dim: {sizes}, heads: {sizes}, seq_len: 4}}\n")
    assert "impossible for mha" in error.rule and len(error.problems) == MAX_CLASHES


def test_values_beyond_all_measure_are_refused(refuse):
    error = refuse(BASE + "description: [" + "1, " * 20_000 + "]\n")
    assert (error.line, error.rule) == (9, "holds more than 20000 values once its aliases are expanded")


def test_many_exclusions_of_many_includes_are_prepared_once(load):
    """Once for each include, this would take a minute."""
    entries = "".join(f"- {{variant: mha, embed_dim: 64, heads: 4, seq_len: {n}}}\n" for n in range(1, 1001))
    drops = "".join(f"- {{seq_len: {n}}}\n" for n in range(1, 1000))
    with at_most(5.0):
        suite = load(f"name: a\ninclude:\n{entries}exclude:\n{drops}")
    assert [case.seq_len for case in suite.cases] == [1000]


# Kernels


def test_a_plugin_in_the_current_directory_stays_as_written(load):
    Path("mine.py").write_text("raise SystemExit('config must not import it')")
    assert load(BASE + "  kernel: [eager, mine.py:fast]\n").cases[1].kernel == "mine.py:fast"


def test_a_plugin_beside_the_config_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.py").write_text("")
    (tmp_path / "conf" / "c.yaml").write_text(BASE + "  kernel: mine.py:fast\n")
    monkeypatch.chdir(tmp_path)
    assert load_suite("conf/c.yaml").cases[0].kernel == f"{tmp_path}/conf/mine.py:fast"


def test_a_plugin_of_a_module_is_not_imported(load):
    assert load(BASE + "  kernel: no.such.module:fast\n").cases[0].kernel == "no.such.module:fast"


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("gone.py:fast", "there is no file 'gone.py' in the current directory"),
        ("gone.py:2", "'2' after the colon is not the name of a function"),
        ("a.b:class", "not the name of a function"),
        ("a.b:", "not the name of a function"),
        (":f", "file.py:function or package.module:function"),
        ("a..b:f", "file.py:function or package.module:function"),
        ("a b:f", "file.py:function or package.module:function"),
        ("x" * 5000 + ".py:f", "there is no file"),
        ("a\0.py:f", "there is no file"),
        (3, "unknown kernel"),
    ],
)
def test_bad_kernels(kernel, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refuse_dict({"name": "x", "grid": {**GRID, "kernel": kernel}})
    assert error.key == "grid.kernel"
    assert says in error.rule


def test_kernels_of_the_command_line_replace_the_axis_everywhere(load):
    text = BASE + "  kernel: [eager, sdpa]\ninclude:\n- {variant: mqa, embed_dim: 64, heads: 4, seq_len: 8}\n"
    cases = [case for case in load(text, kernels=["sdpa", "a.b:f", "sdpa"]).cases if not case.is_battery]
    assert [(c.variant, c.heads, c.kernel) for c in cases] == [
        (v, h, k) for v, h in (("mha", 4), ("mha", 8), ("mqa", 4)) for k in ("sdpa", "a.b:f")
    ]
    assert {c.kernel for c in load(text, kernels="sdpa").cases} == {"sdpa"}


def test_kernels_of_the_command_line_are_checked_and_so_are_those_they_replace(refuse):
    error = refuse(BASE, kernels=["sdap"])
    assert str(error).startswith("--kernel: 'sdap': unknown kernel; did you mean 'sdpa'? (known: ")
    assert str(refuse(BASE, kernels=["gone.py:f"])).startswith("--kernel: 'gone.py:f': there is no file 'gone.py'")
    assert refuse(BASE + "  kernel: nope\n", kernels=["sdpa"]).key == "grid.kernel"


# Files and YAML itself


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", None, "is empty"),
        ("# only a comment\n", None, "is empty"),
        ("--- null\n", 1, "must be a mapping"),
        ("- a\n", 1, "must be a mapping"),
        (BASE + "name: y\n", 9, "duplicate key, first given on line 1"),
        (BASE + "  heads: 4\n", 9, "duplicate key, first given on line 5"),
        (BASE + "---\nname: y\n", 9, "more than one YAML document"),
        (BASE + "8: y\n", 9, "keys must be text"),
        (BASE + "on: y\n", 9, "keys must be text"),
        (BASE + "? [a]\n: y\n", 9, "keys must be text"),
        (BASE + "? {a: b}\n: y\n", 9, "keys must be text"),
        (BASE + "x: !!python/object/apply:os.system [ls]\n", 9, "YAML tags are not allowed"),
        (BASE + "x: !foo 3\n", 9, "YAML tags are not allowed, found '!foo'"),
        (BASE + "x: !!set {a, b}\n", 9, "YAML tags are not allowed"),
        ("%YAML 1.1\n---\n" + BASE, 1, "directives"),
        (BASE + "x: [1,\n", 10, "not valid YAML"),
        (BASE + "x: a: b\n", 9, "not valid YAML"),
        (BASE + "\tx: a\n", 9, "not valid YAML"),
        (BASE + "x: *nowhere\n", 9, "alias *nowhere has no anchor"),
        (BASE + "x: &x [1, *x]\n", 9, "alias *x refers to a value that contains it"),
        (BASE + "x: &x {a: {b: *x}}\n", 9, "alias *x refers to a value that contains it"),
        (BASE + "x: 2024-99-99\n", 9, "cannot read '2024-99-99'"),
        (BASE + "x: a\0b\n", 9, "character '\\x00' is not allowed"),
        (BASE + "x: \x07\n", 9, "character '\\x07' is not allowed"),
        (BASE.encode() + b"x: \xff\n", 9, "must be UTF-8 text, but byte 0xff is not"),
        (BASE.encode("utf-16"), 1, "must be UTF-8 text"),
        (b"\x80" * 100, 1, "must be UTF-8 text"),
    ],
)
def test_bad_yaml(refuse, text, line, says):
    error = refuse(text)
    assert error.file == "c.yaml"
    assert error.line == line
    assert says in error.rule
    assert "\n" not in str(error)


def test_a_file_beyond_all_measure_is_refused(refuse):
    error = refuse("#" * (MAX_BYTES + 1))
    assert (error.line, error.rule) == (None, "is larger than 4 MiB")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[? ", "a:\n "])
def test_nesting_without_end_is_refused(refuse, opening):
    text = opening * 100_000
    if opening.endswith("\n "):
        text = "".join(" " * depth + "a:\n" for depth in range(2000))
    error = refuse(text)
    assert f"nested more than {MAX_DEPTH} deep" in error.rule or "keys must be text" in error.rule


def test_a_billion_laughs_is_refused(refuse):
    laughs = ["x0: &x0 [lol]"] + [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 30)]
    assert "once its aliases are expanded" in refuse("\n".join(laughs)).rule


def test_nesting_through_aliases_is_refused(refuse):
    tower = ["x0: &x0 [lol]"] + [f"x{n}: &x{n} [*x{n - 1}]" for n in range(1, 2000)]
    assert f"nested more than {MAX_DEPTH} deep" in refuse("\n".join(tower)).rule


def test_a_number_in_base_60_without_end_is_text(refuse):
    assert refuse(BASE.replace("64", "1" + ":1" * 200_000)).rule == "must be a positive whole number"


def test_an_unreadable_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path, "is a directory"),
        (tmp_path / "gone.yaml", "No such file"),
        (tmp_path / "gone" / "gone.yaml", "No such file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        ("./a\0b", "cannot be read"),
        ("./" + "x" * 5000, "cannot be read"),
        ("a\0b", "unknown config, and no file"),
        ("", "is a directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_suite(path)


def test_a_file_without_permission_is_refused(load, monkeypatch):
    def denied(*_args, **_options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    load(BASE)
    monkeypatch.setattr(Path, "open", denied)  # chmod would not stop root, and CI is often root
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read: Permission denied"):
        load_suite("c.yaml")


# Anything at all: a suite or a ConfigError, never another exception

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([*VARIANTS, *MASKS, "prefill", "decode", "float16", "eager", "sdpa", "a.b:c", "x.py:f", "eagr"]),
)
KEYS = st.sampled_from(
    [*AXES, "name", "grid", "include", "exclude", "timing", "limits", "regimes", "budget_s", "seed", "hads"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
GOOD_AXES = st.fixed_dictionaries(
    {
        "variant": st.lists(st.sampled_from(list(VARIANTS)), min_size=1, max_size=3, unique=True),
        "embed_dim": st.sampled_from([64, 100, [32, 64]]),
        "heads": st.sampled_from([4, [1, 3], 8]),
        "seq_len": st.sampled_from([1, [2, 16]]),
    },
    optional={
        "kv_heads": st.sampled_from([1, 2, 3, None, [1, None]]),
        "rope_head_dim": st.sampled_from([2, 3]),
        "mask": st.lists(st.sampled_from(list(MASKS)), min_size=1, unique=True),
        "phase": st.sampled_from([["prefill", "decode"], "train"]),
    },
)
CONFIGS = st.fixed_dictionaries(
    {"name": st.just("x"), "grid": GOOD_AXES},
    optional={
        "include": st.lists(GOOD_AXES, max_size=2),
        "exclude": st.lists(st.dictionaries(st.sampled_from(AXES), SCALARS, max_size=2), max_size=2),
    },
)


def outcome(config) -> Suite | ConfigError:
    try:
        suite = load_suite(config)
    except ConfigError as error:
        return error
    assert len(set(suite.cases)) == len(suite.cases) > 0
    return suite


@given(config=CONFIGS, path=st.lists(KEYS, min_size=1, max_size=3), value=VALUES, mutate=st.booleans())
@settings(max_examples=300, deadline=None)
def test_structured_configs(tmp_path_factory, config, path, value, mutate):
    if mutate:
        inside = config
        for key in path[:-1]:
            deeper = inside.get(key)
            inside = deeper if isinstance(deeper, dict) else inside
        inside[path[-1]] = value
    direct = outcome(config)
    file = tmp_path_factory.getbasetemp() / "structured.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=False))
    read = outcome(file)
    assert type(read) is type(direct), (str(read), str(direct))
    if isinstance(direct, Suite):
        assert isinstance(read, Suite)
        assert read.cases == direct.cases
    elif isinstance(read, ConfigError):
        assert read.line is not None
        assert read.key == direct.key


def assert_read_or_refused(file: Path) -> None:
    """Cases, the same when read again; or an error that names the file."""
    found = outcome(file)
    if isinstance(found, Suite):
        assert found.cases == load_suite(file).cases
    else:
        assert file.name in str(found)


@given(data=st.binary(max_size=60), at=st.integers(0, len(BASE)), cut=st.integers(0, 20))
@example(data=b"\xef\xbb\xbf", at=0, cut=0)
@settings(max_examples=500, deadline=None)
def test_bytes_thrown_into_a_config(tmp_path_factory, data, at, cut):
    file = tmp_path_factory.getbasetemp() / "bytes.yaml"
    file.write_bytes(BASE.encode()[:at] + data + BASE.encode()[at + cut :])
    assert_read_or_refused(file)


@given(text=st.text(alphabet="[]{}&*!|>%@`'\":,?-#~<=ab01. \n\t\\", max_size=60), tail=st.booleans())
@settings(max_examples=500, deadline=None)
def test_punctuation_thrown_into_a_config(tmp_path_factory, text, tail):
    file = tmp_path_factory.getbasetemp() / "punctuation.yaml"
    file.write_text(BASE + text if tail else text)
    assert_read_or_refused(file)


@given(text=st.text(alphabet="[]{}&*!|>'\":,?-#ab01 \n", max_size=40))
@settings(max_examples=500, deadline=None)
def test_parse_agrees_with_safe_load_wherever_it_accepts(text):
    try:
        plain = parse(text).plain()
    except YamlError:
        return
    assert plain == yaml.load(text, yaml.CSafeLoader)  # the pure Python scanner differs from libyaml
