"""Tests of the virtual cluster. `event_simulation` is what its results are compared with."""
