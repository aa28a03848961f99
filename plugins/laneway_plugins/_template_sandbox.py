"""The jinja2 sandbox that chat templates run in: it charges what they do, and follows what they write.

The code that jinja2 makes of a template is changed in a few places.  Constants and literal text are :class:`Traced`,
and operations that the sandbox has no hook for become calls of methods of this environment.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from markupsafe import Markup

from laneway_plugins import _template_work as work
from laneway_plugins._template_budget import Budget, OverBudget
from laneway_plugins._template_filters import EACH, SPEND, metered_filters, metered_tests
from laneway_plugins._written import Traced, concat, formatted, join, plain, spans_of, written

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}
NODES_A_STEP = 32
"""Nodes of a template's syntax tree that count as one step each time they run, such as constants and assignments."""
_HIDDEN_ARGUMENTS = ("_loop_vars", "_block_vars", "caller")


@final
class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one template.  Threads may render beside each other, each within the budget that it set."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    intercepted_unops = frozenset({"+", "-"})

    def __init__(self) -> None:
        # The whitespace rules are those under which the templates were written.  Constants are not folded: that would
        # be work that no budget sees.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.code_generator_class = _CodeGenerator
        self.finalize = self._finalize
        self.concat = self._concat  # type: ignore[method-assign]
        self.literals: list[str] = []
        self._now = threading.local()
        self.filters: dict[str, Any] = metered_filters(self)
        self.tests: dict[str, Any] = metered_tests(self)
        self._functions: dict[str, Any] = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")}
        self._functions["namespace"] = _Namespace
        self.globals = dict(self._functions)

    def offer(self, name: str, function: Callable[..., Any]) -> None:
        """Let templates call a function."""
        self._functions[name] = self.globals[name] = function

    @property
    def budget(self) -> Budget:
        """That of the rendering in this thread."""
        budget: Budget = self._now.budget
        return budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._now.budget = budget

    def literal(self, text: str) -> int:
        """The number of a text that stands in the template's source."""
        self.literals.append(written(text))
        return len(self.literals) - 1

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        def charged(items: nodes.Node, steps: int = 1) -> nodes.Filter:
            number = nodes.Const(steps, lineno=items.lineno)
            return nodes.Filter(items, EACH, [number], [], None, None, lineno=items.lineno)

        for scope in [source, *source.find_all(_SCOPES)]:
            _charge_body(scope)
        for loop in source.find_all(nodes.For):
            # The condition runs also for items that it leaves out.
            loop.iter = charged(loop.iter, 1 + _size([loop.test]) // NODES_A_STEP)
        calls: Iterable[Any] = source.find_all((nodes.Call, nodes.Filter, nodes.Test))
        for call in calls:
            if call.dyn_args is not None:
                call.dyn_args = charged(call.dyn_args)
        return super()._generate(source, name, filename, defer_init)

    # What the code of a template calls.

    @jinja2.pass_context
    def _finalize(self, context: jinja2.runtime.Context, value: Any) -> Any:
        """A value that is about to become text by ``str``."""
        work.charge_printing(self.budget, value)
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        some = parts if isinstance(parts, (list, tuple)) else list(parts)
        work.charge_joined(self.budget, some)
        return concat(some)

    def tilde(self, values: Sequence[Any]) -> str:
        """``a ~ b ~ c``."""
        for value in values:
            work.charge_printing(self.budget, value)
        return self._concat([str(value) for value in values])

    def compare(self, left: Any, operation: str, right: Any) -> Any:
        """One comparison."""
        if operation in ("in", "notin"):
            return self.contains(right, left) == (operation == "in")
        work.charge_equality(self.budget, left, right)
        return _COMPARISONS[operation](left, right)

    def compare_chain(self, left: Any, operations: Sequence[tuple[str, Callable[[], Any]]]) -> Any:
        """``a < b < c``: what comes later is worked out only if it matters."""
        result: Any = True
        for operation, get in operations:
            right = get()
            result = self.compare(left, operation, right)
            if not result:
                break
            left = right
        return result

    def contains(self, items: Any, item: Any) -> bool:
        """``item in items``."""
        if not isinstance(items, Iterator):
            work.charge_membership(self.budget, item, items)
            return item in items
        for other in items:
            work.charge_equality(self.budget, item, other)
            if other is item or other == item:
                return True
        return False

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``."""
        self.budget.spend(1 + (len(value) // 64 if hasattr(value, "__len__") else 0) + len(spans_of(value)))
        return value[start:stop:step]

    def key(self, key: Any) -> Any:
        """A key of a mapping that is written out."""
        work.charge_hash(self.budget, key)
        return key

    def getitem(self, obj: Any, argument: Any) -> Any:
        work.charge_hash(self.budget, argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.spend()
        return super().getattr(obj, attribute)

    def call_unop(self, context: jinja2.runtime.Context, operator: str, arg: Any) -> Any:
        self.budget.spend()
        return super().call_unop(context, operator, arg)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.spend()
        if operator in ("+", "-"):
            work.charge_sum(budget, left, right)
        elif operator == "*":
            work.charge_times(budget, left, right)
        elif operator == "**":
            work.charge_power(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            work.charge_percent(budget, left, right)
        return budget.sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.budget
        budget.spend(1 + len(args) + len(kwargs))
        values = kwargs
        if any(name in kwargs for name in _HIDDEN_ARGUMENTS):
            values = {name: value for name, value in kwargs.items() if name not in _HIDDEN_ARGUMENTS}
        # The sandbox wraps str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        subject, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(subject, (str, dict, list, tuple, int, float)):
            if name == "join" and len(args) == 1 and isinstance(args[0], str):
                args = (iter(args[0]),)
            args = tuple(budget.collect(arg) if isinstance(arg, Iterator) else arg for arg in args)
            if not work.charge_method(budget, subject, name, args, values):
                raise OverBudget(f"it calls {type(subject).__name__}.{name}, which templates do not get here")
            if name == "join" and isinstance(subject, str) and not isinstance(subject, Markup) and len(args) == 1:
                return budget.sized(join(subject, list(args[0])))
            result = super().call(__context, __obj, *args, **kwargs)
            if name == "format" and isinstance(subject, Traced):
                result = formatted(subject, plain(result), args, values)
            return budget.sized(result)
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = tuple(budget.each(arg) if isinstance(arg, Iterable) else arg for arg in args)
        elif isinstance(subject, jinja2.runtime.LoopContext):
            budget.measure(args)
        elif any(__obj is function for function in __self._functions.values()):
            if __obj in (dict, _Namespace):
                args = tuple(budget.collect(arg) if isinstance(arg, Iterator) else arg for arg in args)
                budget.measure(args)
        elif not isinstance(__obj, _FREE) and not isinstance(subject, jinja2.utils.Cycler):
            raise OverBudget(f"it calls {str(__obj)[:80]}, which templates do not get here")
        return budget.sized(super().call(__context, __obj, *args, **kwargs))


_SCOPES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
"""What may run more often than what is around it."""


def _charge_body(scope: Any) -> None:
    """Let each run of a body charge its own nodes, of which most charge nothing themselves."""
    steps = _size(scope.iter_child_nodes()) // NODES_A_STEP
    if steps:
        number = nodes.Const(steps, lineno=scope.lineno)
        scope.body.insert(0, nodes.ExprStmt(nodes.Filter(number, SPEND, [], [], None, None, lineno=scope.lineno)))


def _size(parts: Iterable[nodes.Node | None]) -> int:
    """The nodes of some parts of a template, without the bodies of the scopes in them."""
    count = 0
    left = [part for part in parts if part is not None]
    while left:
        node = left.pop()
        count += 1
        left.extend(node.iter_child_nodes(exclude=("body",) if isinstance(node, _SCOPES) else ()))
    return count


class _Namespace(jinja2.utils.Namespace):
    """As text it shows nothing of what is in it, which may be itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


_FREE = (
    jinja2.runtime.Macro,
    jinja2.runtime.BlockReference,
    jinja2.runtime.Undefined,
    jinja2.utils.Joiner,
)
"""What templates may call without more ado: what it does is charged where it is done."""


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Puts the calls into a template's code."""

    environment: Sandbox

    def visit_Const(self, node: nodes.Const, frame: jinja2.compiler.Frame) -> None:  # noqa: N802 - jinja2's name
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _literal(self, text: str) -> str:
        return f"environment.literals[{self.environment.literal(text)}]"

    def visit_Concat(self, node: nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.tilde((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if len(node.ops) == 1:
            self.write("environment.compare(")
            self.visit(node.expr, frame)
            self.write(f", {node.ops[0].op!r}, ")
            self.visit(node.ops[0].expr, frame)
            self.write(")")
            return
        self.write("environment.compare_chain(")
        self.visit(node.expr, frame)
        self.write(", (")
        for operation in node.ops:
            self.write(f"({operation.op!r}, lambda: ")
            self.visit(operation.expr, frame)
            self.write("), ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("{")
        for pair in node.items:
            self.write("environment.key(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - as its base declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
