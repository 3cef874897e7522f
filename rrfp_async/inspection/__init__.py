"""What a run has recorded: reports, pictures, explanations. Loads no torch, writes no record.

`reading`, `parsing` and `lines` turn a folder of rank*.jsonl into a `run`; all else looks at that.
"""
