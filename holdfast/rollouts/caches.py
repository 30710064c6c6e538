"""Keys and values of generated rows: those of a lot, whose answers share their prompts, and those of a server's rows.

Shape suffixes: as in `decoder`; P prompts of a lot, A answers to each, R query heads of a group, B = P x A rows.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder
from holdfast.model.layers import Attention, LayerCache


class LotPositions:
    """The positions of a lot, for the caches of all its layers. All rows have equally many tokens of their answers."""

    def __init__(self, lengths_P: Tensor, answers: int, most: int) -> None:
        """`lengths_P` are those of the prompts, which have `answers` answers each, of at most `most` tokens."""
        self.answers, self.most = answers, most
        self.count = 0  # tokens of each answer that the caches have
        self._lengths_P = lengths_P
        self._positions_S = torch.arange(int(lengths_P.max()), device=lengths_P.device)
        self._hidden: dict[int | None, Tensor | None] = {None: self._after()}

    @property
    def next_positions(self) -> Tensor:
        """The position of each row's next token."""
        return (self._lengths_P + self.count).repeat_interleave(self.answers)

    def advance(self) -> None:
        """Count a token of each row."""
        self.count += 1
        self._hidden = {None: self._hidden[None]}

    def hidden(self, window: int | None) -> Tensor | None:
        """The positions of prompts that the next tokens do not see in a layer with this window. None: all are seen."""
        if window not in self._hidden:
            assert window is not None
            first_P1 = (self._lengths_P + (self.count - window + 1))[:, None]
            before_PS = self._positions_S < first_P1
            after_PS = self._hidden[None]
            self._hidden[window] = before_PS if after_PS is None else before_PS | after_PS
        return self._hidden[window]

    def _after(self) -> Tensor | None:
        """The padding after prompts."""
        after_PS = self._positions_S >= self._lengths_P[:, None]
        return after_PS if bool(after_PS.any()) else None


class LotCache(LayerCache):
    """Keys and values of a lot in one layer: each prompt once, and a part for each answer."""

    def __init__(self, positions: LotPositions) -> None:
        super().__init__()
        self._positions = positions
        self._k_NMK = self._v_NMK = torch.empty(0)  # of the answers; N = P x G x A, M tokens at most

    def attend(
        self, attention: Attention, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, segments: Segments
    ) -> Tensor:
        """See LayerCache. The prompts come first, one row each, and then one token of each answer."""
        if self.k_BGSK is not None:
            rows = len(q_BHTK)
            o_BF = self.attend_tokens(attention, q_BHTK[:, :, 0], k_BGTK[:, :, 0], v_BGTK[:, :, 0])
            return o_BF.view(rows, -1, 1, v_BGTK.shape[3])
        # Products with queries read keys by columns, and those of shares read values by rows.
        self.k_BGSK, self.v_BGSK = k_BGTK.mT.contiguous().mT, v_BGTK.contiguous()
        rows = k_BGTK.shape[0] * k_BGTK.shape[1] * self._positions.answers
        self._k_NMK, self._v_NMK = (x.new_empty(rows, self._positions.most, x.shape[3]) for x in (k_BGTK, v_BGTK))
        return attention.attend(q_BHTK, k_BGTK, v_BGTK, segments)

    def attend_tokens(self, attention: Attention, q_BHK: Tensor, k_BGK: Tensor, v_BGK: Tensor) -> Tensor:
        """Append a token of each answer. Returns the attention output [B, F] of its queries, F = H x K. The queries of
        all answers to a prompt are multiplied together by its keys."""
        assert self.k_BGSK is not None
        assert self.v_BGSK is not None
        answers, window, at = self._positions.answers, attention.window, self._positions.count
        (prompts, groups, longest, width), wide = self.k_BGSK.shape, self.v_BGSK.shape[3]
        sizes, rows = (prompts, answers, groups), len(self._k_NMK)
        for own_NMK, new in ((self._k_NMK, k_BGK), (self._v_NMK, v_BGK)):
            own_NMK[:, at].view(prompts, groups, answers, -1).transpose(1, 2).copy_(new.view(*sizes, -1))
        first = 0 if window is None else max(0, at + 1 - window)
        k_NSK, v_NSK = (own.narrow(1, first, at + 1 - first) for own in (self._k_NMK, self._v_NMK))
        q_NRK = q_BHK.view(*sizes, -1, width).transpose(1, 2).reshape(rows, -1, width)
        q_LQK = q_NRK.view(prompts * groups, -1, width)  # L = P x G, Q = A x R
        given_LQS = torch.bmm(q_LQK, self.k_BGSK.flatten(0, 1).mT)
        own_LQS = torch.bmm(q_NRK, k_NSK.mT).view(*q_LQK.shape[:2], -1)
        scores_LQS = torch.cat((given_LQS, own_LQS), -1).float().mul_(attention.factor)
        del given_LQS, own_LQS
        if (hidden_PS := self._positions.hidden(window)) is not None:
            given_PXS = scores_LQS[..., :longest].unflatten(0, (prompts, -1)).flatten(1, 2)
            given_PXS.masked_fill_(hidden_PS[:, None], -math.inf)
        shares_LQS = attention.shares(scores_LQS, (prompts, groups, answers)).to(v_NSK.dtype)
        o_LQK = torch.bmm(shares_LQS.narrow(2, 0, longest), self.v_BGSK.flatten(0, 1))
        own_NRS = shares_LQS.narrow(2, longest, at + 1 - first).view(rows, -1, at + 1 - first)
        o_NRK = o_LQK.view(rows, -1, wide).baddbmm_(own_NRS, v_NSK)
        return o_NRK.view(prompts, groups, answers, -1, wide).transpose(1, 2).reshape(len(q_BHK), -1)


class RowsCache(LayerCache):
    """Keys and values of rows of different lengths in one layer, in one buffer of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.at_B: Tensor | None = None  # where the next token of each row is
        self.hidden: dict[int | None, Tensor] = {}  # the positions [B, S] that it does not see, by windows

    def attend(
        self,
        attention: Attention,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        segments: Segments,  # noqa: ARG002
    ) -> Tensor:
        """See LayerCache. The buffers exist, and each row has one token."""
        assert self.k_BGSK is not None
        assert self.v_BGSK is not None
        rows = torch.arange(len(k_BGTK), device=k_BGTK.device)
        self.k_BGSK[rows, :, self.at_B] = k_BGTK[:, :, 0]
        self.v_BGSK[rows, :, self.at_B] = v_BGTK[:, :, 0]
        heads, groups = q_BHTK.shape[1], k_BGTK.shape[1]
        q_BGRK = q_BHTK.view(len(q_BHTK), groups, heads // groups, -1)
        scores_BGRS = (q_BGRK @ self.k_BGSK.transpose(2, 3)).float() * attention.factor
        scores_BGRS.masked_fill_(self.hidden[attention.window][:, None, None], -math.inf)
        shares_BGRS = attention.shares(scores_BGRS, (len(q_BHTK), groups, 1))
        return (shares_BGRS.to(self.v_BGSK.dtype) @ self.v_BGSK).view(len(q_BHTK), heads, 1, -1)


def read_tokens(decoder: Decoder, caches: Sequence[LayerCache], token_B: Tensor, at_B: Tensor) -> Tensor:
    """Read a token of each row at its position `at_B`. Returns the logits [B, V] of the next token."""
    x_BTD = decoder.embed(token_B[:, None])
    main = decoder.cos_TK[at_B][:, None, None], decoder.sin_TK[at_B][:, None, None]
    local = main
    if decoder.shape.preset.local_rope:
        local = decoder.local_cos_TK[at_B][:, None, None], decoder.local_sin_TK[at_B][:, None, None]
    for shape, layer, cache in zip(decoder.layer_shapes, decoder.model.layers, caches, strict=True):
        x_BTD, _ = layer(x_BTD, *(local if shape.rope == "local" else main), None, cache)
    return decoder.head(decoder.model.norm(x_BTD))[:, 0]


def advance_rows(decoder: Decoder, caches: Sequence[RowsCache], token_B: Tensor, at_B: Tensor) -> Tensor:
    """The same for rows of different lengths, after their cached positions."""
    positions_S = torch.arange(caches[0].positions, device=at_B.device)
    after_BS = positions_S > at_B[:, None]
    hidden: dict[int | None, Tensor] = {None: after_BS}
    for layer, cache in zip(decoder.model.layers, caches, strict=True):
        window: int | None = getattr(layer.self_attn, "window")  # noqa: B009 - a module's attribute
        if window is not None and window not in hidden:
            hidden[window] = after_BS | (positions_S <= at_B[:, None] - window)
        cache.at_B, cache.hidden = at_B, hidden
    return read_tokens(decoder, caches, token_B, at_B)
