"""A typed client of the HTTP API: it returns the same records as the store, over the network."""

from service.client.client import Client, Ended, LoginRefused
from service.client.credentials import UnsafeCredentials
from service.client.wire import ApiError, ClientError, Unreachable
