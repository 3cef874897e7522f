"""Tests of devices, transfers and delays."""
