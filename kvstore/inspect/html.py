"""What notebooks show of the views: small tables and folded trees, every text in them escaped, nothing loaded.

Colours are those of the page around them (borders and shades of its own text colour), so that light and dark fit.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvstore.inspect.axes import engine_of
from kvstore.inspect.summary import summaries
from kvstore.inspect.wording import age, counted, moment, short
from kvstore.url import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.inspect.block import BlockView
    from kvstore.inspect.inspection import Inspection
    from kvstore.inspect.namespace import NamespaceView
    from kvstore.inspect.prefix import PrefixView
    from kvstore.inspect.tree import PrefixTree, Run

__all__ = ["block_html", "inspection_html", "namespace_html", "prefix_html", "tree_html"]

MOST_RUNS = 200
"""Runs of a tree that a notebook is given."""
MOST_ROWS = 20
_BOX = "border:1px solid rgba(128,128,128,.4);border-radius:4px;padding:.4em .8em;display:inline-block;max-width:100%"
_HEAD = "font-weight:600;margin-bottom:.3em"
_DIM = "opacity:.7"
_CELL = "text-align:left;padding:.1em .8em .1em 0;vertical-align:top;border:0;background:none"
_TAG = "border:1px solid currentColor;border-radius:.7em;padding:0 .5em;font-size:.85em;opacity:.8"


def inspection_html(look: Inspection) -> str:
    """The tier: its namespaces with their counts."""
    sums = summaries(look.store)
    rows = (
        (
            _code(short(each.namespace)),
            escape(each.model),
            f"{each.blocks:,}",
            format_size(each.bytes),
            age(each.newest),
            age(each.last_used),
        )
        for each in sums[:MOST_ROWS]
    )
    body = _table(("namespace", "model", "blocks", "bytes", "newest", "last used"), rows) + _more(len(sums), MOST_ROWS)
    notes = "".join(f'<div style="{_DIM}">{escape(note)}</div>' for note in look.notes)
    return _box("Inspection", look.source, (body if sums else "<div>nothing is stored</div>") + notes)


def namespace_html(view: NamespaceView) -> str:
    """The namespace: what its blocks have in common, and their sums."""
    sums, space = view.summary, view.namespace
    facts = [
        ("model", escape(space.model)),
        ("revision", escape(space.revision)),
        ("engine", escape(engine_of(space) or "-")),
        ("tokens in a block", str(space.block_tokens)),
        *(
            (f"group {group}", escape(f"{view.axes(group).words} {view.axes(group).dtype_name}"))
            for group in range(len(space.layouts))
        ),
        ("blocks", f"{sums.blocks:,}, {format_size(sums.bytes)}, {sums.pinned:,} pinned"),
        ("stored", f"{age(sums.oldest)} to {age(sums.newest)} ago, used {age(sums.last_used)} ago"),
    ]
    if sums.labels:
        facts.append(("labels", " ".join(_tag(f"{label} {count:,}") for label, count in sums.labels.items())))
    return _box(f"Namespace {short(space.name)}", view.source, _facts(facts))


def tree_html(tree: PrefixTree) -> str:
    """The tree, each branch to be folded; of a large one the beginning."""
    parts: list[str] = []
    shown = 0
    for root in tree.roots:
        opened: list[int] = []
        for depth, run in root.walk():
            while opened and opened[-1] >= depth:
                opened.pop()
                parts.append("</details>")
            if shown == MOST_RUNS:
                break
            shown += 1
            parts.append(_run_html(tree, run, depth))
            if run.children:
                opened.append(depth)
        parts.append("</details>" * len(opened))
        if shown == MOST_RUNS:
            break
    total = sum(1 for _ in tree.runs())
    rest = _more(total, shown, "runs")
    if tree.loose:
        rest += f'<div style="{_DIM}">{counted(len(tree.loose), "block")} without position and parent</div>'
    title = f"Prefixes of {short(tree.namespace.name)}"
    return _box(
        title, f"{counted(tree.blocks, 'block')} in {counted(total, 'run')}, {tree.where}", "".join(parts) + rest
    )


def _run_html(tree: PrefixTree, run: Run, depth: int) -> str:
    heading = tree.heading(run) if depth == 0 else ""
    marks = " ".join(_tag(label) for label in run.labels)
    text = f"{escape(heading)}{_code(short(run.last))} {escape(run.words())} {marks}"
    style = f"margin-left:{0 if depth == 0 else 1.2}em"
    if run.children:
        return f'<details open style="{style}"><summary>{text}</summary>'
    return f'<div style="{style}">{text}</div>'


def prefix_html(view: PrefixView) -> str:
    """The prefix: its sums, and its blocks, of which a long one shows the first."""
    size = sum(info.stored_bytes for info in view.infos)
    facts = [
        ("blocks", f"{len(view.infos):,}, {format_size(size)}"),
        ("tokens", f"{view.tokens:,}"),
        ("axes of a block", escape(f"{view.axes.words} {view.axes.dtype_name}")),
        ("complete", "yes" if view.complete else "no: what came before the first block is not stored"),
        *([("opaque", escape(view.why_opaque))] if view.why_opaque else []),
    ]
    rows = (
        (_code(short(block.digest)), _place(block), format_size(block.info.stored_bytes), f"{block.info.hits:,}")
        for block in (view[number] for number in range(min(len(view), MOST_ROWS)))
    )
    body = _facts(facts) + _table(("digest", "tokens", "bytes", "hits"), rows) + _more(len(view), MOST_ROWS)
    return _box(f"Prefix {short(view.digest)}", view.source, body)


def block_html(view: BlockView) -> str:
    """The block: its facts; nothing of it is read."""
    info = view.info
    facts = [
        ("digest", _code(view.digest)),
        ("namespace", f"{_code(short(view.namespace.name))} {escape(view.namespace.model)}"),
        ("group", str(view.group)),
        ("tokens", _place(view)),
        ("parent", _code(short(info.parent.hex())) if info.parent else "-"),
        ("axes", escape(f"{view.axes.words} {view.axes.dtype_name}")),
        ("bytes", f"{format_size(view.namespace.block_bytes(view.group))}, {format_size(info.stored_bytes)} stored"),
        ("created", f"{moment(info.created)} ({age(info.created)} ago)"),
        ("last used", f"{moment(info.last_used)} ({age(info.last_used)} ago), {info.hits:,} hits"),
    ]
    if info.marks:
        pins = " pinned" if info.pinned else ""
        facts.append(("marks", " ".join(_tag(text) for text in (*info.labels, *info.tenants)) + pins))
    if view.why_opaque:
        facts.append(("opaque", escape(view.why_opaque)))
    return _box(f"Block {short(view.digest)}", view.source, _facts(facts))


def _place(view: BlockView) -> str:
    return "unknown" if view.tokens is None else f"{view.tokens.start:,}–{view.tokens.stop - 1:,}"


def _box(title: str, subtitle: str, body: str) -> str:
    head = f'<div style="{_HEAD}">{escape(title)} <span style="{_DIM};font-weight:400">{escape(subtitle)}</span></div>'
    return f'<div style="{_BOX}">{head}{body}</div>'


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    """Names and values; the values are HTML."""
    rows = (
        f'<tr style="background:none"><td style="{_CELL};{_DIM}">{escape(name)}</td>'
        f'<td style="{_CELL}">{value}</td></tr>'
        for name, value in facts
    )
    return f'<table style="border:0;margin:0">{"".join(rows)}</table>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML."""
    head = "".join(f'<th style="{_CELL};{_DIM}">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr style="background:none">{"".join(f"""<td style="{_CELL}">{cell}</td>""" for cell in row)}</tr>'
        for row in rows
    )
    return f'<table style="border:0;margin:0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _more(total: int, shown: int, what: str = "") -> str:
    return f'<div style="{_DIM}">… and {total - shown:,} more {what}</div>' if total > shown else ""


def _code(text: str) -> str:
    return f'<code style="background:none;color:inherit">{escape(text)}</code>'


def _tag(text: str) -> str:
    return f'<span style="{_TAG}">{escape(text)}</span>'
