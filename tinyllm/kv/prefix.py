"""Which pages hold which tokens: sequences that were computed, found again by how they begin. No mlx.

A tree, with a root for each RoPE regime, because keys are stored rotated. A node stands for the tokens of one page,
at the end of those that lead to it, and names the page of each layer kind that holds them:

    root ── [a b c d] ─┬─ [e f g h] ─── [i j]      page_size 4; the last page of a sequence may be partial
                       └─ [e f x]

Whole pages are found by a hash over the parent's and the tokens, in constant time however many siblings there are.
A hash only says where to look: parent and tokens are compared, so one that collides gives no other tokens' pages. The
end of a sequence has no hash to be found by. Siblings are sorted by their tokens, and the one that has the most in
common with given tokens lies beside the place where these would be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tinyllm.kv.pages import PADDING, IntegrityError, PageAllocator, PageKind, readable_length

__all__ = ["ChainHash", "Node", "PrefixIndex"]

ChainHash = Callable[[tuple[int, tuple[int, ...]]], int]


@dataclass(eq=False)
class Node:
    """The tokens of a page, below those of `parent`; `pages` by kind, 0 where a windowed kind's was evicted.

    `key` is the hash of all tokens up to here. A node without a parent is a root, or was taken out of the index.
    """

    tokens: tuple[int, ...]
    parent: Node | None
    key: int
    pages: list[int]
    children: list[Node] = field(default_factory=list)


class PrefixIndex:
    """The tree, over the allocators of all kinds: pages in it are kept when nobody holds them, until evicted.

    A node whose page of a kind without a window is evicted leaves, with all below it, since no later token can do
    without that page. A windowed kind's page is only missed by those that follow closely.
    """

    def __init__(
        self,
        kinds: Sequence[PageKind],
        allocators: Sequence[PageAllocator],
        page_size: int,
        chain_hash: ChainHash = hash,
    ) -> None:
        self._kinds = kinds
        self._allocators = allocators
        self._page_size = page_size
        self._recurrent = any(kind.recurrent for kind in kinds)
        self._hash = chain_hash
        self._roots: dict[str, Node] = {}
        self._by_key: dict[int, list[Node]] = {}
        self._node_of: list[dict[int, Node]] = [{} for _ in kinds]
        for kind, allocator in enumerate(allocators):
            allocator.on_evict = partial(self._evicted, kind)

    def root(self, regime: str) -> Node:
        """Return the node that the first page's are children of."""
        if regime not in self._roots:
            self._roots[regime] = Node((), None, hash(regime), [PADDING] * len(self._kinds))
        return self._roots[regime]

    def node_of(self, kind: int, page: int) -> Node | None:
        """Return the node that names `page`, if there is one."""
        return self._node_of[kind].get(page)

    def match(self, tokens: Sequence[int], limit: int, regime: str) -> tuple[list[Node], int]:
        """Return the nodes that hold the longest known prefix of `tokens`, at most `limit` of them, and its length.

        The last node may hold more tokens than are asked for. Every kind has the pages that the next position sees.
        """
        size, path, node = self._page_size, list[Node](), self.root(regime)
        while (start := len(path) * size) + size <= limit:
            child = self._find(node, tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        rest = tuple(tokens[start : min(limit, start + size)])
        hits = [self._readable([*path, end], start + count) for end, count in self._ends(node, rest)]
        return max([*hits, self._readable(path, start)], key=lambda hit: hit[1])

    def put(self, parent: Node, tokens: tuple[int, ...], pages: Sequence[int]) -> Node:
        """Say that `pages`, one a kind, hold `tokens`, after those up to `parent`; return the node that finds them.

        `parent` is a root or a whole page. A node that has the tokens already keeps its pages, and gets those that it
        lacks; one that has more tokens is left alone, but where there are states, since it has another one; one that
        has these very pages, and fewer tokens, grows.
        """
        named = (self.node_of(kind, page) for kind, page in enumerate(pages))
        owners = [owner for owner in dict.fromkeys(named) if owner is not None]
        node = self._find(parent, tokens)
        if node is None:
            place = bisect_left(parent.children, tokens, key=_tokens)
            for longer in [] if self._recurrent else parent.children[place : place + 1]:
                if longer.tokens[: len(tokens)] == tokens:
                    return longer
            node = next((owner for owner in owners if self._continues(owner, parent, tokens, pages)), None)
            if node is None:
                node = Node(tokens, parent, 0, [PADDING] * len(pages))
            else:
                self._unlink(node)
                node.tokens = tokens
            self._link(node, parent)
        for owner in owners:  # a page belongs to one node: the one with the most of its tokens
            if owner is not node:
                self.discard(owner)
        for kind, page in enumerate(pages):
            if page != PADDING and node.pages[kind] == PADDING:
                node.pages[kind] = page
                self._node_of[kind][page] = node
                self._allocators[kind].keep(page)
        return node

    def discard(self, node: Node) -> list[tuple[int, int]]:
        """Take a node and all below it out of the index; return (kind, page) of what it no longer keeps."""
        parent, forgotten = node.parent, list[tuple[int, int]]()
        if parent is None:
            return forgotten
        self._unlink(node)
        doomed = [node]
        for each in doomed:  # grows as it goes
            doomed += each.children
            for child in each.children:
                self._unhash(child)
            for kind, page in enumerate(each.pages):
                if page != PADDING:
                    del self._node_of[kind][page]
                    self._allocators[kind].forget(page)
                    forgotten.append((kind, page))
            each.parent, each.children, each.pages = None, [], [PADDING] * len(self._kinds)
        self.prune(parent)
        return forgotten

    def prune(self, node: Node) -> None:
        """Take out a node that has neither pages nor children, then its parent if that has none now, and so on."""
        while (parent := node.parent) is not None and not node.children and not any(node.pages):
            self._unlink(node)
            node.parent = None
            node = parent

    def clear(self) -> None:
        """Forget everything."""
        for root in self._roots.values():
            while root.children:
                self.discard(root.children[-1])

    def kept(self, kind: int) -> set[int]:
        """Return the pages of a kind that nodes name."""
        return set(self._node_of[kind])

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the tree, the hashes and the pages' nodes tell the same."""
        nodes = list(self._roots.values())
        for node in nodes:  # grows as it goes
            nodes += node.children
            if [child.tokens for child in node.children] != sorted({child.tokens for child in node.children}):
                raise IntegrityError(f"the children of {node.tokens} are not sorted, or not distinct")
            for child in node.children:
                if child.parent is not node or self._find(node, child.tokens) is not child:
                    raise IntegrityError(f"{child.tokens} is not found below its parent {node.tokens}")
                if not 0 < len(child.tokens) <= self._page_size:
                    raise IntegrityError(f"{child.tokens} is not the content of a page")
                if child.children and len(child.tokens) < self._page_size:
                    raise IntegrityError(f"{child.tokens} is a partial page, and has children")
                if not child.children and not any(child.pages):
                    raise IntegrityError(f"{child.tokens} has neither pages nor children")
        inner = [node for node in nodes if node.parent is not None]
        if len(inner) != sum(map(len, self._by_key.values())):
            raise IntegrityError("there are hashes of nodes that are not in the tree")
        for kind, node_of in enumerate(self._node_of):
            pages = {node.pages[kind]: node for node in inner if node.pages[kind] != PADDING}
            if pages != node_of:
                raise IntegrityError(
                    f"kind {kind}: nodes name pages {sorted(pages)}, but {sorted(node_of)} have nodes"
                )
            if self._kinds[kind].lasting and len(pages) < len(inner):
                raise IntegrityError(f"kind {kind}: a node lacks a page that everything below it needs")

    def _find(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        same = self._by_key.get(self._hash((parent.key, tokens)), ())
        return next((node for node in same if node.parent is parent and node.tokens == tokens), None)

    def _ends(self, parent: Node, rest: tuple[int, ...]) -> list[tuple[Node, int]]:
        """Return pages that may hold the first of some tokens after a parent's, and how many of them each holds.

        A state is of use after all tokens of its page alone.
        """
        if self._recurrent:
            shorter = (self._find(parent, rest[:count]) for count in range(len(rest), 0, -1))
            return [(node, len(node.tokens)) for node in shorter if node is not None]
        place = bisect_left(parent.children, rest, key=_tokens)
        return [(node, _common(node.tokens, rest)) for node in _beside(parent, place)]

    def _readable(self, nodes: list[Node], length: int) -> tuple[list[Node], int]:
        length = readable_length(length, self._kinds, self._page_size, lambda kind, i: nodes[i].pages[kind])
        return nodes[: -(-length // self._page_size)], length

    @staticmethod
    def _continues(node: Node, parent: Node, tokens: tuple[int, ...], pages: Sequence[int]) -> bool:
        return (
            node.parent is parent
            and tokens[: len(node.tokens)] == node.tokens
            and all(old in (PADDING, new) for old, new in zip(node.pages, pages, strict=True))
        )

    def _evicted(self, kind: int, page: int) -> None:
        node = self._node_of[kind].pop(page)
        node.pages[kind] = PADDING
        if self._kinds[kind].lasting:
            self.discard(node)
        else:
            self.prune(node)

    def _link(self, node: Node, parent: Node) -> None:
        node.parent, node.key = parent, self._hash((parent.key, node.tokens))
        parent.children.insert(bisect_left(parent.children, node.tokens, key=_tokens), node)
        self._by_key.setdefault(node.key, []).append(node)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[bisect_left(node.parent.children, node.tokens, key=_tokens)]
        self._unhash(node)

    def _unhash(self, node: Node) -> None:
        same = self._by_key[node.key]
        same.remove(node)
        if not same:
            del self._by_key[node.key]


def _tokens(node: Node) -> tuple[int, ...]:
    return node.tokens


def _beside(parent: Node, place: int) -> list[Node]:
    return parent.children[max(place - 1, 0) : place + 1]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many of the first tokens are the same."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
