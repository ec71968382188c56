"""Search for the code that a data set uses, and for the globals that this code reads. None of the code is run.

The search starts at a factory, a function, a class or an object. It follows the names in compiled code (dis), nested
functions, closures, decorators, classes with their methods and bases, and objects in globals. It searches only the
script and the user's other modules, and no modules of the standard library, of site-packages or of hetero.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from hetero.spec import DatasetFactory
from hetero.system.scripts import SCRIPT_MODULE

__all__ = ["SCRIPT_NAMES", "Key", "Place", "Reach", "is_user_class", "owner_key", "reach", "user_modules"]

SCRIPT_NAMES = ("__main__", "__mp_main__", SCRIPT_MODULE)
"""Names of the user's script in ranks, in torch's workers, and on endpoints (`hetero.dataplane.endpoint.script`)."""

_MAX_OBJECTS = 20_000
_MAX_ITEMS = 1_000
_MAX_MODULES = 2**16
_MAX_DEPTH = 4
_HETERO = str(Path(__file__).resolve().parents[2])
_ABSENT = object()
_TRANSPARENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_GLOBAL_LOADS = frozenset({"LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL", "LOAD_NAME"})
_SCALARS = (bool, bytes, complex, float, int, str, type(None))

Key: TypeAlias = tuple[object, str]
"""Key of a global or class attribute: the `owner_key` of its module or class, and its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A global of one of the user's modules, an attribute of one of the user's classes, or a value in a function.

    A function that a factory registers may hold values: an object with ``__call__`` and the object of a bound method
    have attributes, ``functools.partial`` has arguments, and other functions have defaults and variables of enclosing
    functions.
    """

    label: str
    """Label in messages and comparisons: ``SCALE`` in the script, ``module.SCALE`` elsewhere, ``collate_fn.scale``."""
    owner: Any
    """Namespace of the module, the class or object, a dictionary of the values, or the cell of a variable."""
    name: str
    """Name of the global, attribute or value."""
    codes: frozenset[tuple[str, int]] | None = None
    """File and first line of each method that runs when the registered function does. None for other places."""

    @property
    def key(self) -> Key:
        """Key that identifies the global or attribute in this process."""
        return owner_key(self.owner), self.name

    def value(self) -> Any:
        """Return the current value of the global or attribute.

        Raises:
            KeyError: If it no longer exists.
        """
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                raise KeyError(self.name) from None
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner))[self.name]


@dataclass(frozen=True, slots=True)
class Reach:
    """The code that a data set uses, and the names in this code."""

    places: dict[Key, Place] = field(default_factory=dict)
    """Globals and class attributes that the code reads."""
    codes: set[tuple[str, int]] = field(default_factory=set)
    """File and first line of every function in the code."""
    functions: list[CodeType] = field(default_factory=list)
    """The compiled code of these functions, except of those inside others."""
    namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Namespaces of the modules that contain these functions, by ``id``."""
    attributes: set[str] = field(default_factory=set)
    """All names in the code, among them the names of all attributes that it reads."""
    stored: set[Key] = field(default_factory=set)
    """Globals that the code assigns."""


def owner_key(owner: Any) -> object:
    """Return an identifier of an object: its ``id``, or for a module's namespace the prefix of the module's labels.

    All copies of a module's namespace have the same prefix. In torch's workers, the namespace of the script's functions
    is a copy of the namespace in ``sys.modules``.
    """
    if isinstance(owner, dict) and isinstance(name := owner.get("__name__"), str):
        return _prefix(name)
    return id(owner)


def reach(roots: Iterable[Any], *, without: Iterable[Any] = ()) -> Reach:
    """Return the code that ``roots`` use, and the names in this code. Takes a few milliseconds.

    Args:
        roots: Where the search starts.
        without: Functions that are left out, with what only they use.
    """
    walk = _Walk()
    for excluded in without:
        walk.leave_out(excluded)
    for root in roots:
        walk.push(root, 0)
    walk.run()
    return walk.found


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the script or in another of the user's modules."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ in SCRIPT_NAMES if module is None else _is_user(vars(module))


def user_modules() -> list[ModuleType]:
    """Return the script and the user's other modules that are imported."""
    modules: list[Any] = list(sys.modules.values())  # some libraries put None or other objects there
    return [each for each in modules if isinstance(each, ModuleType) and _is_user(vars(each))][:_MAX_ITEMS]


class _Walk:
    def __init__(self) -> None:
        self.found = Reach()
        self._queue: deque[tuple[Any, int]] = deque()
        self._seen: dict[int, Any] = {}  # keeps the visited objects alive, because a new object could reuse an id

    def push(self, value: Any, depth: int) -> None:
        if isinstance(value, _SCALARS) or id(value) in self._seen or len(self._seen) >= _MAX_OBJECTS:
            return
        self._seen[id(value)] = value
        self._queue.append((value, depth))

    def leave_out(self, value: Any) -> None:
        self._seen[id(value)] = value

    def run(self) -> None:
        while self._queue:
            self._visit(*self._queue.popleft())

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, ModuleType):
            return  # _scan visits the names of the module that the code reads
        elif isinstance(value, DatasetFactory):
            self._push_all((value.function, value.collate_fn, value.worker_init_fn, value.fingerprint), 0)
            self._note_values("collate_fn", value.collate_fn)
            self._note_values("worker_init_fn", value.worker_init_fn)
        elif isinstance(value, MethodType):
            self._push_all((value.__func__, value.__self__), depth)
        elif isinstance(value, property):
            self._push_all((value.fget, value.fset), depth)
        elif isinstance(value, functools.partial):
            self._push_all((value.func, value.args, value.keywords), depth)
        elif depth < _MAX_DEPTH:
            self._visit_object(value, depth + 1)

    def _push_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.push(value, depth)

    def _visit_object(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._push_all(list(value.values())[:_MAX_ITEMS], depth)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            self._push_all(list(value)[:_MAX_ITEMS], depth)
        elif isinstance(value, staticmethod | classmethod):
            self.push(value.__func__, depth)
        else:
            self.push(type(value), depth)
            try:
                attributes = list(vars(value).values())  # includes the function that a cached function wraps
            except Exception:  # noqa: BLE001 - no attributes, or one of the user's objects that computes them
                return
            self._push_all(attributes[:_MAX_ITEMS], depth)

    def _visit_class(self, kind: type) -> None:
        """Visit a class's own and inherited attributes. Visit overridden ones only if the class uses ``super()``."""
        names: set[str] = set()
        uses_super = False
        for each in kind.__mro__:
            if not is_user_class(each):
                continue
            prefix = _prefix(each.__module__)
            for name, value in list(vars(each).items()):
                if name in names and not uses_super:
                    continue
                names.add(name)
                self.push(value, 0)
                uses_super = uses_super or _uses_super(value)
                if not name.startswith(("__", "_abc_")) and not issubclass(each, enum.Enum):
                    self._note(Place(f"{prefix}{each.__qualname__}.{name}", each, name))

    def _visit_function(self, function: FunctionType) -> None:
        self.push(vars(function).get("__wrapped__"), 0)
        self._push_all(function.__defaults__ or (), 0)
        self._push_all((function.__kwdefaults__ or {}).values(), 0)
        for cell in function.__closure__ or ():
            try:
                self.push(cell.cell_contents, 0)
            except ValueError:  # the cell is still empty
                continue
        if _is_user(function.__globals__):
            self.found.namespaces[id(function.__globals__)] = function.__globals__
            self.found.functions.append(function.__code__)
            self._scan(function.__code__, function.__globals__, {})

    def _note_values(self, label: str, function: Any) -> None:
        """Record the values that a registered function holds."""
        owners: list[tuple[Any, Iterable[str]]] = []
        codes: frozenset[tuple[str, int]] = frozenset()
        if isinstance(function, functools.partial):
            self._note_values(label, function.func)
            arguments = {str(number): each for number, each in enumerate(function.args)}
            owners = [(each, each) for each in (function.keywords, arguments)]
        elif isinstance(function, FunctionType):
            parameters = inspect.signature(function).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            owners = [(defaults, defaults), *((cell, (name,)) for name, cell in cells)]
        else:
            holder = getattr(function, "__self__", function)
            codes = frozenset(_methods_of_call(type(holder), getattr(function, "__name__", "__call__")))
            owners = [(holder, getattr(holder, "__dict__", ()))]
        for owner, names in owners:
            for name in names:
                self._note(Place(f"{label}.{name}", owner, name, codes))

    def _scan(self, code: CodeType, namespace: dict[str, Any], modules: Mapping[str, ModuleType]) -> None:
        """Record the names that compiled code reads. ``modules`` are the imports of enclosing functions, by name."""
        self.found.codes.add((os.path.realpath(code.co_filename), code.co_firstlineno))
        self.found.attributes.update(code.co_names)
        imports = _Imports(namespace, dict(modules))
        value: Any = None  # value that the previous instruction left on the stack, if known
        for instruction in dis.get_instructions(code):
            operation, argument = instruction.opname, instruction.argval
            if operation in _TRANSPARENT:
                continue
            if operation in _GLOBAL_LOADS:
                value = self._read(namespace, argument)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                source = imports.source if operation == "IMPORT_FROM" else value
                is_known = isinstance(source, ModuleType) and _is_user(vars(source))
                value = self._read(vars(source), argument) if is_known else None
                if operation == "IMPORT_FROM":
                    imports.took(value)
            elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.found.stored.add((owner_key(namespace), argument))
                value = None
            else:
                value = imports.follow(operation, argument, value)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._scan(constant, namespace, imports.known)

    def _read(self, namespace: dict[str, Any], name: str) -> Any:
        """Record that code reads a name of a namespace, and return its value."""
        value = namespace.get(name, _ABSENT)
        if value is _ABSENT:
            return None
        if not isinstance(value, ModuleType) and not name.startswith("__"):
            self._note(Place(_prefix(namespace.get("__name__", "")) + name, namespace, name))
            self.push(value, 0)
        return value

    def _note(self, place: Place) -> None:
        if len(self.found.places) < _MAX_ITEMS:
            self.found.places.setdefault(place.key, place)


class _Imports:
    """The import statements of one function, and the local names of the imported modules."""

    def __init__(self, namespace: Mapping[str, Any], known: dict[str, ModuleType]) -> None:
        self.known = known
        self.source: ModuleType | None = None
        """Module of the current import statement."""
        self._package: str = namespace.get("__package__") or ""
        self._constants: list[Any] = []  # the last two constants: IMPORT_NAME's level and names
        self._names_parts = False  # whether the statement is `from a import b`, and not `import a.b as c`

    def follow(self, operation: str, argument: Any, value: Any) -> Any:
        """Return the value on the stack after an instruction, if it is a module."""
        if operation in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self._constants = [*self._constants[-1:], argument]
        elif operation == "IMPORT_NAME":
            self._names_parts = bool(self._constants and self._constants[-1])
            self.source = self._find(argument)
            return self.source
        elif operation in ("POP_TOP", "ROT_TWO", "SWAP"):
            return value if isinstance(value, ModuleType) else None  # `import a.b as c` drops a before it stores b
        elif operation in ("STORE_FAST", "STORE_DEREF"):
            self._store(argument, value)
        elif operation == "STORE_FAST_LOAD_FAST":
            self._store(argument[0], value)
            return self.known.get(argument[1])
        elif operation.startswith(("LOAD_FAST", "LOAD_DEREF")) and isinstance(argument, str):
            return self.known.get(argument)
        return None

    def took(self, value: Any) -> None:
        """Record the value that IMPORT_FROM left on the stack."""
        if not self._names_parts:
            self.source = value if isinstance(value, ModuleType) else None

    def _store(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType):
            self.known[name] = value

    def _find(self, name: str) -> ModuleType | None:
        """Return the module that IMPORT_NAME leaves on the stack, if it is imported."""
        level = self._constants[0] if len(self._constants) == 2 and type(self._constants[0]) is int else 0
        if level:
            try:
                name = importlib.util.resolve_name("." * level + name, self._package)
            except (ImportError, ValueError):
                return None
        elif not self._names_parts:
            name = name.partition(".")[0]  # `import a.b` binds a
        module = sys.modules.get(name)
        return module if isinstance(module, ModuleType) else None


def _methods_of_call(kind: type, method: str) -> set[tuple[str, int]]:
    """Return file and first line of a method, and of the methods whose names it contains."""
    found: dict[str, tuple[str, int]] = {}
    pending = [method]
    while pending:
        name = pending.pop()
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is not None and name not in found:
            found[name] = os.path.realpath(code.co_filename), code.co_firstlineno
            pending.extend(code.co_names)
    return set(found.values())


def _uses_super(value: Any) -> bool:
    """Return whether a method may call the method that it overrides."""
    function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return isinstance(code, CodeType) and ("super" in code.co_names or "__class__" in code.co_freevars)


def _prefix(module: str) -> str:
    return "" if module in SCRIPT_NAMES else f"{module}."


def _is_user(namespace: Mapping[str, Any]) -> bool:
    """Return whether a namespace belongs to the script, or to another module that the user wrote."""
    file = namespace.get("__file__")
    if namespace.get("__name__") in SCRIPT_NAMES:
        return not isinstance(file, str) or not _is_inside(os.path.realpath(file), (_HETERO,))
    return isinstance(file, str) and _is_user_file(file, _script_folder())


# All modules are looked at, one after the other. With fewer places than modules, no result would be found again.
@functools.lru_cache(maxsize=_MAX_MODULES)
def _is_user_file(file: str, script_folder: str | None) -> bool:
    path = _real_path(file)
    if _is_inside(path, (_HETERO,)):
        return False
    libraries = _libraries()
    below = path
    if script_folder is not None and _is_inside(path, (script_folder,)):
        # The script may be part of an installed package, and its folder may contain a virtual environment.
        below = path[len(script_folder) :]
        libraries = tuple(library for library in libraries if _is_inside(library, (script_folder,)))
    return not {"site-packages", "dist-packages"} & set(Path(below).parts) and not _is_inside(path, libraries)


@functools.lru_cache(maxsize=_MAX_MODULES)
def _real_path(file: str) -> str:
    return os.path.realpath(file)


def _script_folder() -> str | None:
    """Return the folder of the script, or None if the folder holds installed libraries."""
    for name in reversed(SCRIPT_NAMES):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            return _folder_of(file)
    return None


@functools.lru_cache(maxsize=16)
def _folder_of(file: str) -> str | None:
    folder = str(Path(file).resolve().parent)
    libraries = any(library == folder or library.startswith(folder + os.sep) for library in _libraries())
    return None if libraries else folder


@functools.cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({os.path.realpath(path) for name, path in sysconfig.get_paths().items() if name in names})


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)
