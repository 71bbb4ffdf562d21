"""TLS contexts of service and client: TLS 1.2 at least, certificates from files, the client always verifies."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from kvcomm.errors import InvalidInput
from kvcomm.transfer.auth import check_private


def server_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """Context of a service.

    Args:
        certificate: PEM file of the certificate and those above it.
        key: PEM file of its private key, without a passphrase, readable by its owner only.
        client_authority: PEM file of authorities; if given, a client must show a certificate of one of them.

    Raises:
        InvalidInput: a file is missing, open to others (the key) or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        check_private(os.stat(key), key, "private key")
        context.load_cert_chain(certificate, key, password=_no_passphrase)
        if client_authority is not None:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"TLS files {certificate} and {key} cannot be used ({_reason(error)})") from None
    return context


def client_context(
    authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Context of a client, which checks the service's certificate and its name. There is no way to turn that off.

    Args:
        authority: PEM file of the authorities to trust, and of no others; None for the system's.
        certificate, key: PEM files to show to a service that asks for a certificate.

    Raises:
        InvalidInput: a file is missing, open to others (the key) or does not fit, or one of the pair is missing.
    """
    if (certificate is None) != (key is None):
        raise InvalidInput("a client's certificate needs its key and the other way round; pass both or neither")
    try:
        context = ssl.create_default_context(cafile=authority)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate is not None and key is not None:
            check_private(os.stat(key), key, "private key")
            context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"TLS file {authority or certificate} cannot be used ({_reason(error)})") from None
    return context


def _no_passphrase() -> str:
    raise InvalidInput("the private key has a passphrase, which nobody could type at a restart; use one without")


def _reason(error: OSError) -> str:
    return str(error.strerror or error)[:200]
