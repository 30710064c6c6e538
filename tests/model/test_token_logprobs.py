"""Log-probabilities of tokens: exact numbers in chunks, vocabulary shards, memory that grows with T only."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.model.token_logprobs import IGNORED, likeliest_tokens, token_logprobs
from holdfast.spec.errors import SpecError
from tests.checkpoint.ranks import in_ranks, process_group
from tests.model.test_packed_attention import Recorder, random, with_gradients

WIDTH, VOCABULARY = 24, 90


def inputs(
    rows: int, length: int, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input of the head, its weight, targets with some IGNORED, and a gradient."""
    generator = torch.Generator().manual_seed(length)
    targets = torch.randint(0, vocabulary, (rows, length), generator=generator)
    targets[:, ::5] = IGNORED
    hidden, head = random(rows, length, WIDTH, dtype=dtype), random(vocabulary, WIDTH, dtype=dtype)
    return hidden, head, targets, random(rows, length, seed=1)


def whole(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The reference with all logits."""
    return -F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 16, 50, 1024])
def test_values_and_gradients_are_those_of_all_logits(chunk: int, dtype: torch.dtype) -> None:
    hidden, head, targets, gradient = inputs(3, 50, dtype)
    results = with_gradients(lambda x, w: token_logprobs(x, w, targets, chunk=chunk), gradient, hidden, head)
    expected = with_gradients(lambda x, w: whole(x, w, targets), gradient.double(), hidden.double(), head.double())
    assert results[0].dtype == torch.float32
    assert [tensor.dtype for tensor in results[1:]] == [dtype, dtype]
    for actual, reference in zip(results, expected, strict=True):
        error = ((actual.double() - reference).norm() / reference.norm()).item()
        assert error < (1e-6 if dtype == torch.float32 else 6e-3), f"differs by {error:.1e}"
    ignored = targets == IGNORED
    assert not results[0][ignored].any()
    assert not results[1][ignored].any()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_sums_over_the_vocabulary_are_those_of_separate_operations(dtype: torch.dtype) -> None:
    hidden, head, targets, gradient = inputs(3, 50, dtype)
    found, again, expected = (
        with_gradients(lambda x, w, c=c: token_logprobs(x, w, targets, chunk=16, compiled=c), gradient, hidden, head)
        for c in (True, True, False)
    )
    assert all(map(torch.equal, found, again))
    for actual, reference in zip(found, expected, strict=True):
        assert ((actual - reference).norm() / reference.norm()).item() < (1e-6 if dtype == torch.float32 else 3e-3)
    assert not found[0][targets == IGNORED].any()
    assert not found[1][targets == IGNORED].any()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_more_lengths_of_chunks_than_torch_compiles_are_refused() -> None:
    torch._dynamo.reset()  # other tests have compiled some lengths
    limit = torch._dynamo.config.recompile_limit
    hidden, head, targets, _ = inputs(1, limit + 1)
    for length in range(1, limit + 1):
        token_logprobs(hidden[:, :length], head, targets[:, :length], compiled=True)
    with pytest.raises(
        SpecError, match=rf"training\.loss_chunk: .*more than {limit} lengths.*training\.compile"
    ) as error:
        token_logprobs(hidden, head, targets, compiled=True)
    assert error.value.problems[0].remedy.endswith("training.compile: false")
    torch._dynamo.reset()


def test_a_position_may_have_several_targets_of_which_the_first_may_occur_twice() -> None:
    hidden, head, targets, _ = inputs(2, 20)
    several = torch.stack((targets, *(targets.clamp(min=0).add(step) % VOCABULARY for step in (0, 7, 11))), -1)
    several = several.where(targets[..., None] != IGNORED, IGNORED)
    gradient = random(2, 20, 4, seed=5)

    def all_logits(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.T).log_softmax(-1).gather(2, several.clamp(min=0)).where(several != IGNORED, 0)

    found = with_gradients(lambda x, w: token_logprobs(x, w, several, chunk=8), gradient, hidden, head)
    expected = with_gradients(all_logits, gradient.double(), hidden.double(), head.double())
    for actual, reference in zip(found, expected, strict=True):
        assert ((actual.double() - reference).norm() / reference.norm()).item() < 1e-6
    assert torch.equal(found[0][..., 0], token_logprobs(hidden, head, targets, chunk=8))


def test_the_likeliest_tokens_are_those_of_all_logits() -> None:
    hidden, head, _, _ = inputs(2, 20)
    likeliest = likeliest_tokens(hidden, head, 5, chunk=8)
    logprobs, tokens = (hidden @ head.T).log_softmax(-1).topk(5)
    assert torch.equal(likeliest.tokens, tokens)
    torch.testing.assert_close(likeliest.logprobs, logprobs, rtol=0, atol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, head, targets, _ = inputs(2, 7, torch.float64, 11)
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, w: token_logprobs(x, w, targets, chunk=3), leaves)


def test_only_the_gradients_that_are_wanted_are_computed() -> None:
    hidden, head, targets, gradient = inputs(1, 20)
    results = with_gradients(lambda x, w: token_logprobs(x, w, targets), gradient, hidden, head)
    for gradient_of_both, alone in (
        (results[1], with_gradients(lambda x: token_logprobs(x, head, targets), gradient, hidden)[1]),
        (results[2], with_gradients(lambda w: token_logprobs(hidden, w, targets), gradient, head)[1]),
    ):
        assert torch.equal(gradient_of_both, alone)


def test_bits_of_a_row_do_not_depend_on_the_other_rows_or_on_threads() -> None:
    hidden, head, targets, gradient = inputs(3, 50)
    threads = torch.get_num_threads()

    def found(rows: slice) -> list[Tensor]:
        return with_gradients(lambda x: token_logprobs(x, head, targets[rows], chunk=16), gradient[rows], hidden[rows])

    together = found(slice(None))
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for row in range(3):
                alone = found(slice(row, row + 1))
                assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_has_all_tokens_and_the_vocabulary(dtype: torch.dtype) -> None:
    records = {}
    for length in (1024, 2048):
        hidden, head, targets, gradient = inputs(1, length, dtype, 200)
        with Recorder() as records[length]:
            with_gradients(lambda x, w, y=targets: token_logprobs(x, w, y, chunk=32), gradient, hidden, head)
        elements = {shape: torch.Size(shape).numel() for shape in records[length].shapes}
        assert max(elements.values()) <= length * WIDTH, "logits of more than a chunk"
        assert (32, 200) in elements, "the recorder does not see the logits of a chunk"
    assert records[2048].largest == 2 * records[1024].largest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk of token_logprobs is 0; give at least 1"),
        ({"head_VD": torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16)}, "give both in one dtype"),
    ],
)
def test_invalid_logprob_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    hidden, head, targets, _ = inputs(1, 4)
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{"hidden_BTD": hidden, "head_VD": head, "targets_BT": targets, **change})


BOUNDS = (0, 37, VOCABULARY)  # unequal shards for two ranks


def shards_of_a_rank(rank: int, size: int, folder: Path) -> list[list[Any]]:
    """Output and gradients with this rank's rows of the head, in fp32 and in bf16."""
    first, last = BOUNDS[rank], BOUNDS[rank + 1]
    results = []
    with process_group(folder / "meeting", rank, size):
        from torch.distributed import group

        for dtype in (torch.float32, torch.bfloat16):
            hidden, head, targets, gradient = inputs(2, 50, dtype)
            results += with_gradients(
                lambda x, w, y=targets: token_logprobs(x, w, y, chunk=16, group=group.WORLD, first_token=first),
                gradient,
                hidden,
                head[first:last],
            )
    return [tensor.tolist() for tensor in results]


def test_ranks_with_shards_of_the_vocabulary_agree_with_the_whole(tmp_path: Path) -> None:
    first, second = in_ranks(2, shards_of_a_rank, tmp_path)
    for at, (dtype, near) in enumerate(((torch.float32, 1e-5), (torch.bfloat16, 2e-2))):
        hidden, head, targets, gradient = inputs(2, 50, dtype)
        expected = with_gradients(lambda x, w, y=targets: token_logprobs(x, w, y, chunk=16), gradient, hidden, head)
        logprobs, d_hidden, d_head = first[3 * at : 3 * at + 3]
        others, other_hidden, other_head = second[3 * at : 3 * at + 3]
        assert (logprobs, d_hidden) == (others, other_hidden), "the ranks have different bits"
        results = [logprobs, d_hidden, d_head + other_head]
        for actual, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(torch.tensor(actual, dtype=reference.dtype), reference, rtol=near, atol=near)
