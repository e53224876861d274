"""Engine arguments as vLLM names them, from the command line or as a mapping."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import UsageError

COMPARABLE: Mapping[str, Any] = {
    "enable_prefix_caching": False,  # a cached prefix makes other rows than a computed one
    "max_num_batched_tokens": 2048,  # the prompt pass holds chunk x vocabulary logits in f32, outside vLLM's profile
    "disable_log_stats": True,
}
"""Arguments a recording sets where the caller says nothing, so that two recordings differ by what was asked only."""


def parse_engine_args(tokens: Sequence[str]) -> dict[str, Any]:
    """Arguments given on a command line, by field name; nothing for what was not given.

    Raises UsageError, with vLLM's own words, for an unknown argument or a value it refuses.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"engine arguments: {message}; use the names `vllm serve --help` lists")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        given: dict[str, Any] = vars(parser.parse_args(list(tokens)))
    except argparse.ArgumentError as error:
        raise UsageError(f"engine arguments: {error}") from None
    for owned in ("model",):
        if owned in given:
            raise UsageError(f"--{owned} is not an engine argument here: name the model as the first argument")
    return given


def with_comparable_defaults(requested: Mapping[str, Any]) -> dict[str, Any]:
    """The requested arguments over `COMPARABLE`."""
    return {**COMPARABLE, **requested}


def make_config(model: str, arguments: Mapping[str, Any]) -> Any:
    """vLLM's own configuration object for the model and arguments. UsageError if vLLM refuses them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    fields = EngineArgs.__dataclass_fields__
    if (model.startswith((".", "/", "~")) or model.count("/") > 1) and not Path(model).is_dir():
        raise UsageError(f"model folder {model} does not exist; give a Hugging Face checkpoint folder or a hub id")
    unknown = sorted(set(arguments) - set(fields))
    if unknown:
        raise UsageError(f"unknown engine argument(s): {', '.join(unknown)}; use the field names of vLLM's EngineArgs")
    try:
        return EngineArgs(model=model, **arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except Exception as error:
        raise UsageError(f"vLLM refuses this configuration for {model}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The telling line of an exception: pydantic puts the reason on the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]
