"""Tests of the decision core. Nothing here imports torch, opens a socket or runs a loop."""
