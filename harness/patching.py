"""Patch files: deliberate, named changes of an engine, applied and undone in its running workers.

A patch file is ordinary Python. It says what it changes in a module docstring, describes itself in `PATCH` (or
`PATCHES`, a family of graded strengths) and changes the engine in `apply`:

    \"\"\"Attention scores 6.9 % too large: the scale was derived from another head size.\"\"\"
    from harness.patching import Hooks, Patch
    from harness.sites import attention_layers

    PATCHES = [Patch(name=f"attention_scale_{f}", kind="fault", ..., parameters={"factor": f}) for f in (1.01, 1.069)]

    def apply(runner, factor):
        hooks = Hooks()
        for layer in attention_layers(runner):
            hooks.set(layer.impl, "scale", layer.impl.scale * factor)
        return hooks

`apply` is called in every worker with the loaded model runner and the patch's parameters as keyword arguments. It
returns a function that undoes it; `Hooks` is one, and it also counts how often its hooks were called, so that a
patch that never fired is noticed. Torch is not needed to load or list patches: files import it inside `apply`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from harness._data import data_folder
from harness.errors import LogitgateError, PatchError
from harness.types import Json

__all__ = ["Applied", "Hooks", "LoadedPatch", "Patch", "apply_patches", "list_patches", "load_patch"]

VALUES = {
    "kind": ("fault", "benign"),
    "phase": ("both", "prefill", "decode"),
    "severity": ("obvious", "subtle", "near-noise", "none"),
}
"""What these fields of a Patch may say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What a patch is and what it needs."""

    name: str  # unique; how `--patch NAME` finds it
    kind: str  # "fault" or "benign": a fault must be red, a benign variation must stay green
    site: str  # where in the engine: "rope.table", "attention.scale", "head.output"
    phase: str  # "both", "prefill" or "decode": which rows it can change
    source: str  # the public bug it replays ("vllm-project/vllm#1004"), or where the variation is normal
    summary: str  # what is wrong, in a sentence
    shows: str  # the statistic that should show it
    fault_class: str = ""  # class in patches/COVERAGE.md
    severity: str = "none"  # how plainly it shows in bf16: "obvious", "subtle" or "near-noise"; "none" if benign
    twin: bool = False  # bf16 noise hides it: it must be red in the float32 twin
    changes_rows: bool = True  # False: rows must stay bit-equal; read by whoever compares the recordings
    parameters: Json = field(default_factory=dict)  # keyword arguments of `apply`; part of the Build
    engine: Json = field(default_factory=dict)  # engine arguments it needs, as vLLM names them
    environment: Json = field(default_factory=dict)  # variables the engine's processes must start with
    requests: Json = field(default_factory=dict)  # request pattern it needs: see `harness.patterns`

    def __post_init__(self) -> None:
        for name, allowed in VALUES.items():
            if (value := getattr(self, name)) not in allowed:
                raise PatchError(f"patch {self.name}: {name} must be one of {', '.join(allowed)}, not {value!r}")


class Hooks:
    """Changes of an engine that can be undone; calling it undoes them, the last one first.

    `fired` counts calls of wrapped functions and, at once, each value set or tensor written: what is replaced in
    place cannot be missed by the engine. It says that the code was reached, not that a bit changed.
    """

    _started: list[Hooks] = []  # by the `apply` now running, so that its failure can be undone  # noqa: RUF012

    def __init__(self) -> None:
        self.fired = 0
        self._waiting: set[int] = set()
        self._undo: list[Callable[[], None]] = []
        Hooks._started.append(self)

    def wrap(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], *, counts: bool = True
    ) -> None:
        """Replace the function `owner.name` by `make(original)`, on this object alone.

        `counts=False` is for hooks that only look, whose calls say nothing about the change having been reached.
        """
        replacement = make(getattr(owner, name))
        hook = len(self._undo)
        if counts:
            self._waiting.add(hook)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.fired += counts
            self._waiting.discard(hook)
            return replacement(*args, **kwargs)

        self._assign(owner, name, counted)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to a value, on this object alone."""
        self._assign(owner, name, value)
        self.fired += 1

    def write(self, tensor: Any, values: Any) -> None:
        """Write values into a tensor in place (compiled code and captured graphs see it); undone bit for bit.

        `values` is broadcast and converted to the tensor's dtype. Keeps a copy of the tensor until undone.
        """
        saved = tensor.detach().clone()
        self._undo.append(lambda: tensor.data.copy_(saved))
        tensor.data.copy_(values)
        self.fired += 1

    def at_undo(self, action: Callable[[], None]) -> None:
        """Run something more when undone, before what was changed so far is put back."""
        self._undo.append(action)

    @property
    def silent(self) -> int:
        """Wrapped functions that count and were never called."""
        return len(self._waiting)

    def __call__(self) -> None:
        """Undo everything; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _assign(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        own = name in getattr(owner, "__dict__", {}) or not hasattr(type(owner), name)
        # What is inherited, a method say, is undone by uncovering it.
        restore = functools.partial(setattr, owner, name, original) if own else functools.partial(delattr, owner, name)
        setattr(owner, name, value)
        self._undo.append(restore)


@dataclass(frozen=True, slots=True)
class Applied:
    """A patch in force in one worker."""

    patch: Patch
    undo: Callable[[], None]

    @property
    def fired(self) -> int | None:
        """How often its hooks were called; None if it has none, or an undo of its own that cannot say."""
        return self.undo.fired if isinstance(self.undo, Hooks) else None

    @property
    def silent(self) -> int:
        """How many of its hooks were never called; 0 if it has none."""
        return self.undo.silent if isinstance(self.undo, Hooks) else 0


@dataclass(frozen=True, slots=True)
class LoadedPatch:
    """One patch of a loaded file. Only `reference` travels to a worker; the file is loaded again there."""

    patch: Patch
    path: Path
    sha256: str  # of the file
    function: Callable[..., Callable[[], None]] | None  # the file's `apply`; None: it only sets engine arguments
    doc: str  # the file's docstring

    @property
    def reference(self) -> str:
        """What `load_patch` takes to load exactly this patch: "FILE.py:NAME"."""
        return f"{self.path}:{self.patch.name}"

    def describe(self) -> Json:
        """What a Build keeps of it."""
        patch = self.patch
        return {"name": patch.name, "kind": patch.kind, "sha256": self.sha256, "parameters": dict(patch.parameters)}

    def apply(self, runner: Any) -> Applied:
        """Change the engine of this worker.

        Raises:
            PatchError: the patch's own code failed; what it had changed through `Hooks` is undone.
        """
        if self.function is None:
            return Applied(self.patch, lambda: None)
        Hooks._started = []
        try:
            undo = self.function(runner, **self.patch.parameters)
        except Exception as error:
            for hooks in reversed(Hooks._started):
                hooks()
            raise PatchError(f"patch {self.reference} could not be applied: {type(error).__name__}: {error}") from error
        finally:
            Hooks._started = []
        if not callable(undo):
            raise PatchError(f"patch {self.reference}: `apply` must return a function that undoes it, not {undo!r}")
        return Applied(self.patch, undo)


def apply_patches(patches: Sequence[LoadedPatch], runner: Any) -> tuple[tuple[Applied, ...], Callable[[], None]]:
    """Apply several patches in order; the function returned undoes them in reverse.

    Raises:
        PatchError: one failed; those before it are undone.
    """
    done: list[Applied] = []

    def undo() -> None:
        while done:
            done.pop().undo()

    try:
        for patch in patches:
            done.append(patch.apply(runner))
    except PatchError:
        undo()
        raise
    return tuple(done), undo


def load_patch(reference: str | Path) -> LoadedPatch:
    """Load one patch by the name of a packaged one, "FILE.py", or "FILE.py:NAME" for one of a family.

    Raises:
        PatchError: no such file or name, a file that does not load, or one that is not a patch file.
    """
    text = str(reference)
    if not text.endswith(".py") and ".py:" not in text:
        return _named(list_patches(), text, where="the packaged patches (`logitgate patches list` shows them)")
    file, _, name = text.partition(".py:") if ".py:" in text else (text[: -len(".py")], "", "")
    family = tuple(_load_file(Path(file + ".py")))
    if name:
        return _named(family, name, where=f"{file}.py")
    if len(family) > 1:
        names = ", ".join(p.patch.name for p in family)
        raise PatchError(f"{file}.py holds {len(family)} patches ({names}): say which, as {file}.py:NAME")
    return family[0]


def list_patches() -> tuple[LoadedPatch, ...]:
    """Every packaged patch, benign ones first, then by name. Imports neither torch nor vllm."""
    found = [p for path in sorted(data_folder("patches").glob("*.py")) for p in _load_file(path)]
    _refuse_duplicates(found, "the packaged patches")
    return tuple(sorted(found, key=lambda p: (p.patch.kind, p.patch.name)))


def _named(patches: Sequence[LoadedPatch], name: str, *, where: str) -> LoadedPatch:
    for patch in patches:
        if patch.patch.name == name:
            return patch
    raise PatchError(f"no patch named {name!r} in {where}")


def _load_file(path: Path) -> Iterator[LoadedPatch]:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PatchError(f"patch file {path} cannot be read: {error.strerror}") from error
    sha256 = hashlib.sha256(source).hexdigest()
    module = _execute(path, source, sha256)
    patches = _declared(module, path)
    function = getattr(module, "apply", None)
    for patch in patches:
        _check_function(function, patch, path)
        yield LoadedPatch(patch, path.resolve(), sha256, function, inspect.cleandoc(module.__doc__ or ""))


def _execute(path: Path, source: bytes, sha256: str) -> ModuleType:
    """Run exactly the bytes that were hashed; nothing is cached beside the file."""
    module = ModuleType(f"logitgate_patch_{path.stem}_{sha256[:12]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up there
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except LogitgateError as error:
        raise PatchError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:  # a file's own exit(0) must not read as a PASS
        raise PatchError(f"{path}: the patch file does not load: {type(error).__name__}: {error}") from error
    return module


def _declared(module: ModuleType, path: Path) -> Sequence[Patch]:
    single, family = getattr(module, "PATCH", None), getattr(module, "PATCHES", None)
    patches = family if family is not None else [single]
    if (single is None) == (family is None) or not all(isinstance(p, Patch) for p in patches) or not patches:
        raise PatchError(f"{path}: a patch file describes itself in PATCH = Patch(...) or PATCHES = [Patch(...), ...]")
    _refuse_duplicates(patches, str(path))
    return list(patches)


def _refuse_duplicates(patches: Sequence[Any], where: str) -> None:
    names = [getattr(p, "patch", p).name for p in patches]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PatchError(f"{where}: names must be unique, but these occur more than once: {', '.join(twice)}")


def _check_function(function: Any, patch: Patch, path: Path) -> None:
    if function is None and (patch.engine or patch.requests or patch.environment):
        return  # a configuration of the engine, nothing to change in a worker
    if not callable(function):
        raise PatchError(
            f"{path}: patch {patch.name} needs a function `apply(runner, ...)` that returns its undo "
            "(only a patch that sets engine arguments or a request pattern can do without)"
        )
    try:
        inspect.signature(function).bind(None, **patch.parameters)
    except TypeError as error:
        expected = ", ".join(["runner", *patch.parameters])
        raise PatchError(f"{path}: patch {patch.name} needs `apply({expected})`: {error}") from error
