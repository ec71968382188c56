"""Search for the code that a data set uses, and for the globals that this code reads. None of the code is run.

The search starts at a factory, a function, a class or an object. It follows the names in compiled code (dis), nested
functions, closures, decorators, classes with their methods and bases, and objects in globals. It searches only the
script and the user's other modules, and no modules of the standard library, of site-packages or of hetero.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from hetero.spec import DatasetFactory
from hetero.system.scripts import SCRIPT_MODULE

__all__ = ["SCRIPT_NAMES", "Place", "Reach", "is_user_class", "module_places", "reach", "user_modules", "value_places"]

SCRIPT_NAMES = ("__main__", "__mp_main__", SCRIPT_MODULE)
"""Names of the user's script in ranks, in torch's workers, and on endpoints (`hetero.endpoint.script`)."""

# Bounds of one search, because a global may be a registry with a library's whole tree of objects.
_MAX_OBJECTS = 20_000
_MAX_ITEMS = 1_000
_MAX_DEPTH = 4
_HETERO = str(Path(__file__).resolve().parents[2])
# Instructions that Python puts between the load of a module and the load of its attribute. They differ between
# versions.
_TRANSPARENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_GLOBAL_LOADS = frozenset({"LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL", "LOAD_NAME"})
_SCALARS = (bool, bytes, complex, float, int, str, type(None))


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
    function_code: frozenset[CodeType] | None = None
    """For a value in a registered function: code of the methods that a call of the function runs. It is empty for a
    function without an object. None for a global and for an attribute of a class."""

    def value(self) -> Any:
        """Return the current value of the global or attribute.

        Raises:
            KeyError: If the global or attribute no longer exists.
        """
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:  # the variable has not been assigned
                raise KeyError(self.name) from None
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner))[self.name]


@dataclass(frozen=True, slots=True)
class Reach:
    """The code that a data set uses, and the names in this code."""

    places: dict[str, Place] = field(default_factory=dict)
    """Globals and class attributes that the code reads, and values in registered functions, by label."""
    functions: list[CodeType] = field(default_factory=list)
    """Compiled code of the functions, except functions inside other functions."""
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Namespaces of the modules that contain these functions, by name of the module."""
    names: set[str] = field(default_factory=set)
    """All names in the code, among them the names of all attributes that it reads."""
    stored: set[str] = field(default_factory=set)
    """Labels of the globals that the code assigns."""


def reach(roots: Iterable[Any], *, without: Iterable[Any] = ()) -> Reach:
    """Return the code that ``roots`` use, and the names in this code. Takes a few milliseconds.

    Args:
        roots: Where the search starts.
        without: Functions that are left out, together with code that only these functions use.
    """
    walk = _Walk()
    for excluded in without:
        walk.leave_out(excluded)
    for root in roots:
        walk.push(root, depth=0)
    walk.run()
    return walk.found


def module_places(module: ModuleType) -> Iterator[Place]:
    """Yield the globals of one of the user's modules, and the attributes of its classes."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _class_places(value)
        elif not isinstance(value, ModuleType) and not name.startswith("__"):
            yield Place(_prefix(module.__name__) + name, vars(module), name)


def value_places(factory: DatasetFactory) -> Iterator[Place]:
    """Yield the values in the functions that a factory registers."""
    yield from _held_by("collate_fn", factory.collate_fn)
    yield from _held_by("worker_init_fn", factory.worker_init_fn)


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the script or in another of the user's modules."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ in SCRIPT_NAMES if module is None else _is_user(vars(module))


def user_modules() -> list[ModuleType]:
    """Return the script and the user's other modules that are imported."""
    # An endpoint imports the script as `SCRIPT_MODULE`. Its ``__main__`` is a program of hetero, whose globals may have
    # the same names as the script's. So leave out the script's other names there.
    left_out = set(SCRIPT_NAMES) - {SCRIPT_MODULE} if SCRIPT_MODULE in sys.modules else set()
    # Some libraries put None or other objects into sys.modules.
    modules: list[Any] = [module for name, module in list(sys.modules.items()) if name not in left_out]
    return [each for each in modules if isinstance(each, ModuleType) and _is_user(vars(each))][:_MAX_ITEMS]


class _Walk:
    """One search. Call `push` for each object where the search starts, and then `run`."""

    def __init__(self) -> None:
        self.found = Reach()
        self._queue: deque[tuple[Any, int]] = deque()
        """Objects to visit, each with its depth, see `push`."""
        # Keep the visited objects alive, because a new object could get the id of a freed one.
        self._seen: dict[int, Any] = {}
        self._user_modules = user_modules()

    def push(self, value: Any, depth: int) -> None:
        """Queue an object, unless it was visited, is a plain value, or too many were visited.

        ``depth`` is the number of objects on the way from the last function or class to this object.
        """
        if isinstance(value, _SCALARS) or id(value) in self._seen or len(self._seen) >= _MAX_OBJECTS:
            return
        self._seen[id(value)] = value
        self._queue.append((value, depth))

    def leave_out(self, value: Any) -> None:
        """Do not visit an object. It counts as visited already."""
        self._seen[id(value)] = value

    def run(self) -> None:
        """Visit all objects in the queue, and the objects that they lead to."""
        while self._queue:
            self._visit(*self._queue.popleft())

    def _visit(self, value: Any, depth: int) -> None:
        """Record the code and names of a value, and push the values that it leads to."""
        if isinstance(value, ModuleType):
            # Do not follow all names of a module. `_scan` follows those that the code reads.
            return
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, DatasetFactory):
            self._push_all((value.function, value.collate_fn, value.worker_init_fn, value.fingerprint), depth=0)
            for place in value_places(value):
                self._note(place)
        # Follow an object only to a bounded depth. A logger, for example, leads to all handlers of the program, and so
        # to code that the data set does not use.
        elif depth < _MAX_DEPTH:
            self._push_all(_parts(value), depth + 1)

    def _push_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.push(value, depth)

    def _visit_class(self, kind: type) -> None:
        """Visit a class's own and inherited attributes. Visit overridden methods only if the class uses ``super()``."""
        names: set[str] = set()
        uses_super = False
        for each in kind.__mro__:
            if not is_user_class(each):
                continue
            places = {place.name: place for place in _class_places(each)}
            for name, value in list(vars(each).items()):
                # Skip a method that a subclass overrides, because it may read a global that the data set never reads.
                if name in names and not uses_super:
                    continue
                names.add(name)
                self.push(value, depth=0)
                uses_super = uses_super or _uses_super(value)
                if name in places:
                    self._note(places[name])

    def _visit_function(self, function: FunctionType) -> None:
        """Visit the function inside a decorator, the defaults, the variables of enclosing functions, and the code."""
        self.push(vars(function).get("__wrapped__"), depth=0)
        self._push_all(function.__defaults__ or (), depth=0)
        self._push_all((function.__kwdefaults__ or {}).values(), depth=0)
        for cell in function.__closure__ or ():
            try:
                self.push(cell.cell_contents, depth=0)
            except ValueError:
                # The cell is still empty.
                continue
        namespace = function.__globals__
        if _is_user(namespace):
            self.found.modules[str(namespace.get("__name__"))] = namespace
            self.found.functions.append(function.__code__)
            self._scan(function.__code__, namespace, modules=())

    def _scan(self, code: CodeType, namespace: dict[str, Any], modules: Iterable[ModuleType]) -> None:
        """Record the names that compiled code reads. ``modules`` are the modules that enclosing functions import."""
        self.found.names.update(code.co_names)
        modules = list(modules)
        # The global, or the attribute of a module, that the previous instruction has loaded. None if it loaded neither.
        loaded: Any = None
        for instruction in dis.get_instructions(code):
            operation, argument = instruction.opname, instruction.argval
            # Python puts these instructions between the load of a module and the load of its attribute.
            if operation in _TRANSPARENT:
                continue
            if operation in _GLOBAL_LOADS:
                loaded = self._read(namespace, argument)
                continue
            # Follow attributes of modules only. For an object, `_visit_class` records all attributes of its class.
            if operation in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(loaded, ModuleType):
                loaded = self._read(vars(loaded), argument)
                continue
            loaded = None
            if operation == "IMPORT_NAME":
                modules.extend(self._imported(argument, namespace))
            elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.found.stored.add(_prefix(namespace.get("__name__", "")) + argument)
        # A module that a function imports is a local variable of the function. So any name in the function may be an
        # attribute of the imported module. If the attribute is a module too, the loop appends it to the list that it
        # iterates over, and visits it later.
        for module in modules:
            values = [self._read(vars(module), name) for name in code.co_names]
            modules.extend(each for each in values if isinstance(each, ModuleType) and each not in modules)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._scan(constant, namespace, modules)

    def _imported(self, name: str, namespace: Mapping[str, Any]) -> Iterator[ModuleType]:
        """Yield the user's modules that an import statement may mean. The name may be relative to a package."""
        # `from . import settings` has an empty name, and reads `settings` from the package. `import a.b` makes `a` a
        # local variable, so it may mean `a` too.
        names = (name or namespace.get("__package__"), name.partition(".")[0])
        for module in self._user_modules:
            if module.__name__ in names or module.__name__.endswith(f".{name}"):
                yield module

    def _read(self, namespace: dict[str, Any], name: str) -> Any:
        """Record that code reads a name of a namespace, if it belongs to the user. Return its value, or None."""
        if name not in namespace or name.startswith("__") or not _is_user(namespace):
            return None
        value = namespace[name]
        if not isinstance(value, ModuleType):
            self._note(Place(_prefix(namespace.get("__name__", "")) + name, namespace, name))
            self.push(value, depth=0)
        return value

    def _note(self, place: Place) -> None:
        """Record a place that the code reads, unless too many are recorded."""
        if len(self.found.places) < _MAX_ITEMS:
            self.found.places.setdefault(place.label, place)


def _parts(value: Any) -> list[Any]:
    """Return the objects that an object holds and may call, and its class."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return list(value.values())[:_MAX_ITEMS]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)[:_MAX_ITEMS]
    try:
        # The attributes include the function that a cached function wraps.
        attributes = list(vars(value).values())
    except Exception:  # noqa: BLE001 - no attributes, or one of the user's objects that computes them
        attributes = []
    return [type(value), *attributes[:_MAX_ITEMS]]


def _class_places(kind: type) -> Iterator[Place]:
    """Yield the attributes that a class itself has. Skip an enumeration, because its attributes are constants."""
    if not issubclass(kind, enum.Enum):
        for name in list(vars(kind)):
            # Skip attributes that Python itself adds, for example `_abc_impl` to an abstract class.
            if not name.startswith(("__", "_abc_")):
                yield Place(f"{_prefix(kind.__module__)}{kind.__qualname__}.{name}", kind, name)


def _held_by(label: str, function: Any) -> Iterator[Place]:
    """Yield the values that a registered function holds.

    These are the arguments of a partial, the defaults and enclosing variables of a function, or the attributes of the
    object of a bound method or of an object with ``__call__``.
    """
    # Pairs of an object that has values (a dictionary, the cell of a variable, or the user's object) and their names.
    owners: list[tuple[Any, Iterable[str]]] = []
    # Code that may change these values as attributes of ``self``. A partial and a plain function have no such code.
    function_code: frozenset[CodeType] = frozenset()
    if isinstance(function, functools.partial):
        yield from _held_by(label, function.func)
        arguments = {str(number): each for number, each in enumerate(function.args)}
        owners = [(function.keywords, function.keywords), (arguments, arguments)]
    elif isinstance(function, FunctionType):
        parameters = inspect.signature(function).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        owners = [(defaults, defaults), *((cell, (name,)) for name, cell in cells)]
    else:
        user_object = getattr(function, "__self__", function)
        method_name = getattr(function, "__name__", "__call__")
        function_code = frozenset(_methods_of_call(type(user_object), method_name))
        owners = [(user_object, getattr(user_object, "__dict__", ()))]
    for owner, names in owners:
        for name in names:
            yield Place(f"{label}.{name}", owner, name, function_code)


def _methods_of_call(kind: type, method: str) -> set[CodeType]:
    """Return the code of a method, and of the methods whose names it contains."""
    pending, seen, found = [method], set[str](), set[CodeType]()
    while pending:
        name = pending.pop()
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is not None and name not in seen:
            seen.add(name)
            found.add(code)
            pending.extend(code.co_names)
    return found


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
    # The script belongs to the user, also without a file, as in a notebook. But a module of hetero may run as __main__.
    if namespace.get("__name__") in SCRIPT_NAMES:
        return not isinstance(file, str) or not _is_inside(os.path.realpath(file), (_HETERO,))
    return isinstance(file, str) and _is_user_file(file, _script_folder())


@functools.cache
def _is_user_file(file: str, script_folder: str | None) -> bool:
    """Return whether a file is the user's code, and not of hetero or of an installed library."""
    path = os.path.realpath(file)
    if _is_inside(path, (_HETERO,)):
        return False
    libraries = _libraries()
    path_below_script = path
    if script_folder is not None and _is_inside(path, (script_folder,)):
        # The script may be part of an installed package, so ignore the path to its folder.
        path_below_script = path[len(script_folder) :]
        # The folder may contain a virtual environment, so keep only the libraries in it.
        libraries = tuple(library for library in libraries if _is_inside(library, (script_folder,)))
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(path_below_script).parts))
    return not is_installed and not _is_inside(path, libraries)


def _script_folder() -> str | None:
    """Return the folder of the script. None without a file, or if the folder has installed libraries."""
    # Look for `SCRIPT_MODULE` before ``__main__``, because on an endpoint ``__main__`` is a program of hetero.
    for name in reversed(SCRIPT_NAMES):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            return _folder_without_libraries(file)
    return None


@functools.cache
def _folder_without_libraries(file: str) -> str | None:
    """Return the folder of a file. None if the folder contains installed libraries, as ``/usr/lib`` does."""
    folder = str(Path(file).resolve().parent)
    libraries = any(library == folder or library.startswith(folder + os.sep) for library in _libraries())
    return None if libraries else folder


@functools.cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({os.path.realpath(path) for name, path in sysconfig.get_paths().items() if name in names})


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)
