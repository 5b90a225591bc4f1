"""Coordinator and Lease for coroutines."""

from etcdfence._async.coordinator import AsyncCoordinator
from etcdfence._async.engine import AsyncEngine
from etcdfence._async.lease import AsyncLease, AsyncTransaction

__all__ = ["AsyncCoordinator", "AsyncEngine", "AsyncLease", "AsyncTransaction"]
