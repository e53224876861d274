"""A running vLLM server as its HTTP client sees it: what it would record, completions, and errors in plain words."""

from __future__ import annotations

import asyncio
import math
import os
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import httpx

from harness import __version__
from harness.engine.requests import ARGUMENT, ScoredRequest
from harness.engine.wire import Ask
from harness.errors import EngineError, UsageError

API_KEY = "LOGITGATE_API_KEY"
"""Environment variable with the server's API key: on a command line everyone on the machine could read it."""

_TIMEOUT = httpx.Timeout(10.0, read=900.0, pool=None)  # a long prompt on a slow engine is silent for minutes
_WAITS = (1.0, 2.0, 4.0)  # seconds before each new attempt
_BUSY = (429, 502, 503, 504)
_LEAST_LOGPROB = -9999.0  # what the server writes for -inf, which JSON does not have

_NOT_ASKED = (
    "does not record: start it with logitgate installed, VLLM_PLUGINS=logitgate and LOGITGATE_RECORDINGS=FOLDER in its "
    "environment (VLLM_PLUGINS must name every other plugin you use, too)"
)
_GONE = "What was recorded is kept; go on with --resume."


class Server:
    """One server. Use as an async context manager; leaving it drops what is in flight, and the server aborts that.

    Every method raises EngineError or UsageError saying what the server said, and what to do.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server is {url!r}: expected an address such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._reached = False
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        try:
            self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT, limits=limits)
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"--server {url}: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def facts(self) -> Any:
        """What the server would record: see `WorkerService.served` and `Endpoint.tell`."""
        response = await self._send("GET", "/v1/logitgate")
        if response.status_code == 404:
            raise EngineError(f"the server at {self.url} {_NOT_ASKED}")
        facts = self._value(response)
        if facts.get("version") != __version__:
            raise EngineError(
                f"the server at {self.url} has logitgate {facts.get('version')}, here is {__version__}: "
                "install the same version on both"
            )
        if "mark" not in facts:
            raise EngineError(f"the server at {self.url} cannot be recorded: {facts.get('refusal') or _NOT_ASKED}")
        return facts

    async def models(self) -> list[str]:
        """Names under which the server serves its model."""
        return [str(model["id"]) for model in self._value(await self._send("GET", "/v1/models"))["data"]]

    async def state(self, recording: str) -> Any:
        """What became of a recording's latest run: see `Recordings.state`."""
        return self._value(await self._send("GET", f"/v1/logitgate/recordings/{recording}"))

    async def complete(self, model: str, request: ScoredRequest, ask: Ask, *, prompt_logprobs: bool) -> Any:
        """Have a request served; the answer has the fields of vLLM's RequestOutput that the instrument check reads."""
        body = {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": len(request.forced),
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {ARGUMENT: ask.to_text()},
        }
        if prompt_logprobs:
            body["prompt_logprobs"] = 0
        elif request.scores_prompt:
            body["cache_salt"] = f"{ask.run}-{request.id}"[:1024]  # rows of a cached prefix are never computed
        return _as_output(self._value(await self._send("POST", "/v1/completions", body))["choices"][0], request)

    async def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        for wait in (*_WAITS, None) if self._reached else (None,):
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if wait is None:
                    what = str(error) or type(error).__name__
                    hint = f"check that it runs. {_GONE}" if self._reached else "start it, or check the address"
                    raise EngineError(f"the server at {self.url} does not answer ({what}): {hint}") from error
            else:
                self._reached = True
                if response.status_code not in _BUSY or wait is None:
                    return response
            await asyncio.sleep(wait)
        raise AssertionError  # the last attempt returns or raises

    def _value(self, response: httpx.Response) -> Any:
        """The JSON of a good answer."""
        status = response.status_code
        if status == 200:
            try:
                return response.json()
            except ValueError:
                raise EngineError(f"{response.url} answered with something that is not JSON: is it vLLM?") from None
        said = _message(response)
        if status == 401:
            raise UsageError(f"the server at {self.url} wants an API key: set {API_KEY} in the environment")
        if status == 404:
            raise UsageError(
                f"the server at {self.url} does not know this: {said}; it serves what {self.url}/v1/models lists"
            )
        if status < 500:
            raise EngineError(f"the server at {self.url} refused a request ({status}): {said}")
        raise EngineError(f"the server at {self.url} failed ({status}): {said}; see its log. {_GONE}")


def _message(response: httpx.Response) -> str:
    try:
        given = response.json()
        told = given.get("error", given.get("detail", given))
        return str(told.get("message", told) if isinstance(told, dict) else told)[:300]
    except (ValueError, AttributeError):
        return response.text[:300] or response.reason_phrase


def _as_output(choice: Any, request: ScoredRequest) -> Any:
    """A completion's choice in the shape of vLLM's own RequestOutput."""
    ids = choice["token_ids"]
    sampled = zip(ids, choice["logprobs"]["token_logprobs"], strict=True)
    prompt = choice.get("prompt_logprobs")
    completion = SimpleNamespace(token_ids=ids, logprobs=[{token: _entry(value)} for token, value in sampled])
    told = prompt and [{int(token): _entry(entry["logprob"]) for token, entry in (row or {}).items()} for row in prompt]
    return SimpleNamespace(outputs=[completion], prompt_logprobs=told)


def _entry(logprob: float) -> Any:
    return SimpleNamespace(logprob=-math.inf if logprob <= _LEAST_LOGPROB else logprob)
