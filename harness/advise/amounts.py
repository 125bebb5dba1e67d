"""Bytes, tokens and counts as people write them: 24GiB, 128k, 1M, 8e9."""

import re

BYTES = {"": 1, "b": 1} | {
    f"{prefix}{kind}".lower(): base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("iB", 1024), ("B", 1000))
}
NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+]?[0-9]+)?)\s*([a-zA-Z]*)\s*"


def memory_size(text: str) -> int:
    """GiB counts by 1024, GB by 1000, a bare number is bytes."""
    import argparse

    amount = _scaled(text, BYTES, "must be an amount of memory, as in 24GiB, 80GB or 8e9")
    if amount < 2**20 and text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than a few bytes; is {text.strip()}GiB meant?")
    return amount


def tokens(text: str) -> int:
    return _scaled(
        text, {"": 1, "k": 1024, "m": 1024**2}, "must be a positive number of tokens, as in 32768, 32k or 1M"
    )


def parameters(text: str) -> int:
    units = {"": 1, "k": 1000, "m": 10**6, "b": 10**9, "t": 10**12}
    return _scaled(text, units, "must be a number of parameters, as in 8030261248, 8e9 or 8B")


def _scaled(text: str, units: dict[str, int], rule: str) -> int:
    import argparse

    match = re.fullmatch(NUMBER, text)
    amount = 0
    if match and match[2].lower() in units and len(match[1]) < 40:
        number = match[1]
        # Digits stay exact: a float would round large counts.
        whole = int(number) if number.isdecimal() else float(number)
        amount = int(whole * units[match[2].lower()]) if whole < 1e30 else 0
    if amount < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: {rule}")
    return amount
