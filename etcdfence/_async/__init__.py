"""Coordinator and Lease for coroutines."""

from etcdfence._async.coordinator import AsyncCoordinator
from etcdfence._async.engine import AsyncEngine
from etcdfence._async.leadership import AsyncLeadership
from etcdfence._async.lease import AsyncLease, AsyncTransaction
from etcdfence._async.session import AsyncSession

__all__ = ["AsyncLeadership", "AsyncSession", "AsyncCoordinator", "AsyncEngine", "AsyncLease", "AsyncTransaction"]
