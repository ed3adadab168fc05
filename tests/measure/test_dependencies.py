"""The order of probes follows from what they declare, and so does what is lost when one of them fails."""

import itertools

import pytest

from forewarn.measure.dependencies import Dependencies
from forewarn.measure.probe import Probe
from forewarn.measure.step import Step


class A: ...


class B: ...


class C: ...


def probe(name, provides=(), needs=None):
    return type(name.title(), (Probe,), {"name": name, "provides": provides, "needs": needs or {}})()


def names(probes):
    return [one.name for one in probes]


def chain():
    return [
        probe("free"),
        probe("first", [A]),
        probe("second", [B], {A: ["family/second"]}),
        probe("third", [], {B: ["family/third"], A: []}),
        probe("other", [C]),
        probe("last", [], {C: ["family/last"]}),
    ]


def test_probes_that_are_in_order_stay_as_they_are():
    assert names(Dependencies(chain()).order) == names(chain())


def test_in_whatever_order_they_are_given_a_provider_comes_before_those_that_need_it():
    for given in itertools.permutations(chain()):
        order = names(Dependencies(given).order)
        assert sorted(order) == sorted(names(given))
        assert order.index("first") < order.index("second") < order.index("third")
        assert order.index("other") < order.index("last")


def test_a_circle_is_an_error_that_names_it():
    circle = [probe("a", [A], {B: []}), probe("free"), probe("b", [B], {C: []}), probe("c", [C], {A: []})]
    with pytest.raises(ValueError, match="in a circle: 'a' needs 'b' needs 'c' needs 'a'"):
        Dependencies(circle)
    with pytest.raises(ValueError, match="'self' needs 'self'"):
        Dependencies([probe("self", [A], {A: []})])


def test_a_need_that_nobody_provides_is_an_error_that_says_whose():
    with pytest.raises(ValueError, match="probe 'lonely' needs A, which no probe provides"):
        Dependencies([probe("lonely", [], {A: []}), probe("other", [B])])


def test_two_providers_of_the_same_are_an_error():
    with pytest.raises(ValueError, match="probes 'one' and 'two' both provide A"):
        Dependencies([probe("one", [A]), probe("two", [A])])


def test_what_builds_on_a_failed_probe_is_lost_through_others_too():
    probes = chain()
    running = [one for one in probes if one.name != "first"]
    assert list(Dependencies(probes).lost(Step(), running)) == ["family/second", "family/third"]


def test_a_fact_that_was_provided_before_its_probe_failed_is_not_lost():
    probes, step = chain(), Step()
    step.provide(A())
    running = [one for one in probes if one.name != "first"]
    assert list(Dependencies(probes).lost(step, running)) == []


def test_a_probe_without_news_on_a_step_is_no_failure():
    probes = chain()
    assert list(Dependencies(probes).lost(Step(), probes)) == []
