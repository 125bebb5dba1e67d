"""A Case: one cell of the grid, fully resolved. Plain data; nothing here imports torch."""

import hashlib
from dataclasses import dataclass, fields, replace

PHASES = ("prefill", "decode", "train")
DTYPES = ("float64", "float32", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
BATTERY = "battery"  # stands where a case has its variant: no module, but direct calls of the kernel, `harness.judge`
PLAINEST = "eager"  # the kernel whose cells give the seeds
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """Axes that do not apply to the variant are None: `kv_heads` of MLA, the MLA ranks of the others."""

    variant: str
    kernel: str
    embed_dim: int
    heads: int
    kv_heads: int | None
    head_dim: int
    seq_len: int
    batch: int
    mask: str
    dtype: str
    phase: str
    bias: bool = True
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_head_dim: int | None = None
    v_head_dim: int | None = None

    @classmethod
    def battery(cls, kernel: str) -> "Case":
        """All that a kernel can be asked directly: it has no sizes, for the battery has them all."""
        return cls(BATTERY, kernel, 0, 0, None, 0, 0, 0, mask="all", dtype="all", phase="call")

    @property
    def is_battery(self) -> bool:
        return self.variant == BATTERY

    @property
    def case_id(self) -> str:
        """Readable and stable: baselines, records and seeds are keyed by it."""
        if self.is_battery:
            return f"{BATTERY}-{self.kernel}"
        parts = [self.variant, f"e{self.embed_dim}", f"h{self.heads}"]
        sizes = {"kv": self.kv_heads, "d": self.head_dim, "q": self.q_lora_rank, "r": self.kv_lora_rank}
        sizes |= {"rope": self.rope_head_dim, "v": self.v_head_dim}
        parts += [f"{prefix}{size}" for prefix, size in sizes.items() if size is not None]
        if not self.bias:
            parts.append("nobias")
        parts += [f"l{self.seq_len}", f"b{self.batch}", self.mask, self.phase, self.dtype, self.kernel]
        return "-".join(parts)

    @property
    def kv_len(self) -> int:
        """Keys that the last query may see: the decode steps end at seq_len."""
        return self.seq_len

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def seed(self, suite_seed: int) -> int:
        """Depends on the cell alone, so that order, sharding and resuming change no number; and all its kernels are
        asked the same.
        """
        of_cell = self if self.is_battery else replace(self, kernel=PLAINEST)
        digest = hashlib.sha256(f"{suite_seed}:{of_cell.case_id}".encode()).digest()
        return int.from_bytes(digest[:6], "big")


CASE_FIELDS = tuple(field.name for field in fields(Case))
