"""Swap the attention of a real model and prove, step by step, that the model is still the same."""

from harness.verify.result import Step, Verification
from harness.verify.steps import verify

__all__ = ["Step", "Verification", "verify"]
