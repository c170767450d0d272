"""What stands behind answers for a chip: learned of itself, kin, or physics, with the errors that cards tell."""

from __future__ import annotations

import pytest

from opcast.datasets.devices import load_device
from opcast.models.kinship import median_error
from opcast.models.registry import Registry
from opcast.simulator.predict.chips import QUESTIONS, ChipAnswer, chip_answers
from opcast.simulator.workbench import SHIPPED_PREDICTORS


def answers_of(name: str) -> dict[tuple[str, str], ChipAnswer]:
    answers = chip_answers([load_device(name)], [], [SHIPPED_PREDICTORS])
    return {(answer.kind, answer.dtype): answer for answer in answers}


def test_a_chip_that_has_a_table_answers_by_it_with_the_error_of_its_card() -> None:
    blocks = answers_of("mi300x")["gemm", "fp8_block"]
    cards = [entry.card for entry in Registry(SHIPPED_PREDICTORS).list() if entry.device_id == "mi300x"]
    scores = [card["evaluations"]["groups"]["by_dtype"] for card in cards if card["kind"] == "gemm"]
    assert (blocks.how, blocks.of) == ("learned", "mi300x")
    assert blocks.error_percent in [score["fp8_block"]["median_ape"] for score in scores]


def test_kin_answer_with_what_they_missed_of_chips_that_were_left_out() -> None:
    products = answers_of("mi325x")["gemm", "bf16"]
    assert products.how == "kin"
    assert products.error_percent == median_error("gemm", "die")


def test_physics_says_no_error_and_a_factor_of_three() -> None:
    attention = answers_of("mi250")["attention_decode", "bf16"]
    assert (attention.how, attention.of, attention.error_percent) == ("physics", "", None)
    assert attention.factor == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["p100_sxm", "v100_sxm_32gb"])
def test_a_chip_without_bf16_is_asked_in_fp16_and_answers_weights_of_four_bits(name: str) -> None:
    answers = answers_of(name)
    assert ("gemm", "bf16") not in answers
    assert {"fp16", "w4a16"} <= {dtype for kind, dtype in answers if kind == "gemm"}


def test_every_question_is_answered_on_a_chip_that_has_all_formats() -> None:
    asked = {(question.kind, dtype) for question in QUESTIONS for dtype in question.dtypes}
    assert set(answers_of("b200_sxm")) == asked
