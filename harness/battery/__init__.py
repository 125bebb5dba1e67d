"""A battery of direct calls to a kernel, no module around it, that covers what SDPA's signature can be asked.

`design` chooses the calls, `call` makes their tensors, `held` what a right answer is, `conduct` and its neighbours ask
for what no single call shows, `session` puts all of it in an order in which a wrong kernel is known early.
"""
