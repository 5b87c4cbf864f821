"""Survey of a version of vLLM that is not patched yet: which patches fit, and which names have moved or changed.

Reads Python files of two wheels or folders, and runs none of them.
"""

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from . import diff
from .pins import PatchError, Pin

HOPS = 5
"""Modules that re-export a name one from another, at most."""


@dataclass
class Tree:
    """The Python files of a vLLM: of a wheel or of a folder that has `vllm/`; `changed` replaces some."""

    path: Path
    changed: Mapping[str, bytes] = field(default_factory=dict)
    parsed: dict[str, ast.Module | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.archive = zipfile.ZipFile(self.path) if self.path.is_file() else None
        names = self.archive.namelist() if self.archive else (
            str(found.relative_to(self.path)) for found in (self.path / "vllm").rglob("*.py"))  # fmt: skip
        self.files = {name for name in names if name.startswith("vllm/") and name.endswith(".py")}
        if not self.files:
            raise PatchError(f"{self.path}: no Python files of vllm in it; give a wheel, or a folder that has vllm/")

    def read(self, name: str) -> bytes | None:
        if name not in self.files:
            return None
        if name in self.changed:
            return self.changed[name]
        return self.archive.read(name) if self.archive else (self.path / name).read_bytes()

    def module(self, name: str) -> tuple[str, ast.Module] | None:
        """File and syntax tree of a module, by its dotted name."""
        stem = name.replace(".", "/")
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file not in self.parsed:
                content = self.read(file)
                self.parsed[file] = None if content is None else ast.parse(content, file)
            if parsed := self.parsed[file]:
                return file, parsed
        return None

    def definition(self, module: str, name: str, hops: int = HOPS) -> ast.stmt | None:
        """The statement that defines a name, in the module or in one that it imports it from."""
        found = self.module(module)
        if found is None or not hops:
            return None
        file, parsed = found
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for statement in _statements(parsed.body):
            if name in _defined(statement):
                return statement
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if name == (alias.asname or alias.name):
                        parent = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
                        source = ".".join(part for part in (parent, statement.module) if part)
                        return self.definition(source, alias.name, hops - 1) or statement
        return None

    def modules_with(self, name: str) -> list[str]:
        """Modules that define a function or class of this name, or assign it, at the top."""
        pattern = re.compile(rb"^(?:(?:class|def|async def) %b\b|%b\s*[:=])" % (name.encode(), name.encode()), re.M)
        files = sorted(file for file in self.files if pattern.search(self.read(file) or b""))
        return [str(PurePosixPath(file).with_suffix("")).replace("/", ".").removesuffix(".__init__") for file in files]


def survey(pin: Pin, old: Tree, new: Tree, package: Path) -> Iterator[str]:
    """Lines of a report: `pin`'s series on `new`, and names that the patches and `package` use, `old` against `new`."""
    yield f"patches of {pin.version}:"
    touched: set[tuple[str, str]] = set()
    contents: dict[str, bytes | None] = {}
    patched: dict[str, bytes] = {}
    for name in pin.series():
        faults = []
        for change in diff.parse((pin.folder / name).read_bytes())[1]:
            content = contents.get(change.path, new.read(change.path))
            contents[change.path], found = place(change, content)
            faults += found
            before = patched.get(change.path) or old.read(change.path) or b""
            touched |= set(_enclosing(change, ast.parse(before, change.path)))
            try:
                patched[change.path] = diff.apply(change, before)
            except diff.DiffError as error:
                raise PatchError(f"{old.path} is not an unpatched vLLM {pin.version}: {error}") from error
        yield f"  {name}: {'; '.join(faults) or 'fits'}"
    imported, words = uses(package)
    for title, names in (
        ("names that they touch", touched),
        ("names that packed-kv imports", imported),
    ):
        differing = [(name, difference) for name in sorted(names) for difference in compare(old, new, *name, words)]
        yield f"{title}: {len(names)}, of which {len({name for name, _ in differing})} differ"
        for (module, name), difference in differing:
            yield f"  {module}.{name}: {difference}"


def place(change: diff.FileDiff, content: bytes | None) -> tuple[bytes | None, list[str]]:
    """The content with each hunk that fits at one place, whichever it is; and what does not fit, or fits elsewhere."""
    if content is None:
        return None, [f"{change.path} is gone"]
    lines, faults, moved = content.splitlines(keepends=True), [], 0
    for number, hunk in enumerate(change.hunks, 1):
        size = len(hunk.old)
        places = [i for i in range(len(lines) - size + 1) if tuple(lines[i : i + size]) == hunk.old]
        if len(places) == 1:
            lines[places[0] : places[0] + size] = hunk.new
            moved += places[0] != hunk.new_start
        else:
            why = "has no place" if not places else f"has {len(places)} places"
            faults.append(f"{change.path}: hunk {number} (line {hunk.old_start + 1}) {why}")
    if moved and not faults:
        faults.append(f"fits at other lines of {change.path}")
    return b"".join(lines), faults


def uses(package: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """(module, name) of all that the files of a package import from vLLM, and every word in their code."""
    names: set[tuple[str, str]] = set()
    words: set[str] = set()
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        words |= set(re.findall(r"\w+", text))
        for node in ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
                names |= {(node.module or "", alias.name) for alias in node.names}
    return names, words


def compare(old: Tree, new: Tree, module: str, name: str, words: set[str]) -> Iterator[str]:
    """Yield how a name of `old` differs in `new`. Of a class's members only those that are abstract or in `words`."""
    head, *member = name.split(".")
    before, after = (tree.definition(module, head) for tree in (old, new))
    if before is None or (after is None and new.module(f"{module}.{head}")):
        return  # made at run time, or a module
    if after is None:
        where = new.modules_with(head)
        yield f"moved to {', '.join(where[:3])}" if where else "is gone"
        return
    first, second = _members(before), _members(after)
    for key in sorted(first.keys() | second.keys()):
        wanted = key in member if member else not key or key in words
        label = f".{key} " if key and not member else ""
        if key not in second:
            if wanted:
                yield f"{label}is gone"
        elif key not in first:
            if "abstract" in second[key] and not member:
                yield f".{key} is new and abstract"
        elif first[key] != second[key] and wanted:
            less = [part for part in first[key] if part not in second[key]]
            more = [part for part in second[key] if part not in first[key]]
            yield f"{label}has {', '.join(more) or 'nothing new'}; no longer {', '.join(less) or 'this order'}"


def _members(node: ast.stmt) -> dict[str, list[str]]:
    """Arguments of a function (under ""), or of the methods of a class; the types of its fields."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {"": _arguments(node)}
    members = {}
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            members[part.name] = _arguments(part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            members[part.target.id] = [ast.unparse(part.annotation)]
    return members


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    parts = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    is_abstract = any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
    return [*(["abstract"] if is_abstract else []), *(ast.unparse(part) for part in parts if part)]


def _enclosing(change: diff.FileDiff, parsed: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, function, class or class.method) in which the hunks of a change lie, in the file before it."""
    module = change.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for hunk in change.hunks:
        changed = {hunk.old_start + 1 + i for i, line in enumerate(hunk.old) if line not in hunk.new}
        lines = changed or {hunk.old_start + 1 + len(hunk.old) // 2}
        for statement in parsed.body:
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            parts = [part for part in statement.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            inner = [part for part in parts if _spans(part, lines)] if isinstance(statement, ast.ClassDef) else []
            if inner:
                yield from ((module, f"{statement.name}.{part.name}") for part in inner)
            elif _spans(statement, lines):
                yield module, statement.name


def _spans(node: ast.stmt, lines: set[int]) -> bool:
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under `if` and `try` at its top, too."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody") if isinstance(statement, ast.If | ast.Try) else ():
            yield from _statements(getattr(statement, part, []))


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
