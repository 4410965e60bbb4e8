"""Errors of the sandbox layer."""

from __future__ import annotations

from stockade.platform.errors import StockadeError


class SandboxSetupError(StockadeError):
    """A slot, or the spawner itself, could not be set up.

    Attributes:
        step: the name of the step that failed.
        cause: what went wrong, with the hint that mends it.
    """

    def __init__(self, step: str, cause: str) -> None:
        super().__init__(f"cannot {step}: {cause}")
        self.step = step
        self.cause = cause


class UnsupportedError(StockadeError):
    """This host lacks what a feature needs.

    Attributes:
        feature: the feature asked for.
        needs: what the host would have to offer.
    """

    def __init__(self, feature: str, needs: str) -> None:
        super().__init__(f"cannot enforce {feature}: {needs}")
        self.feature = feature
        self.needs = needs


class ProtocolError(StockadeError):
    """A peer (supervisor, spawner or launcher) sent what the protocol does not allow."""


class ContainerRefusedError(StockadeError):
    """A container task asks for what it may not have, or for nothing that could be run."""


class NoEngineError(ContainerRefusedError):
    """This worker runs no containers."""
