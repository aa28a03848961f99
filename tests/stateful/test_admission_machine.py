"""The pure core of admission, held to the contract by a state machine.  Rules A2 to A4, A6, A7, A11 to A14."""

from __future__ import annotations

from laneway.testing._admission_machine import AdmissionMachine

TestAdmission = AdmissionMachine.TestCase
