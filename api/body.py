"""A body that is a spec: its raw bytes, whatever the client calls them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

EXAMPLE = """\
name: precision-by-batch
task: {name: imdb, path: imdb, max_length: 128}
model: {name: mini}
length: {epochs: 1}
search:
  axes: {precision: [fp32, bf16], batch.global_size: [16, 32]}
seeds: [0, 1]
"""

SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The spec, in YAML or JSON, detected from the content. At most 1 MiB.",
        "content": {
            "application/yaml": {
                "schema": {"$ref": "#/components/schemas/ExperimentSpec"},
                "example": EXAMPLE,
            },
            "application/json": {
                "schema": {"$ref": "#/components/schemas/ExperimentSpec"},
                "example": {
                    "name": "one-run",
                    "task": {"name": "imdb", "path": "imdb"},
                    "model": {"name": "tiny"},
                },
            },
        },
    }
}
"""OpenAPI of the body, for `openapi_extra`."""


async def _body(request: Request) -> bytes:
    return await request.body()


SpecBody = Annotated[bytes, Depends(_body)]
