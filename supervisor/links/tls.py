"""TLS of one link: the contexts for its listener and its client, made anew when files change.

A certificate is renewed by replacing its files. They are looked at every few seconds; when they
differ, new contexts are made, and new connections use them. A file that is half written, or a key
that does not fit its certificate yet, leaves the contexts of before in force until the next look.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from stockade.supervisor.errors import ConfigError

log = structlog.get_logger(__name__)

LOOK_S: Final = 5.0
HANDSHAKE_S: Final = 10.0

_Signature = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of one link, each as in the configuration's ``tls_*`` key; None when not set.

    Attributes:
        cert: our certificate and those between it and its authority: the listener's, and what
            the scheduler is shown when it asks.
        key: the certificate's private key.
        ca: authorities that the scheduler's certificate must come from; None: the system's.
        client_ca: authorities that callers' certificates must come from; None: none is asked for.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    client_ca: Path | None = None

    @property
    def present(self) -> tuple[Path, ...]:
        """Those that are set."""
        return tuple(path for path in dataclasses.astuple(self) if path is not None)


class Certificates:
    """The TLS contexts of one link.

    Args:
        files: what they are made of. Read at once, while the process may still do so.
        alpn: the protocol to agree on, ``h2`` or ``http/1.1``.
        section: the configuration's section, for messages.

    Raises:
        ConfigError: a file cannot be read or used.
    """

    def __init__(self, files: TlsFiles, *, alpn: str, section: str) -> None:
        self._files = files
        self._alpn = alpn
        self._section = section
        self._client: ssl.SSLContext | None = None
        self.server: ssl.SSLContext | None = None
        """The listener's context; None when it is to be plain."""
        self._seen = self._signature()
        self._make()

    @property
    def client(self) -> ssl.SSLContext:
        """The context for connections to schedulers."""
        if self._client is None:
            self._client = self._client_context()
        return self._client

    def refresh(self) -> bool:
        """Read the files again if they have changed. True when there are new contexts.

        Raises:
            ConfigError: they have changed and cannot be used. Tried again at the next look: that
                they may be read by now does not show in what tells a change.
        """
        signature = self._signature()
        if signature == self._seen:
            return False
        self._make()
        self._seen = signature
        return True

    async def watch(self, renewed: Callable[[], Awaitable[None]]) -> None:
        """Call ``renewed`` after each change of the contexts. Ends only by being cancelled."""
        for path in self._files.present:
            if not os.access(path, os.R_OK):
                log.warning(
                    "a change of this file will go unseen: the worker's user cannot read it",
                    path=str(path),
                )
        problem = ""
        while self._files.present:
            await asyncio.sleep(LOOK_S)
            try:
                changed = self.refresh()
            except ConfigError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.error("certificates not renewed, the old ones stay", reason=problem)
                continue
            if changed:
                problem = ""
                log.info("certificates renewed", section=self._section)
                await renewed()

    def _make(self) -> None:
        server = self._server_context() if self._files.cert is not None else None
        # Without files of ours it is made of the system's when it is first needed, which may never
        # be.
        client = self._client_context() if self._files.present else None
        self.server, self._client = server, client

    def _server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._alpn])
        self._load_own(context)
        if self._files.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            self._load_authorities(context, self._files.client_ca, "tls_client_ca")
        return context

    def _client_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._alpn])
        if self._files.ca is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        else:
            self._load_authorities(context, self._files.ca, "tls_ca")
        if self._files.cert is not None:
            self._load_own(context)
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        cert, key = self._files.cert, self._files.key
        assert cert is not None
        assert key is not None
        try:
            # With a passphrase that is empty, a key that is encrypted fails; it would ask for one.
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use {self._section}.tls_cert {cert} with {self._section}.tls_key {key}:"
                f" {_reason(error)}; both are PEM files, the key is that of the first certificate"
                " and has no passphrase"
            ) from error

    def _load_authorities(self, context: ssl.SSLContext, path: Path, key: str) -> None:
        try:
            context.load_verify_locations(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use {self._section}.{key} {path}: {_reason(error)};"
                " it is a PEM file of one or more authorities"
            ) from error

    def _signature(self) -> _Signature:
        found = []
        for path in self._files.present:
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
