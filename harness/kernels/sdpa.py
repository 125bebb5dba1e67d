"""torch's own fused attention."""

import torch.nn.functional as F

from harness.kernels.plugin import from_function

KERNEL = from_function(F.scaled_dot_product_attention, "sdpa", delegates=True)
