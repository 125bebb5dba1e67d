"""How fast each kernel is, beside SDPA, nn.MultiheadAttention and transformers: `make bench-kernels`.

points -> guard -> measure -> rows -> exponents, targets -> report, pictures
"""
