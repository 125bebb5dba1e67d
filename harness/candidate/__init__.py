"""A kernel in a process of its own: it gets inputs and returns outputs, and holds nothing that a verdict is made of.

`request` says what a kernel is asked and what comes back; `compute` does it, in whatever process the kernel lives;
`wire` carries both through shared memory; `client` is the judge's end and `server` the kernel's.
"""
