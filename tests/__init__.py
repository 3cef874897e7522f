"""The tests of rrfp_async, laid out as the package is."""
