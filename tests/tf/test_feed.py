"""Passes begun, produced and consumed. The test plays TensorFlow."""

from __future__ import annotations

import itertools
import json
import threading
import time
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.audit.ledger import DIRECTORY_VARIABLE, close_current
from hetero.audit.reading import read_ledger
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.sampling import Shard
from hetero.tf.passes import Claim
from tests.support.tf import expected
from tests.support.tf.plain_feed import PlainFeed, PlainReader, epochs, train


def test_each_pass_is_the_next_epoch_with_and_without_reports() -> None:
    feed = PlainFeed()
    assert [*feed.produce(), *feed.produce()] == epochs(0, 1)
    assert (len(feed.readers), feed.num_living_readers()) == (2, 0)
    counted = PlainFeed()
    assert train(counted, counted.produce(), 5) + train(counted, counted.produce(), 5) == epochs(0, 1)


def test_pass_without_consumed_batches_did_not_happen() -> None:
    feed = PlainFeed()
    for _ in range(3):
        looked_at = feed.produce()
        assert [next(looked_at), next(looked_at)] == epochs(0, 0)[:2]
        looked_at.close()
    assert list(feed.produce()) == epochs(0, 0)
    again = feed.produce()
    next(again)
    again.close()
    assert list(feed.produce()) == epochs(1, 1)


def test_pass_that_was_left_after_a_step_is_followed_by_the_next_epoch() -> None:
    feed = PlainFeed()
    iterator = feed.produce()
    assert train(feed, iterator, 1) == epochs(0, 0)[:1]
    assert feed.num_living_readers() == 1
    iterator.close()
    assert feed.num_living_readers() == 0
    assert feed.place() == (0, 1)
    assert train(feed, feed.produce(), 2) == epochs(1, 1)[:2]
    assert feed.place() == (1, 2)


def test_state_is_what_was_consumed_however_far_ahead_batches_are_produced() -> None:
    feed = PlainFeed()
    feed.begin_training()
    passes = [feed.produce(), feed.produce()]
    ahead = [*passes[0], next(passes[1]), next(passes[1])]  # over the end of an epoch
    assert ahead == epochs(0, 1)[:7]
    places = []
    for _ in ahead:
        places.append(feed.place())
        feed.consume(1)
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1)]
    assert feed.place() == (1, 2)
    feed.consume(9)  # all were reported
    assert feed.place() == (1, 2)


@pytest.mark.parametrize("num_consumed", range(11))
def test_resumed_feed_continues_after_the_last_consumed_batch(num_consumed: int) -> None:
    feed = PlainFeed()
    iterator = feed.produce()
    found = train(feed, iterator, min(num_consumed, 5))
    next(iterator, None)  # asked for, and never consumed
    if num_consumed > 5:
        iterator = feed.produce()
        found += train(feed, iterator, num_consumed - 5)
    feed.consume(0)
    state = feed.state().to_dict()
    assert len(json.dumps(state)) < 1024
    resumed = PlainFeed()
    resumed.load_state(state)
    assert resumed.state() == feed.state()
    rest = [*resumed.produce(), *resumed.produce()]
    assert len(rest) > 5
    assert found + rest == epochs(0, 3)[: num_consumed + len(rest)]


def test_loaded_state_outlasts_a_look_at_the_first_batch() -> None:
    feed = PlainFeed()
    feed.load_state({**PlainFeed().state().to_dict(), "epoch": 4, "batches": 3})
    looked_at = feed.produce()
    next(looked_at)
    looked_at.close()
    feed.consume(0)
    assert feed.place() == (4, 3)
    assert [*feed.produce(), *feed.produce()] == epochs(4, 5)[3:]


def test_chosen_epoch_is_that_of_the_next_pass_and_older_passes_no_longer_count() -> None:
    feed = PlainFeed()
    older = feed.produce()
    train(feed, older, 2)
    feed.set_epoch(7)
    assert feed.place() == (7, 0)
    assert train(feed, older, 1) == epochs(0, 0)[2:3]
    assert feed.place() == (7, 0)
    assert list(feed.produce()) == epochs(7, 7)
    with pytest.raises(ConfigError, match="epoch is -1"):
        feed.set_epoch(-1)


def test_chosen_epoch_that_leaves_out_the_rest_of_a_loaded_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    state = {**PlainFeed().state().to_dict(), "epoch": 4, "batches": 3}
    for loaded, words in (
        (state, "skips the rest of epoch 4, because the loaded state is after 3"),
        ({**state, "batches": 5}, ""),
    ):
        caplog.clear()
        feed = PlainFeed()
        feed.load_state(loaded)
        feed.set_epoch(5)
        assert words in caplog.text
        assert bool(words) == bool(caplog.text)


def test_batches_asked_for_before_another_epoch_was_chosen_no_longer_count() -> None:
    feed, claim = PlainFeed(), Claim()
    feed.passes.expect(claim)
    counted, ahead = feed.produce(), feed.produce()
    assert [next(counted), next(ahead)] == [epochs(0, 0)[0], epochs(1, 1)[0]]
    feed.set_epoch(7)
    feed.await_batch()
    assert claim.tf_pass is not None
    feed.consume_from(claim.tf_pass)
    assert feed.place() == (7, 0)
    assert train(feed, feed.produce(), 1) == epochs(7, 7)[:1]
    assert feed.place() == (7, 1)


def test_pass_that_its_iterator_counts_is_not_reported_by_others() -> None:
    feed, claim = PlainFeed(), Claim()
    feed.passes.expect(claim)
    counted, other = feed.produce(), feed.produce()
    next(counted)
    assert train(feed, other, 1) == epochs(1, 1)[:1]
    assert feed.place() == (1, 1)
    feed.await_batch()
    assert claim.tf_pass is not None
    feed.consume_from(claim.tf_pass)
    assert feed.place() == (0, 1)  # of two passes, the one whose first batch was consumed last


def test_training_that_begins_leaves_behind_what_was_begun_before() -> None:
    feed = PlainFeed()
    list(feed.produce())  # an epoch without reports
    looked_at = feed.produce()
    next(looked_at)
    feed.begin_training()
    iterator = feed.produce()
    assert train(feed, iterator, 2) == epochs(1, 1)[:2]
    assert feed.place() == (1, 2)
    looked_at.close()  # late
    assert train(feed, iterator, 3) == epochs(1, 1)[2:]
    assert list(feed.produce()) == epochs(2, 2)


def test_whole_epoch_that_was_only_looked_at_after_an_announcement_did_not_happen() -> None:
    feed = PlainFeed()
    feed.announce_reports()
    looked_at = [feed.produce(), feed.produce()]
    assert [*looked_at[0], next(looked_at[1])] == epochs(0, 1)[:6]
    feed.begin_training()
    iterator, ahead = feed.produce(), feed.produce()
    assert train(feed, iterator, 5) == epochs(0, 0)
    assert list(ahead) == epochs(1, 1)  # prefetched, and not trained on
    feed.begin_training()
    assert train(feed, feed.produce(), 1) == epochs(1, 1)[:1]
    assert feed.place() == (1, 1)


def test_prefetched_batches_of_a_pass_that_ended_early_are_still_consumed() -> None:
    feed = PlainFeed()
    feed.begin_training()
    first = feed.produce()
    assert [next(first), next(first), next(first)] == epochs(0, 0)[:3]
    first.close()  # train(3).repeat().prefetch(8)
    second = feed.produce()
    assert next(second) == epochs(1, 1)[0]
    for place in [(0, 1), (0, 2), (0, 3), (1, 1)]:
        feed.consume(1)
        assert feed.place() == place


def test_pass_that_ended_before_its_first_report_did_happen() -> None:
    feed = PlainFeed()
    ahead = feed.produce()
    assert [next(ahead), next(ahead)] == epochs(0, 0)[:2]
    ahead.close()  # train(2).prefetch(8)
    assert feed.place() == (0, 0)
    feed.consume(1)
    feed.consume(1)
    assert feed.place() == (0, 2)
    assert list(feed.produce()) == epochs(1, 1)


def test_what_was_asked_for_ahead_is_left_behind_when_training_ends() -> None:
    feed = PlainFeed()
    feed.begin_training()
    assert train(feed, feed.produce(), 5) == epochs(0, 0)
    ahead = feed.produce()  # repeat().prefetch(1)
    assert next(ahead) == epochs(1, 1)[0]
    feed.end_training()
    assert feed.place() == (0, 5)
    assert next(feed.produce()) == epochs(1, 1)[0]
    ahead.close()  # late


@pytest.mark.parametrize(("requests_next_epoch", "num_requested"), [(True, 8), (False, 5)])
def test_first_batches_of_the_next_epoch_are_requested_unless_the_script_forbids_it(
    requests_next_epoch: bool, num_requested: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithWindow(PlainReader):
        """Has three requests in flight that it has not answered."""

        may_be_kept = is_open = True

        def __init__(self, requests: Iterator[Any]) -> None:
            super().__init__(look_ahead(requests))

    def look_ahead(requests: Iterator[Any]) -> Iterator[Any]:
        window = deque(itertools.islice(requests, 3))
        while window:
            window.extend(itertools.islice(requests, 1))
            yield window.popleft()

    feed = PlainFeed(requests_next_epoch=requests_next_epoch)
    monkeypatch.setattr("tests.support.tf.plain_feed.PlainReader", WithWindow)
    for _ in feed.produce():
        pass
    assert feed.extent.num_requested == num_requested


def test_place_without_reports_is_an_error() -> None:
    feed = PlainFeed()
    assert feed.place() == (0, 0)
    iterator = feed.produce()
    next(iterator)
    with pytest.raises(ConfigError, match=r"the script does not report(.|\n)*callbacks=\[data.callback\(\)\]"):
        feed.state()
    feed.consume(1)
    assert feed.place() == (0, 1)


def test_passes_without_reports_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.tf.passes._MAX_UNREPORTED", 12)
    feed = PlainFeed()  # a validation set, say
    assert [batch for _ in range(20) for batch in feed.produce()] == epochs(0, 19)
    num_remembered, each = 0, feed.passes._latest
    while each is not None:
        num_remembered, each = num_remembered + 1, each.previous
    assert max(num_remembered, len(feed.passes._open)) <= 5
    with pytest.raises(ConfigError, match="the script does not report"):
        feed.state()


def test_state_of_another_dataset_is_refused() -> None:
    state = PlainFeed().state().to_dict()
    for other, words in (
        (PlainFeed(seed=4), "seed 3, this loader has 4"),
        (PlainFeed(num_samples=11), "num_samples 10"),
        (PlainFeed(shuffle=False), "order shuffled"),
        (PlainFeed(batch_size=4), "global_batch 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            other.load_state(state)


@pytest.mark.parametrize("padding", [True, False])
def test_ranks_share_an_epoch_and_a_state(monkeypatch: pytest.MonkeyPatch, padding: bool) -> None:
    found, places = [], set()
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        feed = PlainFeed(num_samples=9, padding=padding)
        iterator = feed.produce()
        batches = train(feed, iterator, feed.num_batches())
        assert next(iterator, None) is None
        found += [index for batch in batches for index in batch]
        places.add(feed.place())
    assert sorted(set(found)) == list(range(9))
    assert len(found) == (10 if padding else 9)
    assert places == {(0, 3)}


def test_rank_that_has_a_batch_less_than_others_has_their_state_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    feed = PlainFeed(num_samples=5, batch_size=2, padding=False)  # the second global batch is a sample of rank 0
    of_rank = expected.indices(5, epoch=0, batch_size=2, seed=3, shuffle=True, shard=Shard(1, 2))
    assert train(feed, feed.produce(), 1) == of_rank[:1]
    assert feed.num_batches() == 1
    assert feed.place() == (0, 2)


def test_rank_without_batches_left_has_the_state_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    feed = PlainFeed(num_samples=5, batch_size=2, padding=False)
    feed.load_state({**feed.state().to_dict(), "batches": 1})
    assert list(feed.produce()) == []
    assert feed.place() == (0, 2)
    of_rank = expected.indices(5, epoch=1, batch_size=2, seed=3, shuffle=True, shard=Shard(1, 2))
    assert train(feed, feed.produce(), 1) == of_rank[:1]


def test_ledger_has_what_was_consumed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_current()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    feed = PlainFeed()
    feed.begin_training()
    ahead = list(feed.produce())
    feed.consume(3)
    close_current()
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    assert len(ahead) == 5
    entries = read_ledger(tmp_path / "ledger-rank-0.jsonl").entries
    assert entries["position"].tolist() == [0, 1, 2]


def test_steps_are_measured_from_the_question_to_the_batch() -> None:
    feed = PlainFeed(num_samples=5)
    iterator = feed.produce()
    train(feed, iterator, 3)
    feed.pause()
    feed.begin_training()
    ahead = feed.produce()
    list(ahead)  # there before they are asked for
    for _ in range(3):
        feed.begin_step()
        feed.consume(1)
    summary = feed.timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (6, 10, 2)


def test_step_waits_until_its_batch_is_produced_and_computes_until_it_is_consumed() -> None:
    feed = PlainFeed()
    feed.timer.warmup_steps = 0
    iterator = feed.produce()
    for _ in range(3):
        feed.begin_step()
        time.sleep(0.02)
        next(iterator)
        time.sleep(0.06)
        feed.consume(1)
    summary = feed.timer.summary()
    assert summary.num_steps_measured == 2
    assert summary.data_wait_total_s >= 2 * 0.02
    assert summary.compute_total_s >= 2 * 0.06


def test_wait_that_ended_with_a_failure_is_no_step() -> None:
    feed = PlainFeed()
    readable = feed.convert

    def refuse(batch: Any) -> Any:
        raise ConfigError(f"no element: {batch}")

    feed.convert = refuse
    feed.begin_training()
    feed.begin_step()
    with pytest.raises(ConfigError, match="no element"):
        next(feed.produce())
    feed.convert = readable
    assert next(feed.produce()) == epochs(0, 0)[0]  # the script goes on without the callback
    assert feed.timer.summary().num_steps == 0


def test_failure_is_kept_for_the_script() -> None:
    feed = PlainFeed()

    def refuse(batch: Any) -> Any:
        raise ConfigError(f"no element: {batch}")

    feed.convert = refuse
    with pytest.raises(ConfigError, match="no element") as caught:
        next(feed.produce())
    assert feed.num_living_readers() == 0
    assert str(caught.value).startswith("no element")


def test_batches_before_one_that_fails_may_be_consumed_after_the_failure() -> None:
    feed = PlainFeed(shuffle=False)

    def refuse_the_third(batch: list[int]) -> list[int]:
        if batch == [4, 5]:
            raise ConfigError("no element")
        return batch

    feed.convert = refuse_the_third
    iterator = feed.produce()
    assert [next(iterator), next(iterator)] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="no element"):
        next(iterator)
    feed.consume(1)
    feed.consume(1)
    assert feed.place() == (0, 2)


def test_end_of_a_pass_waits_for_no_lock() -> None:
    feed = PlainFeed()
    left = feed.produce()
    next(left)
    with feed.passes.hold():  # meanwhile the collector drops an iterator, and TensorFlow ends its pass elsewhere
        ending = threading.Thread(target=left.close, daemon=True)
        ending.start()
        ending.join(100.0)
        assert not ending.is_alive()
    assert feed.num_living_readers() == 0
    assert feed.place() == (0, 0)
    assert list(feed.produce()) == epochs(0, 0)  # no batch was consumed, so it did not happen


def test_batches_of_processes_of_its_own_are_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PlainFeed(compression="lz4").options.compression is None
    monkeypatch.setattr(control, "_session", types.SimpleNamespace(remote=True))
    assert PlainFeed(compression="lz4").options.compression == "lz4"


def test_two_batches_to_look_at_differ_in_size_and_are_no_pass() -> None:
    feed = PlainFeed(batch_size=4)
    assert feed.probe() == [(4, [0, 1, 2, 3]), (2, [9, 8])]
    assert PlainFeed(batch_size=1).probe() == [(1, [0]), (2, [9, 8])]
    assert PlainFeed(num_samples=1, batch_size=8).probe() == [(1, [0]), (2, [0, 0])]
    assert list(feed.produce()) == epochs(0, 0, batch_size=4)
    with pytest.raises(ConfigError, match="has no samples"):
        PlainFeed(num_samples=0).probe()


def test_skip_begins_the_next_pass_later(caplog: pytest.LogCaptureFixture) -> None:
    trained = PlainFeed()
    train(trained, trained.produce(), 1)
    feed = PlainFeed()
    feed.load_state(trained.state().to_dict())
    with caplog.at_level("INFO"):
        feed.skip(2)
    assert "the next pass begins 2 batches later, at batch 3" in caplog.text
    assert feed.place() == (0, 3)
    # What Keras takes to build a model changes nothing.
    next(feed.produce())
    assert train(feed, feed.produce(), 2) == epochs(0, 0)[3:]
    # The next epoch is whole, unless batches of it are skipped too.
    feed.skip(1)
    assert train(feed, feed.produce(), 4) == epochs(1, 1)[1:]
    assert train(feed, feed.produce(), 1) == epochs(2, 2)[:1]
    with pytest.raises(ConfigError, match="within a pass"):
        feed.skip(1)
    feed.set_epoch(5)
    with pytest.raises(ConfigError, match="after batch 6 of epoch 5, an epoch has 5"):
        feed.skip(6)


def test_skip_needs_reports() -> None:
    feed = PlainFeed()
    list(feed.produce())
    with pytest.raises(ConfigError, match="does not report which batches"):
        feed.skip(1)
