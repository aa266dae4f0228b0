"""Stillhouse from Python: `from stillhouse import Client`; docs/python.md describes it."""

from service.client import ApiError, Client, ClientError, Unreachable

__all__ = ["ApiError", "Client", "ClientError", "Unreachable"]
