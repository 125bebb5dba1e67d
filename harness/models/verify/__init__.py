"""Swap the attention of a real model and prove, step by step, that the model is still the same."""

from harness.models.verify.result import Verification, VerifyStep
from harness.models.verify.steps import verify

__all__ = ["Verification", "VerifyStep", "verify"]
