"""Pictures of what is stored, for notebooks and reports: every function takes plain data and returns a `Picture`.

    prefixes    `prefix_tree`, `treemap`                                which prefixes are there, how big, how used
    use         `ages`, `reuse`, `occupancy`                            when blocks came, and whether they came back
    values      `norms`, `outliers`, `channels`, `distributions`, `similarity`
    precision   `fp8_cost`, and `fp8_errors`, the numbers behind it     what the KV would lose in eight bits

Tables are those of `NamespaceView.blocks()`, trees those of `NamespaceView.tree()`, arrays what a view's `.xarray()`
gives or any array of axes (layer, kv, token, head, dim); each module says what it looks at, so that anything else
that has it will do. Nothing here reads a tier, needs a display, or touches matplotlib's global state (`pyplot`,
`rcParams`): a `Picture` is a `matplotlib.figure.Figure` that a notebook shows by itself. Colours get darker with the
value, so that they can be told apart in grey.

What is empty (a tier without blocks) gives a picture that says so; what is no KV is a `ValueError`.
"""

from kvstore.inspect.pictures._paper import Picture
from kvstore.inspect.pictures.precision import FP8Errors, fp8_cost, fp8_errors
from kvstore.inspect.pictures.prefixes import prefix_tree, treemap
from kvstore.inspect.pictures.use import Table, ages, occupancy, reuse
from kvstore.inspect.pictures.values import channels, distributions, norms, outliers, similarity

__all__ = [
    "FP8Errors",
    "Picture",
    "Table",
    "ages",
    "channels",
    "distributions",
    "fp8_cost",
    "fp8_errors",
    "norms",
    "occupancy",
    "outliers",
    "prefix_tree",
    "reuse",
    "similarity",
    "treemap",
]
