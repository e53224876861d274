"""The API server's side: two routes that tell, and the refusal of requests that ask for what cannot be.

    GET /v1/logitgate                      what the server would record
    GET /v1/logitgate/recordings/{name}    what became of a recording

Neither writes anything. They lie under /v1, so that `--api-key` guards them as it guards completions.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import Any

from harness import __version__
from harness.engine.describe import plain_arguments
from harness.engine.plugin import NAME, served_root
from harness.engine.requests import ARGUMENT
from harness.engine.wire import parse_ask, require_name
from harness.errors import UsageError

ROUTE = "/v1/logitgate"


class Endpoint:
    """An endpoint plugin as vLLM's `EndpointPlugin` protocol describes it."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._arguments: dict[str, Any] = {}

    def attach_router(self, app: Any) -> None:
        """Add the routes; without a root to record below they answer 404 like any unknown route."""
        if served_root():
            app.add_api_route(ROUTE, self.tell, methods=["GET"])
            app.add_api_route(ROUTE + "/recordings/{name}", self.tell_state, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take the engine, and look at every request before it is admitted."""
        self._engine = engine_client
        self._arguments = plain_arguments(vars(args))
        if served_root() and engine_client is not None:
            _admit(engine_client.input_processor)

    async def tell(self) -> Any:
        """What a client must know before it asks: the build, the shape of a row, the root's mark."""
        answer = await self._ask("served")
        return {"version": __version__, "arguments": self._arguments, **answer}

    async def tell_state(self, name: str) -> Any:
        """Where a recording stands."""
        from fastapi import HTTPException

        try:
            require_name(name)
        except UsageError as error:
            raise HTTPException(400, error.message) from None
        return await self._ask("state", name)

    async def _ask(self, call: str, *args: Any) -> Any:
        from fastapi import HTTPException

        answers = await self._engine.collective_rpc(f"logitgate_{call}", args=args)
        for answer in answers:
            if "error" in answer:
                raise HTTPException(500, answer["error"])
        return next((answer["ok"] for answer in answers if answer["ok"]), {})


def _admit(processor: Any) -> None:
    """Refuse a request whose argument is malformed or does not fit it: a 400, and the engine never sees it."""
    original = processor.process_inputs
    config = processor.vllm_config.model_config

    @functools.wraps(original)
    def process_inputs(*args: Any, **kwargs: Any) -> Any:
        request = original(*args, **kwargs)
        params = request.sampling_params
        argument = (getattr(params, "extra_args", None) or {}).get(ARGUMENT)
        if argument is not None:
            try:
                parse_ask(argument).require_fit(
                    prompt=request.prompt_token_ids,
                    max_tokens=params.max_tokens,
                    n=params.n,
                    vocab_size=config.get_vocab_size(),
                )
            except UsageError as error:
                from vllm.exceptions import VLLMValidationError

                raise VLLMValidationError(error.message, parameter="vllm_xargs") from None
        return request

    processor.process_inputs = process_inputs
    processor.process_inputs_async = _in_thread(process_inputs, processor)


def _in_thread(call: Any, processor: Any) -> Any:
    from vllm.utils.async_utils import make_async

    return make_async(call, executor=processor.renderer._executor)
