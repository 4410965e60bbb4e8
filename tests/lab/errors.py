"""What can go wrong in the lab, apart from the tests that run there."""

from __future__ import annotations


class LabError(Exception):
    """The lab cannot do what it was asked."""


class LabUnavailableError(LabError):
    """This machine cannot run the lab: a program, a package source or a right is missing."""
