"""Plans for which models to load and unload, without processes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from firn.fleet.memory import Room
from firn.fleet.placement import NEVER, FleetPlan, ModelState, ModelView, PlacementRules, make_plan

RULES = PlacementRules(min_stay_s=2, turn_loads=10, turn_min_s=10, turn_max_s=120, hold_max_s=15)
NOW = 1000.0


def plan(*models: ModelView, budget: int = 100, free: float = NEVER, now: float = NOW) -> FleetPlan:
    return make_plan(models, Room(budget, free), RULES, now=now)


def wanted(name: str = "new", *, need: int = 50, since: float = NOW, **more: object) -> ModelView:
    return replace(ModelView(name, need_nbytes=need, waiting_since=since), **more)  # type: ignore[arg-type]


def loaded(name: str, *, need: int = 50, used: float = NOW - 60, **more: object) -> ModelView:
    view = ModelView(
        name, ModelState.LOADED, need_nbytes=need, loaded_at=NOW - 100, last_used=used, load_s=4
    )
    return replace(view, **more)  # type: ignore[arg-type]


def test_a_model_that_fits_is_loaded() -> None:
    assert plan(wanted("a"), wanted("b")).load == ("a", "b")
    assert plan(loaded("a"), wanted("b")).load == ("b",)


def test_without_requests_the_plan_is_empty() -> None:
    assert plan(ModelView("a"), loaded("b")) == FleetPlan()


def test_an_idle_model_is_unloaded_after_its_keep_alive() -> None:
    soon = loaded("a", expires_at=NOW + 5)
    assert plan(soon) == FleetPlan(replan_at=NOW + 5)
    late = replace(soon, expires_at=NOW)
    assert plan(late).unload == (("a", "idle"),)
    for busy in ({"n_active": 1}, {"waiting_since": NOW - 1}, {"pinned": True}):
        assert plan(replace(late, **busy)).unload == ()  # type: ignore[arg-type]


def test_the_least_recently_used_makes_room() -> None:
    old, new = loaded("old", used=NOW - 50), loaded("new", used=NOW - 10)
    assert plan(new, old, wanted("c")).unload == (("old", "room"),)
    assert plan(new, old, wanted("c")).load == ()  # its memory is not free yet
    going = replace(old, state=ModelState.DRAINING)
    assert plan(new, going, wanted("c")) == FleetPlan()
    assert plan(new, wanted("c")).load == ("c",)


def test_no_more_models_are_unloaded_than_needed() -> None:
    small = [loaded(f"s{i}", need=25, used=NOW - 90 + i) for i in range(4)]
    unloaded = plan(*small, wanted("big", need=60)).unload
    assert unloaded == (("s0", "room"), ("s1", "room"), ("s2", "room"))


def test_pinned_and_busy_models_stay() -> None:
    pinned, busy = loaded("p", pinned=True), loaded("b", n_active=1)
    made = plan(pinned, busy, wanted("c"))
    assert (made.load, made.unload, made.close) == ((), (), ())


def test_a_model_stays_for_its_minimum_time() -> None:
    fresh = loaded("a", need=100, loaded_at=NOW - 1, used=NOW - 0.5)
    made = plan(fresh, wanted("b"))
    assert made.unload == ()
    assert made.replan_at == NOW + 1
    assert plan(fresh, wanted("b"), now=NOW + 1).unload == (("a", "room"),)


def test_no_other_model_takes_the_room_that_is_being_made() -> None:
    """A small model waits while room is made for a large one, unless nothing can be unloaded."""
    busy = loaded("busy", need=60, n_active=1)
    large, small = wanted("large", need=90, since=NOW - 3), wanted("small", need=30)
    assert plan(busy, large, small).load == ("small",)
    idle = replace(busy, n_active=0)
    clearing = plan(idle, large, small)
    assert (clearing.load, clearing.unload) == ((), (("busy", "room"),))
    assert plan(replace(idle, state=ModelState.DRAINING), large, small).load == ()
    patient = replace(large, waiting_since=NOW - 300)
    assert plan(busy, patient, small).load == ()
    assert plan(busy, patient, small).close == ("busy",)
    assert plan(busy, large, replace(small, waiting_since=NOW - 9)).load == ("small",)


def test_the_machines_free_memory_counts() -> None:
    assert plan(wanted("a", need=50), free=40).load == ()
    assert plan(wanted("a", need=50), free=50).load == ("a",)
    idle = loaded("idle", need=20)
    assert plan(idle, wanted("a", need=50), free=40).unload == (("idle", "room"),)


def test_a_model_that_failed_is_not_loaded_before_its_time() -> None:
    failed = wanted("a", not_before=NOW + 8)
    assert plan(failed) == FleetPlan(replan_at=NOW + 8)
    assert plan(failed, wanted("b")).load == ("b",)


def test_a_busy_model_is_closed_when_its_turn_is_over() -> None:
    busy = loaded("busy", need=100, n_active=3, used=NOW)
    early = plan(busy, wanted("other", since=NOW - 39))
    assert early.close == ()
    assert early.replan_at == NOW + 1  # 10 times the 4 s that loading takes
    over = plan(busy, wanted("other", since=NOW - 40))
    assert over.close == ("busy",)
    assert over.unload == ()
    assert over.contested == (("other", "busy"),)
    waiting = replace(busy, waiting_since=NOW - 5)
    assert plan(waiting, wanted("other", since=NOW - 40)).close == ("busy",)
    ended = replace(waiting, n_active=0)
    assert plan(ended, wanted("other", since=NOW - 40)).unload == (("busy", "room"),)


def test_no_model_is_closed_if_that_would_not_make_enough_room() -> None:
    pinned = loaded("pinned", need=60, pinned=True)
    busy = loaded("busy", need=40, n_active=1)
    assert plan(pinned, busy, wanted("other", need=50, since=NOW - 500)).close == ()


def test_a_contested_place_is_held_as_long_as_loading_takes() -> None:
    """The other model made room a moment ago and has requests again."""
    idle = loaded("a", need=100, used=NOW - 1)
    calm = wanted("b")
    assert plan(idle, calm).unload == (("a", "room"),)
    again = replace(calm, displaced_at=NOW - 20)
    made = plan(idle, again)
    assert made.unload == ()
    assert made.replan_at == NOW + 3
    assert made.contested == (("b", "a"),)
    assert plan(idle, again, now=NOW + 3).unload == (("a", "room"),)
    long_ago = replace(calm, displaced_at=NOW - 61)
    assert plan(idle, long_ago).unload == (("a", "room"),)


def test_a_hold_that_was_for_nothing_is_shorter_the_next_time() -> None:
    idle = loaded("a", need=100, used=NOW - 1)
    again = wanted("b", displaced_at=NOW - 20)
    assert plan(idle, again).held_in_vain == ()
    assert plan(idle, again, now=NOW + 3).held_in_vain == ("a",)
    assert plan(idle, replace(again, displaced_at=-NEVER)).held_in_vain == (), "it was not held"
    quarter = replace(idle, hold_share=0.25)  # of the four seconds that loading takes
    assert plan(quarter, again).unload == (("a", "room"),)


def test_nothing_is_unloaded_for_a_model_that_may_not_load() -> None:
    new = wanted("new", is_proven=False)
    full = (loaded("a"), loaded("b"))
    assert plan(*full, new) == FleetPlan(check=("new",))
    assert plan(loaded("a"), new).load == ("new",), "there is room: loading it shows whether it can"
    assert plan(*full, replace(new, is_proven=True)).unload == (("a", "room"),)
    later = wanted("small", need=10, since=NOW + 1)
    assert plan(loaded("a", need=80), new, later).load == ("small",), "no room is being made yet"


def test_idle_models_are_unloaded_when_memory_is_overdrawn() -> None:
    grown, idle = loaded("grown", need=80, n_active=1), loaded("idle", need=40)
    assert plan(grown, idle).unload == (("idle", "room"),)
    others = [loaded(name, need=15, used=NOW - 60 + i) for i, name in enumerate("abc")]
    assert plan(grown, *others).unload == (("a", "room"), ("b", "room")), "as few as will do"


views = st.builds(
    ModelView,
    name=st.just(""),
    state=st.sampled_from(ModelState),
    pinned=st.booleans(),
    need_nbytes=st.integers(1, 80),
    n_active=st.integers(0, 1),
    waiting_since=st.sampled_from([NEVER, NOW - 300, NOW - 20, NOW]),
    loaded_at=st.sampled_from([NOW - 200, NOW - 1]),
    last_used=st.sampled_from([NOW - 100, NOW - 3, NOW]),
    expires_at=st.sampled_from([NEVER, NOW - 1, NOW + 9]),
    load_s=st.floats(0.1, 30),
    not_before=st.sampled_from([0.0, NOW + 5]),
    displaced_at=st.sampled_from([-NEVER, NOW - 30]),
)


@given(st.lists(views, max_size=6), st.integers(0, 200))
def test_every_plan_keeps_its_rules(models: list[ModelView], free: int) -> None:
    models = [replace(v, name=str(i)) for i, v in enumerate(models)]
    by_name = {v.name: v for v in models}
    made = plan(*models, free=free)
    gone = [by_name[name] for name, _ in made.unload]
    assert all(v.state is ModelState.LOADED and v.n_active == 0 and not v.pinned for v in gone)
    assert all(by_name[name].state is ModelState.UNLOADED for name in made.load)
    assert all(by_name[name].n_active for name in made.close)
    assert not any(by_name[name].pinned for name in made.close)
    used = sum(v.need_nbytes for v in models if v.holds_memory)
    taken = sum(by_name[name].need_nbytes for name in made.load)
    assert not made.load or used + taken <= 100
    assert not made.load or taken <= free
    assert made.replan_at > NOW
    assert len({name for name, _ in made.unload}) == len(made.unload)
