"""dfbench: a distributed job-queue benchmark for draft-free speculative decoding."""

__version__ = "0.1.0"
