"""Tests of the agreement in a tensor-parallel group."""
