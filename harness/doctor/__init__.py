"""Is this machine fit to run and, above all, to time? Each probe looks at one thing and says what to do about it.

Probes take what they judge (text of /proc and /sys, numbers, an environment) as arguments, so that every verdict can be
seen without the machine that earns it. Only `examine` asks the machine itself.
"""
