"""Who may ask, and how a refusal or an error is answered.

Each guard is an aiohttp middleware. A bearer token, when there is one to configure, is one more
guard in `guards`, before all handlers and after `errors_as_json`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from stockade.supervisor.scheduler.bodies import json_response
from stockade.supervisor.scheduler.errors import (
    ConflictError,
    NotFoundError,
    RequestError,
    SchedulerError,
    StoreError,
)
from stockade.supervisor.scheduler.settings import Network, Settings, plain_address

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: Final[dict[type[SchedulerError], int]] = {
    RequestError: 400,
    NotFoundError: 404,
    ConflictError: 409,
    StoreError: 503,
}


def guards(settings: Settings) -> list[Middleware]:
    """The guards in the order in which a request passes them."""
    return [errors_as_json, _known_peers(settings.allow_networks), _own_pages(settings)]


@web.middleware
async def errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answers every error as ``{"error": TEXT}`` with its status."""
    try:
        return await handler(request)
    except SchedulerError as error:
        status = _STATUS.get(type(error), 500)
        return json_response({"error": str(error)}, status=status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = json_response({"error": error.text or error.reason}, status=error.status)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer


def _known_peers(networks: tuple[Network, ...]) -> Middleware:
    """Lets in this host, and the networks that were allowed."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        address = plain_address(request.remote or "")
        if address is None or not (
            address.is_loopback or any(address in network for network in networks)
        ):
            raise web.HTTPForbidden(text=f"{request.remote} is not in --allow-networks")
        return await handler(request)

    return guard


def _own_pages(settings: Settings) -> Middleware:
    """Keeps other sites' pages in a browser on this host from submitting tasks.

    A browser sends Origin with whatever a foreign page posts. A page that had its own name resolve
    to this host would pass that check, so on a loopback listener the Host must be one of ours.
    """
    loopback_names = {"localhost", settings.host.lower()}

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        try:
            is_foreign = origin is not None and urlsplit(origin).netloc != request.host
            name = (urlsplit(f"//{request.host}").hostname or "").lower()
        except ValueError as error:
            raise web.HTTPForbidden(text=f"cannot read Host or Origin: {error}") from error
        if is_foreign:
            raise web.HTTPForbidden(text=f"requests from pages of {origin} are refused")
        if (
            not settings.allow_networks
            and name not in loopback_names
            and plain_address(name) is None
        ):
            raise web.HTTPForbidden(
                text=f"this scheduler is not called {name}. Use http://127.0.0.1"
            )
        return await handler(request)

    return guard
