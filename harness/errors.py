"""What is wrong with the input, said in one message: the command line prints it and exits with 2."""


class BadInput(ValueError):
    """Names the thing, its value and the rule it breaks."""
