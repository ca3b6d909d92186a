"""Predictions of order, starts, finishes and work, and what is learned for them."""

import random

import pytest

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import least_slack, shortest_first
from noria.scheduling.step.forecast import forecast_head
from noria.scheduling.step.predictor import CompletionPredictor
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, ItemId, IterationResult, RequestFinished, SchedulableRequest

MODEL = ModelKey("m")

SMALL, LARGE = BatchKey(64, 64, MODEL), BatchKey(128, 64, MODEL)


def make_request(name, calls=5, images=1, batch_key=SMALL, **more):
    return SchedulableRequest(name, batch_key, images, calls, None, **more)


def make_predictor(num_slots=2, max_rows=8, policy=least_slack):
    """A call takes a second for each row."""
    costs = CostModel(max_rows, {batch_key: CostCurve({1: 1.0, 8: 8.0}) for batch_key in (SMALL, LARGE)})
    return CompletionPredictor(RequestTable(num_slots), costs, policy, num_slots, 4)


def test_a_request_starts_with_its_first_image_and_finishes_with_its_last():
    predictor = make_predictor()
    predictor.table.add(make_request("a", images=3), 0.0)
    at = predictor.predict_requests(["a"], 0.0)["a"]
    assert (at.start_in_s, at.finish_in_s) == (0.0, 15.0)


def test_both_stages_take_as_long_as_predicted():
    costs = CostModel(8, {SMALL: CostCurve({1: 1.0, 2: 1.5}), SMALL._replace(stage=1): CostCurve({1: 3.0, 2: 4.0})})
    costs.decodes[SMALL] = CostCurve({1: 0.5, 2: 0.75})
    scheduler, ended, now = StepScheduler(4, costs=costs), {}, 0.0
    for name, calls, second_stage_from in (("a", 4, 3), ("b", 4, 3), ("c", 2, None)):
        scheduler.submit(make_request(name, calls, second_stage_from=second_stage_from), now)
    predicted = {name: each.finish_in_s for name, each in scheduler._predictor.predict_requests("abc", now).items()}
    table = scheduler._table
    while (plan := scheduler.plan(now)) is not None:
        seconds = costs.decode_s(SMALL, len(plan.decodes))
        if plan.steps:
            seconds += costs.step_s(table.running[plan.steps[0].image].step_key, len(plan.steps))
        now += seconds
        for event in scheduler.commit(plan, IterationResult(is_timed=False), now):
            if isinstance(event, RequestFinished):
                ended[event.attempt_id] = now
    assert ended == pytest.approx(predicted)
    # Steps of three rows take 2 s, twice, then a decode; steps of two rows take 1.5 s and 4 s, then a decode of two.
    assert ended == pytest.approx({"c": 4.5, "a": 10.75, "b": 10.75})


def test_a_second_pass_in_the_size_of_the_first_one_is_decoded_once():
    predictor = make_predictor()
    predictor.costs.decodes = {SMALL: CostCurve({1: 0.5})}
    request = make_request("a", 5, second_stage_from=3, second_stage_px=(SMALL.width_px, SMALL.height_px))
    predictor.table.add(request, 0.0)
    expected_s = pytest.approx(5.0 + 0.5)
    assert (predictor.backlog_s, predictor.device_time_s(request), predictor.unloaded_s(request)) == (expected_s,) * 3
    assert predictor.predict_requests(["a"], 0.0)["a"].finish_in_s == expected_s


def test_a_stage_without_measurements_costs_as_the_other_and_work_counts_both():
    predictor = make_predictor()
    request = make_request("a", 5, second_stage_from=1)
    assert predictor.device_time_s(request) == pytest.approx(5.0)
    predictor.costs.steps[SMALL._replace(stage=1)] = CostCurve({1: 4.0, 8: 32.0})
    assert predictor.device_time_s(request) == pytest.approx(1.0 + 4 * 4.0)
    assert predictor.unloaded_s(request) == pytest.approx(1.0 + 4 * 4.0)
    predictor.table.add(request, 0.0)
    assert predictor.predict_requests(["a"], 0.0)["a"].finish_in_s == pytest.approx(1.0 + 4 * 4.0)


def test_predictions_are_cached_until_the_table_changes():
    predictor = make_predictor()
    predictor.table.add(make_request("a"), 0.0)
    assert predictor._predict(0.0) is predictor._predict(1.0)
    predictor.table.assign(ItemId("a", 0), 1.0)
    predictor.table.record_steps([ItemId("a", 0)], 1)
    assert predictor.predict_requests(["a"], 1.0)["a"].finish_in_s == 4.0


def test_queue_positions_count_the_images_that_join_before():
    predictor = make_predictor()
    predictor.table.add(make_request("a", images=2), 0.0)
    predictor.table.add(make_request("urgent", deadline=20.0), 0.0)
    queue, requests = predictor.queue(0.0), predictor.table.requests
    assert [each.image for each in queue] == [("urgent", 0), ("a", 0), ("a", 1)]
    assert [queue.ahead_of(requests[name].last_rank).num_images for name in ("urgent", "a")] == [0, 2]


@pytest.mark.parametrize(("call_size", "finish_in_s"), [((0, 0), 5.0), (None, 10.0)])
def test_forecasts_know_which_sizes_share_calls(call_size, finish_in_s):
    predictor = make_predictor()
    predictor.costs.steps = {key: CostCurve({1: 1.0, 8: 1.0}) for key in (SMALL, LARGE)}  # rows cost nothing
    for name, batch_key in (("small", SMALL), ("large", LARGE)):
        predictor.table.add(make_request(name, batch_key=batch_key, call_size=call_size), 0.0)
    predicted = predictor.predict_requests(["small", "large"], 0.0)
    assert max(each.finish_in_s for each in predicted.values()) == finish_in_s


def test_predict_without_changes_neither_the_table_nor_later_predictions():
    predictor = make_predictor(num_slots=4)
    predictor.table.add(make_request("before"), 0.0)
    alone = predictor.predict_uncorrected("before", 0.0)
    active = predictor.table.add(make_request("last"), 0.0)

    def state():
        return predictor.predict_requests(["before", "last"], 0.0), [each.image for each in predictor.table.queue]

    before = state()
    assert predictor.predict_without(active, ["before"], 0.0) == {"before": alone}
    assert before == state()


def test_the_expected_batch_size_is_averaged_over_iterations_and_decays_when_idle():
    predictor = make_predictor()
    for iteration in range(300):
        predictor.record_iteration({SMALL}, SMALL, 6, 0.1, now=0.1 * iteration)
    predictor.table.add(make_request("a", calls=2), 0.0)
    assert predictor.predict_requests(["a"], 30.0)["a"].finish_in_s == 12.0
    predictor.table.remove("a")
    predictor.decay(29.9 + 3.0)  # thirty iterations later
    predictor.table.add(make_request("a", calls=2), 0.0)
    assert predictor.predict_requests(["a"], 33.0)["a"].finish_in_s == 4.0  # 6 / e rows


def test_decay_does_not_depend_on_how_often_it_is_called():
    one, other = make_predictor(), make_predictor()
    for predictor in (one, other):
        predictor.record_iteration({SMALL}, SMALL, 300, 0.1, now=0.0)
    one.decay(3.0)
    for now in (1.0, 2.0, 3.0):
        other.decay(now)
    for predictor in (one, other):
        predictor.table.add(make_request("a"), 3.0)
    assert one.predict_requests(["a"], 3.0) == other.predict_requests(["a"], 3.0)


def test_decay_before_the_first_iteration_does_nothing():
    predictor = make_predictor()
    predictor.decay(5.0)
    predictor.table.add(make_request("a"), 5.0)
    assert predictor.predict_requests(["a"], 5.0)["a"].finish_in_s == 5.0


def test_the_expected_batch_size_of_a_key_without_running_images_decays_while_others_run():
    predictor = make_predictor()
    predictor.record_iteration({LARGE}, LARGE, 240, 0.1, now=0.0)
    predictor.table.add(make_request("runs", batch_key=SMALL), 0.0)
    predictor.table.assign(ItemId("runs", 0), 0.0)
    for iteration in range(300):
        predictor.record_iteration({SMALL}, SMALL, 1, 0.1, now=0.1 * iteration)
    predictor.table.remove("runs")
    predictor.table.add(make_request("later", batch_key=LARGE, calls=2), 30.0)
    assert predictor.predict_requests(["later"], 30.0)["later"].finish_in_s == 2.0


def test_finishes_later_than_predicted_lengthen_predictions():
    predictor = make_predictor()
    active = predictor.table.add(make_request("a"), 0.0)
    predictor.record_finished(active, 7.5)  # it has no forecast
    active.promised_forecast = predictor.predict_uncorrected("a", 0.0)
    for _ in range(200):
        predictor.record_finished(active, 7.5)
    assert predictor.predict_requests(["a"], 0.0)["a"].finish_in_s == pytest.approx(7.5, rel=0.01)


def test_predictions_come_true_for_a_client_beside_one_that_keeps_many_requests_in_flight():
    """The many wait for images that the other client sends later; that must not change what it is shown."""
    costs = CostModel(8, {SMALL: CostCurve({rows: 0.010 + 0.010 * rows for rows in range(1, 9)})})
    scheduler, now, predicted, ratios = StepScheduler(8, costs=costs), 0.0, {}, {"one": [], "many": []}
    upcoming = ["one"] + 80 * ["many"]
    while len(ratios["one"]) < 60:
        for client in upcoming:
            request = make_request(f"{client}{len(predicted)}", 20 if client == "one" else 8, client=client)
            assert not scheduler.submit(request, now)
            name = request.attempt_id
            predicted[name] = client, now, scheduler.progress([name], now)[name].finish_in_s
        plan, upcoming = scheduler.plan(now), []
        now += costs.step_s(SMALL, len(plan.steps))
        for event in scheduler.commit(plan, IterationResult(is_timed=False), now):
            if isinstance(event, RequestFinished):
                client, sent_at, finish_in_s = predicted[event.attempt_id]
                ratios[client].append((now - sent_at) / finish_in_s)
                upcoming.append(client)
    for client, num_learned in (("one", 1), ("many", 200)):  # the many are known once those sent first have ended
        later = ratios[client][num_learned:]
        assert sum(abs(ratio - 1.0) <= 0.15 for ratio in later) >= 0.9 * len(later), client


@pytest.mark.parametrize("policy", [least_slack, shortest_first])
def test_requests_behind_the_simulated_head_are_predicted_to_within_a_fifth(policy):
    rng = random.Random(1)
    curve = {1: 1.0, 4: 1.3, 8: 2.0}
    costs = CostModel(8, {key: CostCurve(dict(curve)) for key in (SMALL, LARGE)}, {SMALL: CostCurve({1: 0.5, 4: 1.5})})
    predictor = CompletionPredictor(RequestTable(8), costs, policy, 8, 4)
    names = [f"r{number}" for number in range(300)]
    for name in names:
        fields = {"calls": rng.randrange(10, 40), "images": rng.randrange(1, 3), "rows": rng.randrange(1, 3)}
        predictor.table.add(make_request(name, batch_key=rng.choice([SMALL, LARGE]), **fields), 0.0)
    near = predictor.predict_requests(names, 0.0)
    predictor.head_images = 10**6
    predictor.table.bump_version()
    exact = predictor.predict_requests(names, 0.0)
    ratios = [near[name].finish_in_s / exact[name].finish_in_s for name in names]
    assert 0.8 < min(ratios) <= max(ratios) < 1.2
    assert sum(abs(ratio - 1) < 0.05 for ratio in ratios) > 0.7 * len(names)


def test_a_key_that_changes_while_its_request_waits_is_updated():
    predictor = make_predictor()
    predictor.table.add(make_request("hopeless", calls=10, deadline=11.0), 0.0)
    for number in range(20):
        predictor.table.add(make_request(f"r{number}"), 0.0)
    assert next(iter(predictor.queue(0.0))).image.attempt_id == "hopeless"
    assert next(iter(predictor.queue(5.0))).image.attempt_id == "r0"
    predictor.costs.slowdown = 0.1  # now it can be met again
    predictor.renew_costs()
    for _ in range(6):  # keys are updated in turn
        predictor.queue(5.0)
    assert next(iter(predictor.queue(5.0))).image.attempt_id == "hopeless"


def test_of_hundreds_of_images_in_slots_those_that_step_soon_are_simulated(monkeypatch):
    """A call has room for 8 of 400 equal images: the others are paused, and each finishes after those before it."""
    simulated = []
    monkeypatch.setattr(
        "noria.scheduling.step.predictor.forecast_head",
        lambda images, *more: simulated.append(len(images)) or forecast_head(images, *more),
    )
    predictor = make_predictor(num_slots=512)
    names = [f"r{number}" for number in range(400)]
    for number, name in enumerate(names):
        predictor.table.add(make_request(name), float(number))
    predictor.queue(400.0)
    for name in names:
        predictor.table.assign(ItemId(name, 0), 400.0)
    finishes = [each.finish_in_s for each in predictor.predict_requests(names, 400.0).values()]
    assert simulated == [64]
    assert finishes == sorted(finishes)
    assert finishes[-1] == pytest.approx(400 * 5.0, rel=0.1)


def test_calls_that_enlarge_pixels_between_two_passes_take_as_long_as_predicted():
    predictor, tile, encode = make_predictor(), BatchKey(288, 288, MODEL, 9), LARGE._replace(stage=3)
    predictor.costs.steps |= {
        LARGE: CostCurve({1: 4.0, 8: 32.0}),
        tile: CostCurve({1: 0.3, 8: 2.4}),
        encode: CostCurve({1: 7.0}),
    }
    predictor.costs.decodes = {SMALL: CostCurve({1: 0.5}), LARGE: CostCurve({1: 2.0})}
    second = {"second_stage_px": (LARGE.width_px, LARGE.height_px), "between": ((tile, 5), (encode, 1))}
    request = make_request("a", 11, second_stage_from=9, **second)
    assert [request.step_key(call) for call in range(11)] == [SMALL] * 3 + [tile] * 5 + [encode] + [LARGE] * 2
    expected_s = pytest.approx(3.0 + 5 * 0.3 + 7.0 + 2 * 4.0 + 2.0)
    assert (predictor.device_time_s(request), predictor.unloaded_s(request)) == (expected_s, expected_s)
    predictor.table.add(request, 0.0)
    assert predictor.backlog_s == expected_s
    assert predictor.predict_requests(["a"], 0.0)["a"].finish_in_s == expected_s
    predictor.table.assign(ItemId("a", 0), 0.0)
    for made, left_s in ((4, 4 * 0.3 + 7.0 + 8.0 + 2.0), (4, 7.0 + 8.0 + 2.0), (1, 8.0 + 2.0)):
        for _ in range(made):
            predictor.table.record_steps([ItemId("a", 0)], 1)
        assert predictor.predict_requests(["a"], 0.0)["a"].finish_in_s == pytest.approx(left_s)
