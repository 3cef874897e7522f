"""The control plane: small messages between ranks. Never a tensor, never a decision."""
