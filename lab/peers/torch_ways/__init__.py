"""The ways of computing that the torch peer has: one module per operation, each with its WAYS."""
