"""Short questions to servers that an attempt started itself, over HTTP on this machine."""

import http.client
import json
import urllib.request
from typing import Any

# A proxy that the environment names must not get requests for this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Tell whether a URL answers 200."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as reply:
            return bool(reply.status == http.HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False


def fetch(url: str, timeout_s: float = 10.0) -> bytes | None:
    """Return what a URL answers, or None where it does not."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as reply:
            return bytes(reply.read())
    except (OSError, http.client.HTTPException):
        return None


def tell(url: str, timeout_s: float = 60.0) -> str | None:
    """POST `{}` to a URL and return a text that says what went wrong, None if nothing did.

    vLLM answers 200 and `{"success": false}` where it does not do what it is told. Any other answer is left.
    """
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})  # noqa: S310 - our own server
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            text = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return f"it answers {text.decode(errors='replace')}" if _refused(text) else None


def _refused(text: bytes) -> bool:
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("success") is False


def ask(url: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
    """Return the JSON that a URL answers, or a text that says what went wrong; `body` makes it a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own server
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            return json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
