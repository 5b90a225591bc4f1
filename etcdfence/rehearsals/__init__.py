"""Failures acted out with real processes on a real etcd, so that anybody can watch the fence work (or fail)."""
