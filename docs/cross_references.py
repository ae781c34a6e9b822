"""Links a name such as `est.Hook` or `replicate_model_fn(...)` in the text of a page to its place in the reference.

The pages themselves have no such links, so that they read the same on GitHub. A name that the reference does not have
stays as it is: mkdocs-autorefs takes the mark away.
"""

import re

CODE = re.compile(
    r"^ *(```+|~~~+).*?^ *\1`*$"  # what stays: a block of code,
    r"|^#.*?$|^>>>.*?$|\[[^]]*\]\(|<a .*?</a>"  # a heading, an example, the text of a link
    r"|(?<!`)(?P<ticks>``+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
    r"|(?<!`)`(?P<name>[A-Za-z_][\w.]*)(?P<call>\([^`]*\))?`(?!`)"
    r"|(?<!`)`[^`]+`(?!`)",
    re.DOTALL | re.MULTILINE,
)
PREFIXES = {"est": "estimator", "estimator": "estimator", "replicate": "replicate"}
PLAIN = {
    "TOWER_AXIS": "replicate.TOWER_AXIS",
    "BlockSync": "replicate.BlockSync",
    "TowerOptimizer": "replicate.TowerOptimizer",
    "VariableDistribution": "replicate.VariableDistribution",
    "bmuf": "replicate.bmuf",
    "cross_tower_mean": "replicate.cross_tower_mean",
    "cross_tower_sum": "replicate.cross_tower_sum",
    "initialize_distributed": "replicate.initialize_distributed",
    "num_towers": "replicate.num_towers",
    "replicate_model_fn": "replicate.replicate_model_fn",
    "tower_index": "replicate.tower_index",
    "EstimatorSpec": "estimator.EstimatorSpec",
    "RunConfig": "estimator.RunConfig",
    "train_and_evaluate": "estimator.train_and_evaluate",
}


def identifier(name: str) -> str | None:
    """The name in the reference that a name in a text stands for."""
    first, _, rest = name.partition(".")
    if not rest:
        return PLAIN.get(name)
    return f"{PREFIXES[first]}.{rest}" if PREFIXES.get(first) else None


def linked(match: re.Match[str]) -> str:
    target = identifier(match["name"]) if match["name"] else None
    return f'<autoref optional identifier="{target}">{match[0]}</autoref>' if target else match[0]


def link(markdown: str) -> str:
    return CODE.sub(linked, markdown)
