"""Devices and tensor transfers. Knows links, numbers and specs; never a message or a schedule."""
