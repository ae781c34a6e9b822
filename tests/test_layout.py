"""The tree: packages by topic, each of which imports only those above it, and no import circle."""

import ast
import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MOST_MODULES = 20

# From the bottom to the top: a package imports those of the lines before its own. Packages of one line do not import
# each other.
LAYERS = (
    ("estimator.runtime",),
    ("estimator.storage", "estimator.porting"),
    ("estimator.core", "estimator.io", "estimator.tf_checkpoint"),
    ("estimator.variables",),
    ("estimator.sparse",),
    ("estimator.feature_column",),
    (
        "estimator.layers",
        "estimator.losses",
        "estimator.metrics",
        "estimator.nn",
        "estimator.summary",
        "estimator.optim",
        "estimator.regularizers",
        "estimator.image",
        "estimator.inputs",
        "estimator.interop",
        "estimator.multihost",
    ),
    ("estimator.heads", "estimator.hooks", "estimator.seq2seq", "estimator.steps", "estimator.train"),
    ("estimator.checkpoint",),
    ("estimator.export",),
    ("estimator.loop",),
    # The modules beside the packages (Estimator, train_and_evaluate, replication ...) and estimator.integrations, which
    # build on each other, without circles.
    ("estimator.*",),
    ("estimator.canned", "estimator.testing"),  # which is given replicate_model_fn, as it may not import it
    ("estimator",),
    ("replicate.towers",),
    ("replicate.cross_tower_ops", "replicate.placement"),
    ("replicate.runner",),
    ("replicate.block_sync",),
    ("replicate.*",),
    ("replicate.explain",),
    ("replicate",),
)


def modules():
    for package in ("estimator", "replicate"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports(path):
    """The modules of this project that a file imports: at its top, within functions, and for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.fixture(scope="module")
def arrows():
    """What each module imports of the others."""
    return {name: {other for other in imports(path) if other in MODULES} - {name} for name, path in MODULES.items()}


def package(module):
    """The entry of LAYERS that a module belongs to."""
    known = [name for layer in LAYERS for name in layer]
    parts = module.split(".")
    if module in ("estimator", "replicate"):
        return module
    topic = ".".join(parts[:2])
    return topic if topic in known else f"{parts[0]}.*"


LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def test_a_package_imports_only_what_is_below_it(arrows):
    wrong = [
        f"{module} imports {other}"
        for module, others in arrows.items()
        for other in others
        if package(module) != package(other) and LEVEL[package(other)] >= LEVEL[package(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_circle(arrows):
    waiting = {module: set(others) for module, others in arrows.items()}
    while free := [module for module, others in waiting.items() if not others]:
        for module in free:
            del waiting[module]
        for others in waiting.values():
            others.difference_update(free)
    assert not waiting, f"These modules import each other: {sorted(waiting)}"


PUBLIC = re.compile(r"estimator(\.[a-z]\w*)*$")


def test_replicate_uses_the_public_names_of_estimator_and_its_boundary_alone(arrows):
    """`replicate.explain` looks into both packages, and says so."""
    wrong = [
        f"{module} imports {other}"
        for module, others in arrows.items()
        if package(module).startswith("replicate") and package(module) != "replicate.explain"
        for other in others
        if other.startswith("estimator") and not PUBLIC.match(other)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_boundary_is_small():
    """15 names that make work shorter on both sides. For a new one, see first whether the work is on the wrong side."""
    text = (ROOT / "estimator" / "replication.py").read_text()
    names = ast.literal_eval(text.partition("__all__ = ")[2])
    assert len(names) <= 15
    others = "".join(path.read_text() for name, path in MODULES.items() if package(name).startswith("replicate"))
    for name in names:
        assert f"`{name}`" in text, f"the docstring does not say what {name} is for"
        assert re.search(rf"\b{name}\b", others), f"nothing in replicate uses {name}"


def test_no_folder_has_too_many_modules():
    count = collections.Counter(path.parent for path in [*MODULES.values(), *(ROOT / "tests").rglob("*.py")])
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in count.items() if n > MOST_MODULES}
    assert not crowded


def test_every_package_says_what_it_is():
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), name


def test_the_docstring_of_a_module_opens_with_a_noun_or_a_verb():
    clauses = r"(What|Which|Where|How|Whether|When|Of|In words)\b"
    docs = {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in MODULES.items()}
    assert not {name: doc.partition("\n")[0] for name, doc in docs.items() if re.match(clauses, doc)}


def test_every_layer_exists():
    assert {name for layer in LAYERS for name in layer if not name.endswith("*")} <= MODULES.keys()


def test_the_map_of_the_source_is_right():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| .* \| `(\S+\.py)` \| `(\w+)` \|$", text.partition("## Where is ...?")[2], re.M)
    assert 25 < len(rows) < 45  # mechanisms that names of files do not tell
    for file, name in rows:
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, f"{file} does not define {name}"


def test_no_two_files_of_tests_have_one_name():
    count = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, n in count.items() if n > 1]  # pytest imports each by its name alone


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
# TensorFlow's name of a layer, and what hooks see.
PARTICIPLES = {"embed", "reported", "preempted", "restored", "agreed"}


def test_functions_are_named_by_verbs():
    """A participle (`taken`, `_merged`) says neither what is done nor to what."""
    participle = re.compile(r"_?([a-z]+ed|taken|done|kept|given|known|shown|near|cut|held|at|found|made|drawn|told)")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {
        f"{module}.{node.name}": node.name
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, functions) and participle.fullmatch(node.name)
    }
    assert not [full for full, name in names.items() if name not in PARTICIPLES]


def test_the_frame_knows_no_feature_by_name():
    """A feature keeps what it learns in a class of its own (`Frame.notes`), or each one would add fields here."""
    classes = [node for node in TREES["estimator.core._frame"].body if isinstance(node, ast.ClassDef)]
    assert sum(isinstance(node, ast.AnnAssign) for each in classes for node in each.body) <= 40


def test_few_modules_compile():
    """The steps of all modes are compiled by `Program`; other programs are none of a step."""
    compiling = {module for module, path in MODULES.items() if re.search(r"\bjax\.jit\(", path.read_text())}
    assert len(compiling) <= 8, sorted(compiling)


def test_comments_say_why():
    """Four or more for 100 lines of code; whether they say why is for a reader to see."""
    comments = code = 0
    for module, path in MODULES.items():
        documented = set()
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if ast.get_docstring(node) is not None:
                    documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip() and number not in documented:
                is_comment = line.strip().startswith("#")
                code += not is_comment
                comments += is_comment or ("  # " in line and "noqa" not in line and "type: ignore" not in line)
    assert comments >= 0.04 * code
