"""The Mask algebra against independent oracles: plain Python loops, and torch's FlexAttention."""

import copy
import pickle
from inspect import unwrap

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention

from labkit import masks
from labkit.errors import MaskError

N = 7  # the square on which random expressions are checked
BATCH = 2
quick = settings(max_examples=60, deadline=None)

# ---------------------------------------------------------------------------------------------- random expressions
# `unwrap`: the type checker that pytest hooks into labkit looks at a random item of a list, which hypothesis refuses
numbers = st.integers(0, N + 1)
plain_masks = st.one_of(
    st.just(masks.causal()),
    st.just(masks.bidirectional()),
    st.builds(masks.sliding_window, st.integers(1, N + 1), st.booleans()),
    st.builds(masks.prefix, numbers),
    st.builds(masks.hybrid, numbers),
    st.lists(st.integers(0, 3), min_size=N, max_size=N).flatmap(
        lambda ids: st.builds(
            unwrap(masks.segments),
            st.just(ids),
            st.sampled_from(["causal", "bidirectional"]),
            st.none() | st.integers(0, N),
        )
    ),
)
padding_masks = st.builds(
    unwrap(masks.padding),
    st.lists(st.integers(0, N), min_size=BATCH, max_size=BATCH),
    st.sampled_from(["right", "left"]),
)
painted_masks = st.lists(st.booleans(), min_size=N * N, max_size=N * N).map(
    lambda cells: masks.from_dense(torch.tensor(cells).view(N, N))
)


def composed(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            inner.map(lambda a: ~a),
        ),
        max_leaves=4,
    )


written_masks = composed(plain_masks | padding_masks)  # every one of them can be typed in again from its repr
any_masks = composed(plain_masks | padding_masks | painted_masks)
lengths = st.integers(1, N)  # q_len, with kv_len = N


def batched(cells):
    return cells if cells.ndim == 3 else cells[None]


def with_itself_where_empty(cells):
    """The stated rule for a query without a key, in plain loops: it attends to itself alone."""
    cells = cells.clone()
    q_len, kv_len = cells.shape[-2:]
    for row in cells.reshape(-1, q_len, kv_len):
        for q in range(q_len):
            if not any(row[q].tolist()):
                row[q, kv_len - q_len + q] = True
    return cells


# --------------------------------------------------------------------------------------- the renderings agree
@quick
@given(any_masks, lengths)
def test_dense_additive_and_block_mask_agree_on_every_expression(mask, q_len):
    expected = with_itself_where_empty(mask.dense(q_len, N))

    additive = mask.additive(q_len, N)
    assert torch.equal(additive == 0, expected)
    assert torch.equal(additive == torch.finfo(torch.float32).min, ~expected)

    block = mask.block_mask(q_len, N)
    cells = create_mask(block.mask_mod, mask.batch_size, None, q_len, N, device="cpu")  # (batch or 1, 1, q_len, kv_len)
    assert torch.equal(cells[:, 0], batched(expected))


@pytest.mark.parametrize("mask", [masks.segments([0, 0, 1, 1, 1, 2, 2]), masks.padding([N, 3]) & masks.prefix([2, 4])])
def test_nothing_is_moved_to_another_device_within_the_kernel(mask):
    """Inductor cannot compile a mask that moves a table from the CPU to the GPU."""
    block, sources = mask.block_mask(N), []

    def read(graph, inputs):
        sources.extend(part.code for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
        return graph.forward

    states = torch.zeros(mask.batch_size or 1, 1, N, 16)
    torch.compiler.reset()
    torch.compile(flex_attention, backend=read)(states, states, states, block_mask=block)
    assert len(sources) > 1 and not any(".to(" in source for source in sources)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.sliding_window(20),
        masks.segments([0] * 100 + [1] * 200, fuse_from=290),
        masks.causal() & masks.padding([300, 3], side="left"),  # left padding makes rows without a key
    ],
    ids=["window", "segments", "left padding"],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("q_len", [300, 150])
def test_block_mask_attends_as_sdpa_does_and_skips_only_empty_blocks(mask, q_len):
    batch, kv_len, size = mask.batch_size or 1, 300, 128
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 2, q_len, 16, generator=generator)  # (batch, heads, q_len, head_dim)
    key, value = torch.randn(2, batch, 2, kv_len, 16, generator=generator).unbind(0)
    block = mask.block_mask(q_len, kv_len)

    by_flex = flex_attention(query, key, value, block_mask=block)
    additive = batched(mask.additive(q_len, kv_len))[:, None]  # (batch or 1, 1, q_len, kv_len)
    by_sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=additive)
    torch.testing.assert_close(by_flex, by_sdpa)

    occupied = block.to_dense().bool()[:, 0]  # (batch or 1, query blocks, key blocks)
    cells = torch.nn.functional.pad(
        batched(with_itself_where_empty(mask.dense(q_len, kv_len))), (0, 84, 0, -q_len % size)
    )
    tiles = cells.unflatten(1, (-1, size)).unflatten(3, (-1, size))  # (batch or 1, blocks, size, blocks, size)
    assert torch.equal(occupied, tiles.any(4).any(2))


@quick
@given(any_masks, lengths)
def test_fewer_queries_than_keys_are_the_last_rows_of_the_square(mask, q_len):
    assert torch.equal(mask.dense(q_len, N), mask.dense(N)[..., -q_len:, :])
    assert torch.equal(mask.additive(q_len, N), mask.additive(N)[..., -q_len:, :])


@quick
@given(any_masks, any_masks)
def test_operators_are_those_of_the_cells(a, b):
    x, y = a.dense(N), b.dense(N)
    assert torch.equal((a & b).dense(N), x & y)
    assert torch.equal((a | b).dense(N), x | y)
    assert torch.equal((~a).dense(N), ~x)


# --------------------------------------------------------------------------------------- equality, repr, words
@quick
@given(written_masks)
def test_repr_is_the_expression(mask):
    again = eval(repr(mask), dict(vars(masks)))
    assert again == mask
    assert hash(again) == hash(mask)
    assert torch.equal(again.dense(N), mask.dense(N))
    assert mask.explain().startswith(f"{mask!r}: a token may attend to ")


def test_equality_is_of_expressions_and_agreement_is_of_cells():
    assert masks.prefix(1) != masks.causal() and masks.prefix(1).agrees_with(masks.causal(), N)
    assert masks.causal() & masks.prefix(2) != masks.prefix(2) & masks.causal()
    assert len({masks.causal(), masks.causal(), masks.prefix(1)}) == 2
    # at 4 tokens a window of 4 is invisible; one token more shows it
    assert masks.sliding_window(4).agrees_with(masks.causal(), 4)
    assert not masks.sliding_window(4).agrees_with(masks.causal(), 5)
    # a batched mask agrees only if every row does
    assert not (masks.causal() & masks.padding([4, 3])).agrees_with(masks.causal(), 4)


def test_painted_masks_are_equal_when_their_cells_are():
    cells = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    for same in (cells.int(), cells.numpy(), cells.tolist()):
        assert masks.from_dense(same) == masks.from_dense(cells)
    assert masks.from_dense(cells) != masks.from_dense(~cells)
    assert masks.from_dense(cells) != masks.from_dense(cells[None])  # for any batch, against a batch of 1


# --------------------------------------------------------------------- closed forms, each in plain Python loops
def grid(q_len, kv_len, may_look):
    first = kv_len - q_len  # the queries are the last positions
    return torch.tensor([[bool(may_look(first + r, k)) for k in range(kv_len)] for r in range(q_len)])


CLOSED_FORMS = [
    (masks.causal(), lambda q, k: k <= q),
    (masks.bidirectional(), lambda q, k: True),
    (masks.sliding_window(1), lambda q, k: k == q),
    (masks.sliding_window(3), lambda q, k: k in (q, q - 1, q - 2)),
    (masks.sliding_window(3, causal=False), lambda q, k: k in (q - 2, q - 1, q, q + 1, q + 2)),
    (masks.prefix(0), lambda q, k: k <= q),
    (masks.prefix(3), lambda q, k: k in (0, 1, 2) or k <= q),
    (masks.hybrid(0), lambda q, k: True),
    (masks.hybrid(3), lambda q, k: k <= q if q in (0, 1, 2) else True),
    (masks.segments([5, 5, 8, 8, 8, 5, 8]), lambda q, k: k <= q and (q in (0, 1, 5)) == (k in (0, 1, 5))),
    (masks.segments([5, 5, 8, 8, 8, 5, 8], inside="bidirectional"), lambda q, k: (q in (0, 1, 5)) == (k in (0, 1, 5))),
    (
        masks.segments([0, 0, 1, 1, 1], fuse_from=5),  # positions 5 and 6 were generated and belong to no segment
        lambda q, k: k <= q and (q >= 5 or (q < 2 and k < 2) or (q >= 2 and k >= 2)),
    ),
    (
        masks.segments([0, 0, 1, 1, 1, 1, 0], inside="bidirectional", fuse_from=4),
        lambda q, k: k <= q if q >= 4 else (k < 2 if q < 2 else k in (2, 3)),
    ),
    (masks.segments([0, 0, 1, 1, 1, 1, 0], fuse_from=0), lambda q, k: k <= q),
]


@pytest.mark.parametrize(("mask", "may_look"), CLOSED_FORMS, ids=[repr(m) for m, _ in CLOSED_FORMS])
@pytest.mark.parametrize("q_len", [1, 3, N])
def test_every_factory_has_the_cells_of_its_definition(mask, may_look, q_len):
    assert torch.equal(mask.dense(q_len, N), grid(q_len, N, may_look))


def test_padding_hides_the_padded_keys_of_each_row_and_masks_no_query():
    counts = [6, 4, 0]
    right, left = masks.padding(counts), masks.padding(counts, side="left")
    assert right.batch_size == (masks.causal() & left).batch_size == 3
    for row, real in enumerate(counts):
        assert torch.equal(right.dense(4, 6)[row], grid(4, 6, lambda q, k, real=real: k < real))
        assert torch.equal(left.dense(4, 6)[row], grid(4, 6, lambda q, k, real=real: k >= 6 - real))


def test_a_painted_mask_keeps_its_cells_whatever_happens_to_the_array_later():
    cells = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.5
    before, mask = cells.clone(), masks.from_dense(cells)
    cells[:] = False
    mask.dense(5)[:] = False
    assert mask.batch_size == 3
    assert torch.equal(mask.dense(5), before)
    assert torch.equal(mask.dense(3), before[:, :3, :3])  # a shorter sequence takes the upper left corner


# --------------------------------------------------------------------------------------------- ways back, text
def simplest_names(n):
    """The named masks of this size by their cells, of several with the same cells the simplest: all of them, tried."""
    named = [make(i) for i in range(n - 1, 0, -1) for make in (masks.hybrid, masks.prefix)]
    named += [masks.sliding_window(w, causal=c) for w in range(n - 1, 0, -1) for c in (False, True)]
    return {m.dense(n).numpy().tobytes(): m for m in (*named, masks.causal(), masks.bidirectional())}


@pytest.mark.parametrize("n", [1, 4, 7, 20])
def test_recognise_names_what_trying_all_masks_names(n):
    names = simplest_names(n)
    for cells, mask in names.items():
        dense = torch.frombuffer(bytearray(cells), dtype=torch.bool).view(n, n)
        assert masks.recognise(dense) == mask
        for seed in range(4):
            query, key = torch.randint(n, (2,), generator=torch.Generator().manual_seed(seed))
            near = dense.clone()
            near[query, key] ^= True
            assert masks.recognise(near) == names.get(near.numpy().tobytes())


def test_ascii_draws_one_line_per_query_and_one_column_per_key():
    assert (masks.causal() & masks.sliding_window(2)).ascii(["I", "saw", "her"]).split("\n") == [
        "      I   saw  her",
        "  I   ■    ·    ·",
        "saw   ■    ■    ·",
        "her   ·    ■    ■",
    ]
    assert masks.causal().ascii(2) == "    0    1\n0   ■    ·\n1   ■    ■"
    assert masks.padding([2, 1]).ascii(2, row=1).count("■") == 2


# -------------------------------------------------------------------------------------------------- bad input
@pytest.fixture
def as_users_run_it():
    """Without the type checker that pytest hooks into labkit: it would refuse a wrong type before labkit does."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


MEANINGLESS = {
    "window of nothing": lambda: masks.sliding_window(0),
    "bool for a number": lambda: masks.sliding_window(True),
    "negative prefix": lambda: masks.prefix(-1),
    "fewer keys than queries": lambda: masks.causal().dense(3, 2),
    "padded length beyond the sequence": lambda: (masks.causal() & ~masks.padding([3, 5])).dense(4),
    "padding side": lambda: masks.padding([1], side="top"),
    "unknown attention inside a segment": lambda: masks.segments([0, 1], inside="both"),
    "fuse_from beyond the segments": lambda: masks.segments([0, 1], fuse_from=3),
    "sequence longer than the segments": lambda: masks.segments([0, 1]).dense(3),
    "additive mask as a painting": lambda: masks.from_dense(masks.causal().additive(3)),
    "painting not square": lambda: masks.from_dense(torch.ones(2, 3).bool()),
    "ragged painting": lambda: masks.from_dense([[1, 0], [1]]),
    "additive mask of integers": lambda: masks.causal().additive(3, dtype=torch.int64),
    "batches of different size": lambda: masks.padding([1, 2]) & masks.padding([1, 2, 3]),
    "agreement with a tensor": lambda: masks.causal().agrees_with(torch.ones(3, 3).bool(), 3),
    "python's and": lambda: masks.causal() and masks.prefix(2),
    "no tokens": lambda: masks.causal().ascii([]),
}


@pytest.mark.parametrize("make", MEANINGLESS.values(), ids=MEANINGLESS.keys())
def test_what_has_no_meaning_is_refused_with_a_sentence(make, as_users_run_it):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 5


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(as_users_run_it):
    assert masks.sliding_window(np.int64(2)) == masks.sliding_window(torch.tensor(2)) == masks.sliding_window(2)
    assert masks.padding(torch.tensor([1, 2])) == masks.padding(np.array([1, 2])) == masks.padding([1, 2])
    assert masks.segments((0, 1)) == masks.segments(torch.tensor([0, 1]))


def test_a_mask_survives_pickling_and_copying():
    mask = (masks.causal() & ~masks.segments([0, 0, 1], fuse_from=2)) | masks.from_dense(torch.eye(3, dtype=torch.bool))
    mask = mask & masks.padding([2, 3], side="left") | masks.sliding_window(2, causal=False)
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert twin == mask
        assert twin.agrees_with(mask, 3)
