"""Checkpoints: the whole pipeline's state in one place, whoever holds which part of it."""
