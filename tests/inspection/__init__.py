"""Readers, pictures and explanations, on traces of pipelines with planted faults."""
