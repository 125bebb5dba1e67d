"""What is wrong with a kernel that the battery has failed: its name, its place, and the smallest call that shows it.

evidence   one call: what came back, the golden, and what rounding explains
place      which batches, heads, rows, keys and channels are wrong, in words and as a picture
weights    what each key weighed, read from a kernel that returns no weights
guesses    ways to be wrong: readings of a call, saboteurs, roundings, tiles
naming     which guess gives just what the kernel gives, on all calls that are asked
shrink     the smallest call that still fails
repro      that call as a script, and as a test
session    all of it, in order
"""
