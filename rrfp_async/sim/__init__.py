"""The virtual cluster: the real Dispatchers of many ranks in one process, on a virtual clock."""
