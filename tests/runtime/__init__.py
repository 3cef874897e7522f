"""Tests of the Runtime and its dispatcher against the unpartitioned model."""
