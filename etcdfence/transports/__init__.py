"""Wires to etcd. Each maps its own errors to those of `etcdfence.errors`, and nothing else does."""
