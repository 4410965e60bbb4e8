"""Authorities and certificates for tests, and the contexts of the schedulers' side."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """One authority, and what it issues into a directory.

    Args:
        directory: files are written here.
        name: distinguishes the files of several authorities.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._ca = trustme.CA(organization_name=name)
        self._directory = directory
        self.file = directory / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))
        # So that workers that became another user may read it.
        self.file.chmod(0o644)

    def issue(self, name: str, host: str = "127.0.0.1") -> tuple[Path, Path]:
        """A certificate for this host and its key, as files; of the same name they are replaced."""
        issued = self._ca.issue_cert(host)
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        # Replaced as a whole, as renewal tools do.
        for path, blobs in (
            (cert, [blob.bytes() for blob in issued.cert_chain_pems]),
            (key, [issued.private_key_pem.bytes()]),
        ):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(b"".join(blobs))
            fresh.chmod(0o644)
            fresh.rename(path)
        return cert, key

    def server(self, name: str, alpn: str, *, client_ca: Path | None = None) -> ssl.SSLContext:
        """A listener's context with a certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(name))
        context.set_alpn_protocols([alpn])
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
        return context

    def client(self, alpn: str, *, cert: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """A caller's context that trusts this authority, and shows ``cert`` when asked."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.file)
        context.set_alpn_protocols([alpn])
        if cert is not None:
            context.load_cert_chain(*cert)
        return context
