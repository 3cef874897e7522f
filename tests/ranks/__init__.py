"""Tests of real ranks: processes that torchrun started, which talk over sockets."""
