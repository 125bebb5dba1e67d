"""How a cache is quantised, and what it then occupies: arithmetic, without torch.

Codes are integers between the least and the largest value of their group (`int8`, `int4`), or fp8 numbers of four
exponent and three mantissa bits scaled by the group's largest (`fp8`). A group is some channels of one token (`token`),
or some tokens of one channel (`channel`, KIVI's way with keys: their outliers are channels).
"""

from dataclasses import dataclass

BITS = {"int8": 8, "int4": 4, "fp8": 8}
METAS = {"int8": 2, "int4": 2, "fp8": 1}  # numbers a group keeps: least and step, or the scale alone
AXES = ("token", "channel")
TOKENS = 32  # of a group along tokens, where it is not given
META_BYTES = 4  # float32 at least: in half precision its own rounding would be as large as a step of int8


@dataclass(frozen=True)
class Quantisation:
    """`group`: channels, or tokens, that share a scale; by default all channels of a token, or 32 tokens.

    `residual`: the newest tokens that stay in full precision; along channels up to group - 1 more wait for their group.
    """

    format: str = "int8"
    per: str = "token"
    group: int | None = None
    residual: int = 0

    def __post_init__(self) -> None:
        if self.format not in BITS:
            raise ValueError(f"format = {self.format!r}: must be one of {', '.join(BITS)}")
        if self.per not in AXES:
            raise ValueError(f"per = {self.per!r}: must be one of {', '.join(AXES)}")
        if self.group is not None and self.group < 1:
            raise ValueError(f"group = {self.group}: must be at least 1")
        if self.residual < 0:
            raise ValueError(f"residual = {self.residual}: must not be negative")

    @property
    def block(self) -> int:
        """Tokens that are quantised together."""
        return 1 if self.per == "token" else self.group or TOKENS

    @property
    def waiting(self) -> int:
        """The most tokens that ever stand in full precision."""
        return self.residual + self.block - 1

    def channels(self, width: int) -> int:
        """Of a group in a stream of that width."""
        size = 1 if self.per == "channel" else self.group or width
        if width % size:
            raise ValueError(f"group = {size}: must divide the {width} channels of a token")
        if self.format == "int4" and width % 2:
            raise ValueError(f"int4 packs two channels into a byte: {width} channels must be even")
        return size

    def quantised(self, tokens: int) -> int:
        """How many of so many tokens are held as codes."""
        return max(0, tokens - self.residual) // self.block * self.block

    def stream_bytes(self, tokens: int, width: int, item_bytes: int) -> int:
        """Of one head of one sequence, in a cache made for so many tokens."""
        coded = self.quantised(tokens)
        groups = coded // self.block * (width // self.channels(width))
        codes = coded * width * BITS[self.format] // 8
        kept = min(tokens, self.waiting) * width * item_bytes
        return codes + groups * METAS[self.format] * max(item_bytes, META_BYTES) + kept
