"""Where chat templates run: jinja's immutable sandbox, with bounds on steps and sizes.

The sandbox keeps a template from reaching anything but what it is given. It does not keep it from looping over
`range(100000)` in `range(100000)`, nor from doubling a string in a loop: here every loop body and macro call is a step,
and whatever makes text or lists grow checks the size. What a model's authors wrote with Hugging Face's
transformers in mind runs unchanged: the same white-space rules, `raise_exception`, `strftime_now`, `tojson`,
`break` and `continue`, `{% generation %}`.

in     a template's source; variables
out    text
state  the steps and characters that are left for the running template
owner  the ChatTemplate that made it; one template runs at a time
ready  when `render` returns
end    with its last reference
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, Undefined, filters, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context
from jinja2.visitor import NodeTransformer

_MAX_NUMBER_BITS: Final = 256
_MAX_INDENT: Final = 16
_COMPILE_CHARS: Final = 1 << 20
"""Constant expressions are evaluated when a template is compiled."""

# Drawn by chance, for web pages, or makers of much from little, and in no chat template that we know of.
_DROPPED_FILTERS: Final = (
    *("batch", "center", "filesizeformat", "pprint", "random", "slice", "striptags", "sum", "urlize", "wordcount"),
    *("wordwrap", "xmlattr"),
)
# What looks at all items of a value, and may be given one that makes them as it goes.
_TAKING_APART: Final = ("dictsort", "groupby", "list", "max", "min", "sort", "unique")
_WEIGHED: Final = "weighed"
"""A filter that is put around lists and objects that a template makes."""
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{3}|\*)")
_WIDE_BRACES: Final = re.compile(r"\{[^{}]*:[^{}]*(?:[0-9]{3}|\{)")


class TemplateLimit(TemplateError):
    """The template took more steps, or made more text, than it may."""


def weight(value: object, limit: int) -> int:
    """Characters and values in a JSON tree, a value counting as 16 characters; stops counting beyond the limit.

    A value that stands in several places counts in each.
    """
    total = 0
    waiting = [value]
    while waiting and total <= limit:
        value = waiting.pop()
        total += 16
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return total


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one chat template."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=self._printed,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._steps_left = 0
        self._max_chars = _COMPILE_CHARS
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters |= {"join": self._join, "replace": self._replace, "indent": self._indent, "format": self._format}
        self.filters |= {"string": self._string, "tojson": self._tojson, _WEIGHED: self._weighed}
        self.filters |= {name: self._weighing(self.filters[name]) for name in _TAKING_APART}
        del self.globals["lipsum"]
        self.globals |= {"range": self._range, "raise_exception": _raise_exception}
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)

    def compile_template(self, source: str) -> tuple[nodes.Template, Template]:
        """The template's syntax tree as written, and the template ready to run. Raises TemplateError."""
        written = self.parse(source)
        bounded = _Bounded().visit(self.parse(source)).set_environment(self)
        return written, Template.from_code(self, self.compile(bounded), self.globals)

    def run(self, template: Template, variables: Mapping[str, object], max_steps: int, max_chars: int) -> str:
        """Render. Raises TemplateLimit, and whatever the template makes Python raise."""
        self._steps_left, self._max_chars = max_steps, max_chars
        try:
            return template.render(variables)
        finally:
            self._steps_left, self._max_chars = 0, _COMPILE_CHARS

    # -----------------------------------------------------------------------------------------------------------
    # Steps and sizes

    def step(self, steps: int = 1) -> None:
        """Called by the template at each loop body and macro."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TemplateLimit("the chat template runs through too many loops")

    def _fit(self, chars: int) -> None:
        if chars > self._max_chars:
            raise TemplateLimit(f"the chat template makes more than {self._max_chars} characters")

    def _weigh(self, value: object) -> None:
        """A list that holds another twice, and so on, is small and takes for ever to compare: so nothing gets heavier
        than what may be printed. A step for each kilobyte, since weighing takes its time too."""
        if not isinstance(value, str):
            total = weight(value, self._max_chars)
            self._fit(total)
            self.step(total >> 10)

    def _weighed(self, value: object) -> object:
        self._weigh(value)
        return value

    def _weighing(self, inner: Callable[..., object]) -> Callable[..., object]:
        """A filter that looks at all items of a value."""
        at = 1 if hasattr(inner, "jinja_pass_arg") else 0

        @functools.wraps(inner)
        def weighing(*given: Any, **named: Any) -> object:
            value = given[at]
            if isinstance(value, Iterable) and not isinstance(value, str | Mapping | list | tuple | range | Undefined):
                value = list(value)
            self._weigh(value)
            return inner(*given[:at], value, *given[at + 1 :], **named)

        return weighing

    def concat(self, parts: Iterable[str]) -> str:
        """What jinja joins printed text with: in the end, and for macros and `set` blocks."""
        taken, chars = [], 0
        for part in parts:
            chars += len(part)
            self._fit(chars)
            taken.append(part)
        return "".join(taken)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_NUMBER_BITS:
                raise TemplateLimit("the chat template computes with very large numbers")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._fit(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self._fit(len(many) * times)
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, list | tuple):
            self._weigh(made)
        return made

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._checked_method(owner, getattr(__obj, "__name__", ""), args)
        elif __obj is dict or isinstance(__obj, Macro):
            __self._weigh([args, kwargs])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(str(getattr(value, "__self__", ""))):
            raise TemplateLimit("the chat template formats text with a very large width")
        return wrapped

    def _checked_method(self, owner: str, name: str, args: tuple[object, ...]) -> tuple[object, ...]:
        """Methods of strings that make much from little."""
        match name, args:
            case "ljust" | "rjust" | "center" | "zfill", (int(width), *_):
                self._fit(width)
            case "expandtabs", (int(width), *_):
                self._fit(len(owner) + owner.count("\t") * width)
            case "replace", (str(old), str(new), *_):
                self._fit(len(owner) + owner.count(old) * len(new))
            case "join", (Iterable() as parts,):
                taken = [str(part) for part in parts]
                self._fit(sum(map(len, taken)) + len(owner) * len(taken))
                return (taken,)
            case "translate", _:
                raise TemplateLimit("the chat template uses str.translate, which is not available")
        return args

    def _check_percent(self, pattern: str, values: object) -> None:
        if _WIDE_PERCENT.search(pattern):
            raise TemplateLimit("the chat template formats text with a very large width")
        self._weigh(values)

    # -----------------------------------------------------------------------------------------------------------
    # Functions and filters

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.step(len(numbers))
        return numbers

    def _printed(self, value: object) -> object:
        if not isinstance(value, str | int | float | Undefined) and value is not None:
            self._weigh(value)
        return value

    def _string(self, value: object) -> str:
        self._weigh(value)
        return value if isinstance(value, str) else str(value)

    @pass_eval_context
    def _join(
        self, context: nodes.EvalContext, value: Iterable[object], d: str = "", attribute: str | int | None = None
    ) -> str:
        items = list(value) if attribute is None else list(map(filters.make_attrgetter(self, attribute), value))
        texts = [self._string(item) for item in items]
        self._fit(sum(map(len, texts)) + len(d) * len(texts))
        return d.join(texts)

    def _replace(self, value: object, old: str, new: str, count: int | None = None) -> str:
        text = self._string(value)
        self._fit(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _indent(self, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if (width if isinstance(width, int) else len(width)) > _MAX_INDENT:
            raise TemplateLimit("the chat template indents by more than 16")
        self._fit(len(value) + value.count("\n") * _MAX_INDENT)
        return filters.do_indent(value, width, first, blank)

    def _format(self, value: str, *args: object, **kwargs: object) -> str:
        self._check_percent(value, [*args, kwargs])
        return filters.do_format(value, *args, **kwargs)

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As in Hugging Face's transformers: no HTML escapes, and text stays readable."""
        self._weigh(value)
        if indent is not None and indent > _MAX_INDENT:
            raise TemplateLimit("the chat template indents by more than 16")
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        if not ensure_ascii:
            return text
        # Halves of surrogate pairs are the marks that stand for characters of a client's text (`chat`), not text.
        return re.sub("[^\0-\x7f\ud800-\udfff]", lambda char: json.dumps(char[0])[1:-1], text)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training. Here it is its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(NodeTransformer):
    """Puts a step before each loop body and macro, and writes `a ~ b` as an addition, which is intercepted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._stepping(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._stepping(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        line = node.lineno
        texts = [nodes.Filter(part, "string", [], [], None, None, lineno=line) for part in node.nodes]
        whole: nodes.Expr = texts[0]
        for text in texts[1:]:
            whole = nodes.Add(whole, text, lineno=line)
        return whole

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weighing(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # One that is stored to has names in it.
        return self._weighing(node, node.items if node.ctx == "load" else [])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weighing(node, [part for pair in node.items for part in (pair.key, pair.value)])

    def _weighing(self, node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        return nodes.Filter(node, _WEIGHED, [], [], None, None, lineno=node.lineno)

    def _stepping(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        line = node.lineno
        step = nodes.EnvironmentAttribute("step", lineno=line)
        call = nodes.Call(step, [], [], None, None, lineno=line)
        node.body.insert(0, nodes.ExprStmt(call, lineno=line))
        return node
