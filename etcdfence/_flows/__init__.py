"""What etcdfence does, as flows: generators that yield requests and are sent replies.

A flow touches nothing but its arguments and the replies. The two mutable arguments, `leases.Bid` and
`fencing.Lane`, are notes of what has been set in motion; they are written before a request is yielded, so
that they are right even if the flow is never resumed.
"""
