"""A Jinja2 environment in which a stranger's chat template can neither reach Python nor run away.

Jinja's own sandbox keeps templates away from Python's internals. This one also bounds what they may use up: passes
through loops and macros, text produced, sizes of lists and numbers, wall time, template length. Filters and string
methods whose cost is out of proportion to their input are absent. Loops and ``~`` are rewritten at compile time to
count; operators and calls are intercepted by Jinja.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_replace
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2.parser import Parser

MAX_SOURCE = 256 * 1024
"""Characters of a template."""
MAX_PASSES = 100_000
"""Passes through loop bodies and macros in one rendering."""
MAX_TEXT = 64 * 1024 * 1024
"""Characters produced in one rendering, intermediate strings included."""
MAX_ITEMS = 100_000
"""Items of a list that an operator makes."""
MAX_LITERAL = 50_000
"""Values in a list or dict literal, nested ones counted."""
MAX_INTEGER = 10_000
"""Largest integer argument of a filter (widths, precisions)."""
MAX_SECONDS = 10.0

# fmt: off
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select",
    "selectattr", "sort", "sum", "title", "trim", "truncate", "unique", "upper", "wordcount",
)
_REFUSED_STRING_METHODS = (
    "center", "encode", "expandtabs", "format", "format_map", "ljust", "maketrans", "rjust", "translate",
    "zfill",
)
# fmt: on
_COPYING = frozenset(("capitalize", "lower", "reverse", "trim", "truncate", "upper"))
"""Filters that make a string of their input's length."""
_ITERATING = frozenset(
    ("map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "sum", "title", "unique", "wordcount")
)
"""Filters that look at the items of their input one by one, the characters of a string too."""
ITEM = 8
"""Characters that an item of a list counts for: what its reference takes."""
VISIT = 32
"""Characters that an item counts for which a filter looks at: the time that takes."""
PIECE = 64
"""Characters that a string cut out of another counts for."""
_SAFE_TIME_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%])*", re.DOTALL)


class Refused(jinja2.TemplateError):
    """The template itself refused its input, through ``raise_exception``."""


class Budget:
    """What one rendering has used."""

    def __init__(self, kept: str = "") -> None:
        self.kept = kept
        self.passes = 0
        self.text = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def charge(self, passes: int, text: int) -> None:
        self.passes += passes
        self.text += text
        if self.passes > MAX_PASSES:
            raise SecurityError(f"it goes through loops and macros more than {MAX_PASSES:,} times")
        if self.text > MAX_TEXT:
            raise SecurityError(f"it produces more than {MAX_TEXT:,} characters")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} seconds")


_current: ContextVar[Budget | None] = ContextVar("chat template budget", default=None)


@contextmanager
def budget(kept: str = "") -> Iterator[None]:
    """Bounds everything a template does inside the block, in this thread or task.

    ``kept``: characters that ``tojson`` never writes as escapes.
    """
    token = _current.set(Budget(kept))
    try:
        yield
    finally:
        _current.reset(token)


def _charge(passes: int = 0, text: int = 0) -> None:
    spent = _current.get()
    if spent is not None:
        spent.charge(passes, text)


def _measure(value: Any, limit: int) -> int:
    """Characters the value takes when written out. Shared parts count each time, as they do when written."""
    todo, count, chars = [value], 0, 0
    while todo:
        item = todo.pop()
        count += 1
        if isinstance(item, Mapping):
            todo.extend(item.keys())
            todo.extend(item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, str):
            chars += len(item)
        elif not (item is None or isinstance(item, (bool, int, float, jinja2.Undefined))):
            chars += 64
        if count + len(todo) > limit:
            raise SecurityError(f"it makes a list or dict of more than {limit:,} values")
    return chars + 24 * count


def _text(value: Any) -> str:
    """``str(value)`` for what a template may write; everything else shows its type only."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, (bool, int, float, jinja2.Undefined)):
        return str(value)
    if isinstance(value, (list, tuple, dict)):
        _charge(text=_measure(value, MAX_ITEMS))
        return str(_plain(value))
    return f"<{type(value).__name__}>"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_plain(v) for v in value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return _text(value)


def _finalize(value: Any) -> Any:
    text = _text(value)
    _charge(text=len(text))
    return text


def _raise_exception(message: Any) -> None:
    raise Refused(_text(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200 or not _SAFE_TIME_FORMAT.fullmatch(format):
        raise SecurityError(f"strftime_now cannot use the format {format[:200]!r}")
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: no HTML escapes, non-ASCII characters as they are."""
    _charge(text=_measure(value, MAX_ITEMS))
    if isinstance(indent, int) and indent > 16:
        raise SecurityError(f"tojson cannot indent by {indent}")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii or text.isascii():
        return text
    spent = _current.get()
    kept = "" if spent is None else spent.kept
    return "".join(c if c.isascii() or c in kept else json.dumps(c)[1:-1] for c in text)


def _check_replace(text: str, old: str, new: str) -> None:
    grown = len(text) + (text.count(old) if old else len(text) + 1) * len(new)
    if grown > MAX_TEXT:
        raise SecurityError(f"replace would make more than {MAX_TEXT:,} characters")
    _charge(text=grown)


@jinja2.pass_eval_context
def _replace(eval_ctx: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    s, old, new = _text(s), _text(old), _text(new)
    _check_replace(s, old, new)
    return do_replace(eval_ctx, s, old, new, count)


def _join(value: Any, d: str = "", attribute: Any = None) -> str:
    if isinstance(value, str):
        _charge(text=ITEM * len(value))
    items = list(value)
    if attribute is not None:
        items = [item.get(attribute, "") if isinstance(item, Mapping) else "" for item in items]
    parts = [_text(item) for item in items]
    total = sum(len(p) for p in parts) + len(_text(d)) * len(parts)
    if total > MAX_TEXT:
        raise SecurityError(f"join would make more than {MAX_TEXT:,} characters")
    _charge(text=total)
    return _text(d).join(parts)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    s = _text(s)
    step = len(width) if isinstance(width, str) else width
    _charge(text=len(s) + (s.count("\n") + 1) * max(0, step))
    return do_indent(s, width, first, blank)


def _string(value: Any) -> str:
    return _text(value)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged for what it goes through and refusing huge integer arguments.

    ``wraps`` keeps Jinja's mark for context arguments.
    """
    start = 2 if hasattr(function, "jinja_pass_arg") else 1

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args[start:], *kwargs.values()):
            if isinstance(arg, int) and abs(arg) > MAX_INTEGER:
                raise SecurityError(f"a filter argument of {arg} is too large")
        value = args[start - 1] if len(args) >= start else None
        if isinstance(value, (str, list, tuple, dict, range)):
            if name in _ITERATING:
                _charge(text=VISIT * len(value))
            elif name == "list":
                _charge(text=ITEM * len(value))
            elif name in _COPYING:
                _charge(text=len(value))
        return function(*args, **kwargs)

    return call


def _check_split(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Charge for the pieces that ``text.split(…)`` or one of its kin is going to make."""
    separator = args[0] if name != "splitlines" and args else None
    if isinstance(separator, str) and separator:
        _charge(text=len(text) + PIECE * text.count(separator))
    else:  # at white space, which is counted as if half of the text were such
        _charge(text=4 * len(text))


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that Python treats specially."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            if not isinstance(name, str) or name.startswith("_"):
                raise SecurityError(f"a namespace cannot hold {name!r}")
        Namespace.__init__(self, values)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made: dict[Any, Any] = dict(*args, **kwargs)
    _charge(text=_measure(made, MAX_LITERAL))
    return made


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training targets; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Count(NodeTransformer):
    """Makes the parsed template report its passes, its concatenations and its literals."""

    def _call(self, name: str, args: list[nodes.Expr], like: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
        call.set_lineno(like.lineno)
        return call

    def _body(self, node: Any) -> Any:
        own = sum(len(child.data) for child in _own_text(node))
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._call("tick", [nodes.Const(own)], node))
        node.body.insert(0, tick.set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join_text", node.nodes, node)

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        return self._call("checked", [node], node)

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._call("sliced", [node.node, *ends], node)

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {node.attr!r}")
        return node


def _own_text(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    """Literal text inside a loop or macro, without that of loops and macros inside it, which count for themselves."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.TemplateData):
            yield child
        elif not isinstance(child, (nodes.For, nodes.Macro, nodes.CallBlock)):
            yield from _own_text(child)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of every chat template. Compiled templates may be rendered from any thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], finalize=_finalize
        )
        self.filters = {name: _bounded(name, self.filters[name]) for name in _FILTERS}
        indent = _bounded("indent", _indent)
        self.filters.update(tojson=_to_json, replace=_replace, join=_join, indent=indent, string=_string, safe=_string)
        self.globals = {
            "range": self.globals["range"],
            "dict": _make_dict,
            "namespace": _SafeNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def template(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """Compile; also the variables it may look up from outside. Raises whatever Jinja raises for a template that
        it cannot read."""
        with budget():
            parsed = self.parse(source)
            names = frozenset(jinja2.meta.find_undeclared_variables(parsed)) - self.globals.keys()
            tree = _Count().visit(parsed)
            tree.set_environment(self)
            return jinja2.Template.from_code(self, self.compile(tree), self.globals), names

    def tick(self, text: int) -> None:
        _charge(passes=1, text=text)

    def join_text(self, *values: Any) -> str:
        parts = [_text(v) for v in values]
        _charge(text=sum(len(p) for p in parts))
        return "".join(parts)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            count = len(range(len(value))[start:stop:step])
            _charge(text=count if isinstance(value, str) else ITEM * count)
        return value[start:stop:step]

    def checked(self, value: Any) -> Any:
        _charge(text=_measure(value, MAX_LITERAL))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self._check_sum(left, right)
        elif operator in ("*", "**"):
            self._check_product(operator, left, right)
        elif isinstance(left, str):
            raise SecurityError("strings cannot be formatted with %; use ~")
        return super().call_binop(context, operator, left, right)

    def _check_sum(self, left: Any, right: Any) -> None:
        if isinstance(left, str) and isinstance(right, str):
            _charge(text=len(left) + len(right))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            if len(left) + len(right) > MAX_ITEMS:
                raise SecurityError(f"it makes a list of more than {MAX_ITEMS:,} items")
            _charge(text=len(left) + len(right))

    def _check_product(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(right, (str, list, tuple)):
            left, right = right, left
        if isinstance(left, str) and isinstance(right, int):
            if len(left) * right > MAX_TEXT:
                raise SecurityError(f"it repeats a string to more than {MAX_TEXT:,} characters")
            _charge(text=len(left) * max(0, right))
        elif isinstance(left, (list, tuple)) and isinstance(right, int):
            if len(left) * right > MAX_ITEMS or right > 1000:
                raise SecurityError(f"it repeats a list to more than {MAX_ITEMS:,} items")
            _charge(text=_measure(left, MAX_LITERAL) * max(0, right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 4096:
                raise SecurityError("it computes a number of more than 4096 bits")

    def wrap_str_format(self, value: Any) -> Any:
        if getattr(value, "__name__", "") in ("format", "format_map") and isinstance(
            getattr(value, "__self__", None), str
        ):
            raise SecurityError("strings cannot be formatted with .format(); use ~")
        return None

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it may not use the attribute {attribute!r} of a {type(obj).__name__}")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(obj, "__name__", "")
            if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
                _check_replace(owner, args[0], args[1])
            elif name == "join" and len(args) == 1:
                if isinstance(args[0], str):
                    _charge(text=ITEM * len(args[0]))
                return _join([*args[0]], owner)
            elif name in ("split", "rsplit", "splitlines"):
                _check_split(owner, name, args)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            _charge(text=len(result))
        return result
