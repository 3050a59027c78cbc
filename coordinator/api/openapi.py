"""The OpenAPI 3.1 document, made from the endpoint records and the types they name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import is_typeddict

from coordinator.api.endpoints import Answer, Endpoint, Parameter
from mesh import network_resources, resources

_REF = "#/components/schemas/{model}"
_ERROR_TEXT = {
    HTTPStatus.UNAUTHORIZED: "No token, or a wrong one.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "What was asked for is not possible; the message names the field.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "A fault of the server.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The coordinator is being restarted; come back later (Retry-After).",
    HTTPStatus.NOT_FOUND: "There is no such thing.",
    HTTPStatus.FORBIDDEN: "This deployment does not allow it.",
    HTTPStatus.CONFLICT: "The present state does not allow this, or the name is taken.",
    HTTPStatus.TOO_MANY_REQUESTS: "It is asked too often; come back later.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is over the limit.",
    HTTPStatus.INSUFFICIENT_STORAGE: "The journal cannot be written; nothing was accepted.",
}
_ALWAYS_POSSIBLE = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


def build_document(endpoints: Iterable[Endpoint], *, version: str) -> dict[str, Any]:
    """The document for these endpoints."""
    _read_attribute_docstrings()
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gangmesh",
            "version": version,
            "summary": "Runs one training command on several machines as a gang.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": dict(sorted(schemas.items())),
        },
    }


def _read_attribute_docstrings() -> None:
    """Makes the docstrings under a TypedDict's keys their descriptions; the types need not know pydantic."""
    for value in (*vars(resources).values(), *vars(network_resources).values()):
        if is_typeddict(value):
            value.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True)


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": endpoint.operation, "summary": endpoint.summary}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    parameters += [_query_parameter(parameter) for parameter in endpoint.parameters]
    parameters += [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in (endpoint.headers or {}).items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.access == "open":
        operation["security"] = []
    if endpoint.body is not None:
        schema = _schema(endpoint.body, schemas, mode="validation")
        operation["requestBody"] = {
            "required": endpoint.body_required,
            "content": {"application/json": {"schema": schema}},
        }
    operation["responses"] = {
        **{str(int(answer.status)): _answer(answer, schemas) for answer in endpoint.answers[::-1]},
        **{str(int(status)): _failure(status, schemas) for status in (*_ALWAYS_POSSIBLE, *endpoint.errors)},
    }
    same_status = [answer for answer in endpoint.answers if answer.status == endpoint.answers[0].status]
    if len(same_status) > 1:
        content = {k: v for answer in same_status for k, v in _answer(answer, schemas)["content"].items()}
        operation["responses"][str(int(same_status[0].status))]["content"] = content
    return operation


def _query_parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    if parameter.smallest is not None:
        schema["minimum"] = parameter.smallest
    if parameter.largest is not None:
        schema["maximum"] = parameter.largest
    return {"name": parameter.name, "in": "query", "description": parameter.text, "schema": schema}


def _answer(answer: Answer, schemas: dict[str, Any]) -> dict[str, Any]:
    if answer.shape is None:
        schema: dict[str, Any] = {"type": "string"}
    else:
        schema = _schema(answer.shape, schemas, mode="serialization")
    content = {media: {"schema": schema} for media in answer.media}
    return {"description": answer.text, "content": content}


def _failure(status: HTTPStatus, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = _schema(resources.ErrorReply, schemas, mode="serialization")
    return {"description": _ERROR_TEXT[status], "content": {"application/json": {"schema": schema}}}


def _schema(shape: Any, schemas: dict[str, Any], *, mode: Any) -> dict[str, Any]:
    """A reference to the schema of this type; the schema itself and those it names go into `schemas`."""
    schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode=mode)
    schemas.update(schema.pop("$defs", {}))
    title = schema.get("title")
    if title is None:
        return schema
    schemas[title] = schema
    return {"$ref": _REF.format(model=title)}
