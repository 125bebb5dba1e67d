"""Every saboteur that is a kernel, as a user's own: SDPA's signature, under a number instead of its name."""

from typing import Any

from harness.diagnosis.guesses import as_function
from harness.mutants.saboteurs.saboteur import SABOTEURS, load_all

NAMES = tuple(name for name in sorted(load_all()) if SABOTEURS[name].kernel is not None)


def __getattr__(name: str) -> Any:
    number = name.removeprefix("kernel_")
    if not number.isdecimal():
        raise AttributeError(name)
    make = SABOTEURS[NAMES[int(number)]].kernel
    assert make is not None
    globals()[name] = plugin = as_function(make)  # one for as long as the process lives: some remember
    return plugin
