"""How the code must look, where ruff has no rule for it. Every message names the remedy."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100

#: Where printing is the job.
PRINTS = (
    "kvtier/cli.py",
    "kvtier/cli/*",
    "engines/kvtier_engine/demo/*",
    "engines/kvtier_engine/fidelity/run.py",
    "benchmarks/*",
)
#: The border of the daemon process: what falls out here is logged and answered as an error.
#: The border of the process, of a thread that serves everybody, of an engine, and of optional code.
CATCHES_ALL = (
    "kvtier/daemon/server.py",
    "kvtier/daemon/run.py",
    "kvtier/daemon/local_server.py",
    "kvtier/client/local_attachment.py",
    "kvtier/packing/optional_code.py",
    "bindings/kvtier_sglang/border.py",
    "engines/kvtier_engine/guard.py",
    "tests/sglang/hicache_walks.py",
)
#: The only places that change the state or the generation of a page copy (a namespace has a
#: generation too, in a file of its own).
LIFECYCLE = ("kvtier/core/lifecycle.py", "kvtier/core/table.py", "kvtier/core/namespaces.py")
LIFECYCLE_NAMES = {"state", "state_np", "generation", "generation_np"}
#: What only some installations have: imported where it is used, so that the rest works without.
OPTIONAL = {
    "gguf", "matplotlib", "ml_dtypes", "mooncake", "numba", "prometheus_client", "safetensors",
    "tokenizers", "torch", "transformers", "triton", "ucxx", "vllm", "zmq",
}  # fmt: skip
#: Files that may import anything late, each for a reason.
IMPORTS_LATE = {
    "kvtier/__init__.py": "`import kvtier` loads neither grpc nor protobuf",
    "kvtier/client/aio.py": "the client's modules load neither grpc nor protobuf",
    "kvtier/cli.py": "`kvtier --help` loads neither the daemon nor the client",
    "kvtier/cli/*": "`kvtier --help` loads neither the daemon nor the client",
    "tests/*": "a test may look at what importing does",
}
BANNED_CALLS = {
    "eval": "parse the value with a parser of its own",
    "exec": "write the code down",
    "time.time": "time.monotonic, or the clock seam in core",
    "object.__setattr__": "dataclasses.replace, or a field that is not frozen",
    "yaml.load": "yaml.safe_load, or tomllib",
    "torch.load": "safetensors",
}
DRAWS = {
    "bytes", "choice", "choices", "getrandbits", "permutation", "rand", "randint", "randn",
    "randperm", "random", "randrange", "sample", "shuffle", "standard_normal", "uniform",
}  # fmt: skip
BANNED_MODULES = {
    "pickle": "msgpack or a fixed struct: unpickling runs code",
    "marshal": "msgpack or a fixed struct",
    "shelve": "a file format of its own",
    "dill": "msgpack or a fixed struct",
    "cloudpickle": "msgpack or a fixed struct",
}
# Put together from pieces, so that this file passes its own check.
LEFTOVERS = re.compile(r"\b(?:FIX" + r"ME|TO" + r"DO|XX" + r"X)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.<$}])/(?:root|work|home/\w+)/")
HOSTS = re.compile("|".join(["pypi[.]" + "org", "python" + "hosted", "npmjs[.]" + "org",
                             "debian[.]" + "org", "download[.]pytorch[.]" + "org"]))  # fmt: skip


@cache
def tracked(pattern: str) -> list[str]:
    """Files of the repository (committed or about to be) by glob, without generated code."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = sorted(set(listing.stdout.splitlines()))
    return [
        name
        for name in names
        if fnmatch(name, pattern) and not name.startswith("kvtier/v1/") and (REPO / name).is_file()
    ]


@cache
def lines_of(name: str) -> list[str]:
    return (REPO / name).read_text(encoding="utf-8").splitlines()


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """Millions of nodes, all of which stay: to look through them again takes most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def trees() -> dict[str, ast.Module]:
    """Parsed when a test asks for them: every worker imports this module, one runs its tests."""
    with no_search_for_garbage():
        return {
            name: ast.parse((REPO / name).read_text(encoding="utf-8"), name)
            for name in tracked("*.py")
        }


def allowed(name: str, patterns: object) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@cache
def nodes_by_kind() -> dict[type[ast.AST], list[tuple[str, ast.AST]]]:
    """(file, node) of every node of all files, which are walked once."""
    found: dict[type[ast.AST], list[tuple[str, ast.AST]]] = {}
    all_trees = trees()
    with no_search_for_garbage():
        for name, tree in all_trees.items():
            for node in ast.walk(tree):
                found.setdefault(type(node), []).append((name, node))
    return found


def nodes(*kinds: type[ast.AST], but: object = ()) -> Iterator[tuple[str, ast.AST]]:
    """(file, node) of every node of these kinds, outside the files in `but`."""
    left_out = {name for name in trees() if allowed(name, but)}
    for kind, found in nodes_by_kind().items():
        if issubclass(kind, kinds):
            yield from (item for item in found if item[0] not in left_out)


def dotted(node: ast.AST) -> str:
    """ "time.time" for the expression time.time, "" for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def check(found: list[str], remedy: str) -> None:
    assert not found, remedy + "\n  " + "\n  ".join(found)


def test_files_hold_one_concept() -> None:
    counts = {name: len(lines_of(name)) for name in tracked("*.py")}
    found = [f"{name}: {count} lines" for name, count in counts.items() if count > LINES_MAX]
    check(found, f"over {LINES_MAX} lines: one concept a file, so move one of them out")


def test_functions_fit_on_a_page() -> None:
    found = []
    for name, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        length = node.end_lineno - node.lineno + 1
        if length > FUNCTION_LINES_MAX:
            found.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    check(found, f"over {FUNCTION_LINES_MAX} lines: give the parts names of their own")


def test_lines_fit_side_by_side() -> None:
    found = [
        f"{name}:{number}"
        for name in tracked("*.py")
        for number, line in enumerate(lines_of(name), 1)
        if len(line) > COLUMNS_MAX
    ]
    check(found, f"over {COLUMNS_MAX} columns: break the line (`make fmt`)")


def test_modules_say_what_they_promise() -> None:
    found = [name for name, tree in trees().items() if tree.body and not ast.get_docstring(tree)]
    check(found, "no module docstring: say what the module promises and which thread may call it")


def test_nothing_is_left_for_later() -> None:
    found = [
        f"{name}:{number}"
        for name in tracked("*.py")
        for number, line in enumerate(lines_of(name), 1)
        if LEFTOVERS.search(line)
    ]
    check(found, "a note to self: do it now, or raise NotImplementedYet with a remedy")


def test_errors_are_caught_by_name() -> None:
    found = []
    for name, node in nodes(ast.ExceptHandler, but=CATCHES_ALL):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = {dotted(kind) for kind in kinds if kind is not None} & {
            "Exception",
            "BaseException",
        }
        # Catching everything to undo something is fine when the same error goes on.
        goes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if (node.type is None or broad) and not goes_on:
            found.append(f"{name}:{node.lineno}")
    check(found, "bare or broad except: name the errors you can handle, or end with a bare `raise`")


def test_no_state_in_modules() -> None:
    found = [f"{name}:{node.lineno}" for name, node in nodes(ast.Global)]
    check(found, "`global`: hold the state in an object and pass it")


def test_no_printing() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, node in nodes(ast.Call, but=PRINTS)
        if dotted(node.func) == "print" and not name.startswith("tests/")
    ]
    check(found, "print: log.info with a stable event name")


@pytest.mark.parametrize("banned", sorted(BANNED_CALLS))
def test_banned_calls(banned: str) -> None:
    found = [
        f"{name}:{node.lineno}" for name, node in nodes(ast.Call) if dotted(node.func) == banned
    ]
    check(found, f"{banned}: use {BANNED_CALLS[banned]}")


def imports(node: ast.AST) -> list[str]:
    """The modules an import statement names, absolute ones only."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module]
    return []


def test_banned_modules() -> None:
    found = [
        f"{name}:{node.lineno} {module}: use {BANNED_MODULES[module.split('.')[0]]}"
        for name, node in nodes(ast.Import, ast.ImportFrom)
        for module in imports(node)
        if module.split(".")[0] in BANNED_MODULES and not name.startswith("tests/")
    ]
    check(found, "a module that must not be used")


def test_imports_stand_at_the_top() -> None:
    found = []
    for name, function in nodes(ast.FunctionDef, ast.AsyncFunctionDef, but=IMPORTS_LATE):
        for node in ast.walk(function):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            if any(module.split(".")[0] not in OPTIONAL for module in imports(node)):
                found.append(f"{name}:{node.lineno}")
    check(found, "import inside a function: move it up (only optional extras are imported late)")


def test_collecting_tests_does_not_load_transformers() -> None:
    """Every worker collects all tests: seconds and 100 MB each."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        for node in tree.body
        if any(module.split(".")[0] == "transformers" for module in imports(node))
        and name.startswith(("tests/", "benchmarks/"))
    ]
    check(found, "transformers at the top of a file: import it where it is used")


def test_only_the_lifecycle_changes_state() -> None:
    found = []
    for name, node in nodes(ast.Assign, ast.AugAssign, ast.AnnAssign, but=LIFECYCLE):
        if not name.startswith("kvtier/core/"):
            continue
        found += [f"{name}:{node.lineno} {what}" for what in lifecycle_changes(node)]
    check(found, "fire an event of core/lifecycle.py instead of assigning the state")


@pytest.mark.parametrize(
    ("statement", "seen"),
    [
        ("page.state = x", ["state"]),
        ("page.generation += 1", ["generation"]),
        ("table.state[row] = x", ["state"]),
        ("table.state[row]: int = x", ["state"]),
        ("self._table.state_np[rows] = x", ["state_np"]),
        ('table.column("state")[rows] = x', ["state"]),
        ('table.column("generation")[rows] |= x', ["generation"]),
        ("a, (b, table.state[1:2]) = x", ["state"]),
        ("[*page.state] = x", ["state"]),
        ("a = table.state[row]", []),
        ("states[table.state[row]] = x", []),
        ("state = x", []),
        ('table.column("tier")[rows] = x', []),
        ("table.state[row].lock = x", []),
    ],
)
def test_the_check_sees_every_way_to_assign(statement: str, seen: list[str]) -> None:
    (node,) = ast.parse(statement).body
    assert lifecycle_changes(node) == seen


def lifecycle_changes(node: ast.AST) -> list[str]:
    """The states and generations that an assignment writes, as attributes or columns."""
    targets = list(node.targets if isinstance(node, ast.Assign) else [node.target])
    found = []
    while targets:
        target = targets.pop(0)
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif isinstance(target, ast.Starred | ast.Subscript):
            targets.append(target.value)
        elif isinstance(target, ast.Attribute) and target.attr in LIFECYCLE_NAMES:
            found.append(target.attr)
        elif isinstance(target, ast.Call) and dotted(target.func).endswith(".column"):
            found += [
                word.value
                for word in target.args
                if isinstance(word, ast.Constant) and word.value in LIFECYCLE_NAMES
            ]
    return found


def test_skips_say_why() -> None:
    found = []
    for name, node in nodes(ast.Call):
        reason = dotted(node.func) in {"pytest.skip", "pytest.mark.skip", "pytest.mark.xfail"}
        if reason and not node.args and not any(word.arg == "reason" for word in node.keywords):
            found.append(f"{name}:{node.lineno}")
    check(found, "a skip without a reason: say why")


def test_every_draw_has_a_seed() -> None:
    """So that what failed once can fail again: no draw from what a whole process shares."""
    found = []
    for name, node in nodes(ast.Call):
        module, _, what = dotted(node.func).rpartition(".")
        keywords = {word.arg for word in node.keywords}
        shared = what in DRAWS and (
            module in ("random", "np.random") or (module == "torch" and "generator" not in keywords)
        )
        unseeded = what in ("default_rng", "Random") and not (node.args or keywords)
        if (shared or unseeded) and not name.startswith("kvtier/"):
            found.append(f"{name}:{node.lineno}")
    check(found, "a draw without a seed: pass a generator that has one")


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, HOSTS], ids=["machine paths", "hosts"])
def test_nothing_depends_on_one_machine(pattern: re.Pattern[str]) -> None:
    found = []
    for name in tracked("*"):
        try:
            text = (REPO / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # golden bytes
        found += [
            f"{name}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    check(found, "a path or host of one machine: take it from configuration or the environment")
