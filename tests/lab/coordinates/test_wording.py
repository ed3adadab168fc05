from forewarn.lab.coordinates.exponents import Growth, Term
from forewarn.lab.coordinates.findings import caveat, cells, verdict_sentence, verdict_word

STAYS, GROWS, SHRINKS, VAGUE = Growth(0.1, 0.02), Growth(1.0, 0.05), Growth(-0.6, 0.05), Growth(0.1, 0.5)
WIDTHS = (64, 128, 256)


def test_growth_anywhere_is_not_width_stable_and_names_the_worst_layer():
    growths = {
        "a": {Term.UPDATE: GROWS},
        "b": {Term.UPDATE: Growth(1.5, 0.1), Term.PASSED_ON: STAYS},
        "c": {Term.UPDATE: STAYS},
    }
    assert verdict_word(growths) == "not width-stable"
    assert verdict_sentence(growths, WIDTHS) == (
        "2 of 3 layers change with width, b most of all: (W_t-W_0)x_t grows as width^1.50. "
        "The best learning rate at width 64 need not be that at 256: lower it there."
    )


def test_a_layer_that_learns_less_is_not_width_stable_either():
    growths = {"a": {Term.UPDATE: SHRINKS}}
    assert verdict_word(growths) == "not width-stable"
    assert (
        "shrinks as width^-0.60. At one learning rate these layers learn less and less from width 64 to 256."
        in verdict_sentence(growths, WIDTHS)
    )


def test_all_that_stays_is_width_stable():
    growths = {"a": {Term.UPDATE: STAYS, Term.PASSED_ON: SHRINKS}, "b": {Term.UPDATE: Growth(-0.2, 0.01)}}
    assert verdict_word(growths) == "width-stable"
    assert verdict_sentence(growths, WIDTHS).endswith(
        "the exponent furthest from 0 is that of b, −0.20 ± 0.01. "
        "This is what lets a learning rate found at width 64 serve a wide model."
    )


def test_what_scatters_is_unclear_and_says_what_to_try():
    growths = {"a": {Term.UPDATE: STAYS}, "b": {Term.UPDATE: VAGUE}}
    assert verdict_word(growths) == "unclear"
    assert "Of 1 of 2 layers nothing can be said, such as b" in verdict_sentence(growths, WIDTHS)


def test_few_widths_and_a_single_seed_are_said_to_be_few():
    assert caveat(4, 2) == caveat(5, 3) == ""
    assert caveat(3, 3).startswith("Judged from 3 widths: an exponent may be off by more")
    assert caveat(5, 1).startswith("Judged from one seed: ")
    assert caveat(3, 1).startswith("Judged from 3 widths and one seed: ")


def test_cells_leave_out_what_a_layer_does_not_have():
    assert cells({Term.UPDATE: GROWS}) == [("+1.00 ± 0.05", ""), ("grows", "bold red"), ("", ""), ("", "")]
