"""Where to look first: the couplings of the package, largest first. It judges nothing and fails nothing.

    make map                              the ten largest of each list
    python -m tests.map --top 30          more of them
    python -m tests.map --field min_p     the files that name a field

Reads source only, imports nothing of the package. What to do with its lists: CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "streamserve"
FIELDS = ("min_p", "latency_class", "prompt_logprobs", "ignore_eos")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One source file and its syntax tree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.name = str(path.relative_to(ROOT))
        self.dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        nodes = list(ast.walk(self.tree))
        self.classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        # A name that the file imports -> the module and the name it comes from.
        self.origins = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def read_modules() -> list[Module]:
    """Return every source file of the package, tests and migrations excluded."""
    return [Module(path) for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts]


def rooms(modules: list[Module]) -> Iterator[tuple[int, str]]:
    """Yield (lines, room and its files) for each folder."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module in modules:
        folder = str(module.path.parent.relative_to(ROOT))
        lines[folder] += module.num_lines
        files[folder] += module.num_lines > 0
    return ((count, f"{folder}/ in {files[folder]} files") for folder, count in lines.items())


def imports(modules: list[Module]) -> dict[str, set[str]]:
    """Return the modules of ours that each module imports, those under TYPE_CHECKING and inside functions too."""
    known = {module.dotted for module in modules}
    out: dict[str, set[str]] = {}
    for module in modules:
        names = set(_imported(module))
        found = {name if name in known else name.rpartition(".")[0] for name in names - {"streamserve.__version__"}}
        out[module.dotted] = (found & known) - {module.dotted}
    return out


def _imported(module: Module) -> Iterator[str]:
    parents = module.path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*parents[: -node.level], node.module or ""]) if node.level else str(node.module)
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or by others (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                out.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(out, key=len, reverse=True)


def classes(modules: list[Module]) -> Iterator[tuple[int, str]]:
    """Yield (attributes, name and methods) of each class, what it inherits from classes of ours counted in."""
    known = {(module.dotted, node.name): (module, node) for module in modules for node in module.classes}
    for module, node in known.values():
        family = list(_family(module, node, known))
        attributes = set().union(*(_attributes(each) for each in family))
        methods = {item.name for each in family for item in each.body if isinstance(item, _Function)}
        yield len(attributes), f"attributes, {len(methods)} methods: {node.name} ({module.name})"


def _family(
    module: Module, node: ast.ClassDef, known: dict[tuple[str, str], tuple[Module, ast.ClassDef]]
) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        name = ast.unparse(base)
        found = known.get((module.dotted, name)) or known.get(module.origins.get(name, ("", "")))
        if found is not None:
            yield from _family(*found, known)


def _attributes(node: ast.ClassDef) -> set[str]:
    annotated = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    stores = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store))
    return fields | {item.attr for item in stores if isinstance(item.value, ast.Name) and item.value.id == "self"}


def helpers(modules: list[Module]) -> Iterator[tuple[int, str]]:
    """Yield (private functions that are named once besides their definition, file)."""
    for module in modules:
        names = [node.name for node in ast.walk(module.tree) if isinstance(node, _Function)]
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        alone = [name for name in private if len(re.findall(rf"\b{name}\b", module.text)) == 2]
        if alone:
            yield len(alone), f"of {len(private)} private functions have one caller: {module.name}"


def naming(modules: list[Module], field: str) -> list[str]:
    """Return the files whose text names the field."""
    return [module.name for module in modules if re.search(rf"\b{field}\b", module.text)]


def show(title: str, rows: Iterable[tuple[int, str]], top: int) -> None:
    """Print the `top` largest rows."""
    print(f"\n{title}")
    for number, text in sorted(rows, reverse=True)[:top]:
        print(f"  {number:6,}  {text}")


def main() -> None:
    """Print the lists."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make map | head` ends in silence
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=10, help="rows of each list (10)")
    parser.add_argument("--field", help="list the files that name this field, and nothing else")
    arguments = parser.parse_args()
    modules = read_modules()
    if arguments.field:
        print("\n".join(naming(modules, arguments.field)))
        return
    graph = imports(modules)
    users: defaultdict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            users[other].add(name)
    print(f"{len(modules)} files, {sum(module.num_lines for module in modules):,} lines")
    show("Lines per folder", rooms(modules), 99)
    show("Modules of ours that a file imports", ((len(v), k) for k, v in graph.items()), arguments.top)
    show("Files that import a module", ((len(v), k) for k, v in users.items()), arguments.top)
    show("Attributes of a class, with what it inherits", classes(modules), arguments.top)
    show("Private functions with one caller", helpers(modules), arguments.top)
    show("Files over 600 lines", ((m.num_lines, m.name) for m in modules if m.num_lines > 600), arguments.top)
    small = [module for module in modules if 0 < module.num_lines < 100]
    show("Files under 100 lines", ((m.num_lines, m.name) for m in small), len(small) if arguments.top > 10 else 0)
    print(f"  {len(small):6,}  files (--top 11 lists them)" if arguments.top <= 10 else "")
    show("Files that name a field", ((len(naming(modules, field)), field) for field in FIELDS), len(FIELDS))
    print("\nCircles of imports, those for types counted")
    for group in circles(graph):
        print(f"  {len(group):6,}  {' · '.join(name.removeprefix('streamserve.') for name in group)}")


if __name__ == "__main__":
    main()
