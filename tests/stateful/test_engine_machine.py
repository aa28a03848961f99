"""A whole engine on scripted decoders, held to the contract by two state machines.

Admission, cancelling and ends of requests; tokens, readers and failing steps.  ``--hypothesis-show-statistics`` tells
how often each of the interesting things has happened.
"""

from __future__ import annotations

from laneway.testing.machines import DecodingMachine, RequestMachine

TestRequests = RequestMachine.TestCase
TestDecoding = DecodingMachine.TestCase
