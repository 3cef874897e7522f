"""Tests of the records and their writer."""
