"""Records of what was decided, and their way to disk. Knows no tensor and no event loop."""
