"""What notebooks are given: every text escaped, nothing loaded from anywhere, small however much is stored."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from inspect_helpers import KEYS, PROMPT, TOKENS, store_prompt

import kvstore.inspect
from kvstore import BlockLayout, Mark, Namespace, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.inspect import Inspection

EVIL = "<script>alert('x')</script>"
LAYOUT = BlockLayout.canonical(layers=2, tokens=TOKENS, heads=1, head_dim=4, dtype="bfloat16")
SPACE = Namespace(EVIL, f"r&{EVIL}", (LAYOUT, BlockLayout.opaque(64)), block_tokens=TOKENS, extra={"engine": EVIL})


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order; `words` are what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def parsed(html: str) -> Balance:
    balance = Balance()
    balance.feed(html)
    balance.close()
    assert not balance.open
    return balance


@pytest.fixture
def look() -> Iterator[Inspection]:
    with open_store("memory://html") as store:
        store_prompt(store, SPACE)
        store_prompt(store, SPACE, [*PROMPT[:20], *[7] * 12])
        store_prompt(store, SPACE, group=1)
        store.mark_many(SPACE, KEYS[:3], Mark(EVIL, tenant=EVIL, pinned=True))
        with kvstore.inspect.open(store) as opened:
            yield opened


@pytest.mark.parametrize("what", ["inspection", "namespace", "tree", "prefix", "block"])
def test_texts_are_escaped_and_nothing_is_loaded(what: str, look: Inspection) -> None:
    space = look.namespace()
    prefix = space.prefix(EVIL)
    shown = {"inspection": look, "namespace": space, "tree": space.tree(), "prefix": prefix, "block": prefix[2]}[what]
    html = shown._repr_html_()
    found = parsed(html)
    assert found.names <= {*("div", "span", "table", "thead", "tbody", "tr", "th", "td", "code", "details", "summary")}
    assert found.attributes <= {"style", "open"}
    assert "http" not in html
    assert "url(" not in html
    if what != "prefix":
        assert EVIL in found.words
    assert "memory://html" in found.words
    assert repr(shown)


def test_the_tree_has_every_run_in_its_place(look: Inspection) -> None:
    html = look.namespace().tree()._repr_html_()
    assert html.count("<details") == html.count("</details>") == 2
    words = parsed(html).words
    assert "blocks 0–2" in words
    assert "blocks 5–9" in words
    assert "group 1" in words


def test_no_colour_fits_only_a_light_page_or_a_dark_one(look: Inspection) -> None:
    space = look.namespace()
    for shown in (look, space, space.tree(), space.prefix(EVIL), space.prefix(EVIL)[0]):
        html = shown._repr_html_()
        assert "#" not in html.replace("&#x27;", "")
        assert "color:" not in html.replace("color:inherit", "")


def test_a_long_prefix_shows_its_beginning() -> None:
    with open_store("memory://long") as store:
        keys = store_prompt(store, SPACE, list(range(4000)))
        with kvstore.inspect.open(store) as look:
            prefix = look.namespace().prefix(keys[-1].digest.hex())
            assert "980 more" in prefix._repr_html_()
            assert len(prefix._repr_html_()) < 20_000


def test_importing_it_loads_nothing_large() -> None:
    code = (
        "import sys, kvstore.inspect, kvstore.cli.show, kvstore.cli.ls\n"
        "kvstore.inspect.Inspection, kvstore.inspect.NamespaceView, kvstore.inspect.PrefixTree\n"
        "print([name for name in ('pandas', 'xarray', 'matplotlib', 'zarr', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("package", "asked"),
    [
        ("pandas", "look.namespaces()"),
        ("pandas", "space.blocks()"),
        ("pandas", "space.prefixes()"),
        ("xarray", "block.xarray()"),
        ("torch", "block.torch()"),
    ],
)
def test_what_is_not_installed_is_asked_for_with_the_line_that_installs_it(package: str, asked: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.modules[{package!r}] = None
import kvstore.inspect
from kvstore import open_store
from kvstore.errors import MissingDependencyError
from inspect_helpers import KEYS, store_prompt
with open_store("memory://x") as store:
    store_prompt(store)
    look = kvstore.inspect.open(store)
    space = look.namespace()
    block = space.block(KEYS[0].digest.hex())
    print(block.statistics()[0].layer, space.tree().blocks)
    try:
        {asked}
    except MissingDependencyError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("0 10\n"), done.stderr
    line = "pip install torch" if package == "torch" else 'pip install "kvstore-tiers[inspect]"'
    assert line in done.stdout
