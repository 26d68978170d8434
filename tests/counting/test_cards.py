"""The table of cards: the limits that tiles are chosen by, and figures that must agree with one another."""

import dataclasses

import pytest

from andrea_triton.counting.cards import CARDS, KIB, Card

LIMITS = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx942": 64, "gfx1100": 64,
}  # fmt: skip
PEAKS = {"sm_75": 65, "sm_80": 312, "sm_89": 165, "sm_90": 989, "sm_120": 210, "gfx942": 1307, "gfx1100": 123}


def test_every_target_has_its_shared_memory_limit() -> None:
    assert {name: card.shared_per_cta / KIB for name, card in CARDS.items()} == LIMITS


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_holds_what_it_gives_one_cta(card: Card) -> None:
    assert CARDS[card.target] is card
    assert card.shared_per_cta + card.shared_reserved <= card.shared_per_sm
    assert card.threads % card.warp_size == 0 and card.registers % card.register_unit == 0
    assert card.mma_sync_flops <= card.mma_flops


@pytest.mark.parametrize("target", PEAKS)
def test_peak_of_half_precision_products_is_the_published_one(target: str) -> None:
    card = CARDS[target]
    assert card.mma_flops * card.sms * card.ghz / 1e3 == pytest.approx(PEAKS[target], rel=0.05)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CARDS["sm_80"] = CARDS["sm_90"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        CARDS["sm_80"].ctas = 1  # type: ignore[misc]
