"""Tests of batches and stages."""
