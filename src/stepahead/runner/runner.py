"""How a step is run: stage the plan, run the model, sample, stash, copy out.

Three streams.  *schedule* brings the plan to the device and writes the page tables, behind the
fence.  *forward* runs the model, then samples.  *copy* takes results out.

    schedule   copy in | page tables            fence: page tables wait for the model of step n-1
                                  \\
    forward                        model | sample      the fence's event lies between the two
                                                \\
    copy                                         results out, then the flight's own event

Rows that wait for masks are sampled behind the others, and have a copy in, a copy out and an event
of their own; they are given to the device when their masks are there, before the next forward.

Where the model is cut into stages this is one of them: only the first has input tokens, and only
the last samples and has results.

The host never waits here but for reasons that `SyncReason` names; it waits in a flight's `land`,
for that flight only.  Knows no users and no queues.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stepahead.device.base import Device, Event, Stream, Work
from stepahead.plan import Plan
from stepahead.runner.arrival import Arrival, pulled_back, waits
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.decode import build_decode
from stepahead.runner.draft import build_drafter
from stepahead.runner.ends import eos_table
from stepahead.runner.fence import Fence
from stepahead.runner.flight import (
    Landing,
    LateFlight,
    Masks,
    Nothing,
    Once,
    PartBox,
    PartDownload,
    RunnerFlight,
    StepBox,
    made,
)
from stepahead.runner.grammar import as_words
from stepahead.runner.graphs import RESULTS, DecodeGraphs, capture_decode
from stepahead.runner.hand_over import HandOver, Links, Sampled
from stepahead.runner.hidden import HiddenDownload, PoolDownload
from stepahead.runner.inference import inference
from stepahead.runner.inputs import advance, build_inputs
from stepahead.runner.keep import KeepAlive
from stepahead.runner.late import LateSide, Pending
from stepahead.runner.lengths import HostLengths
from stepahead.runner.logprobs import LogprobDownload
from stepahead.runner.marks import step_mark
from stepahead.runner.model import Model
from stepahead.runner.processor import load_processor
from stepahead.runner.relay.choose import build_relay
from stepahead.runner.sampling import Sampling
from stepahead.runner.slots import SlotState
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.stage import SampledPart, Staged, StagedChanges, Stager
from stepahead.runner.verify import Verifier

if TYPE_CHECKING:
    from torch import Tensor


class Runner:
    """Runs plans in order.  `launch` returns as soon as the device has the step in its queues."""

    def __init__(
        self,
        model: Model,
        device: Device,
        spec: RunnerSpec,
        vocab_size: int,
        links: Links | None = None,
    ) -> None:
        """`links` are those of a stage; a model in one piece has none."""
        place = device.place
        self._model = model
        self.notes: tuple[str, ...] = getattr(model, "notes", ())  # what it found out as it loaded
        self._device = device
        self._spec = spec
        self._kv = model.new_kv(spec.num_pages, spec.page_size)
        self._slots = SlotState(spec.num_slots, spec.max_pages, place)
        self._relay = build_relay(spec, place)
        self._counts = PenaltyCounts(vocab_size, place)
        self._keep = KeepAlive(device, spec.depth)
        self._end: Event | None = None  # of the forward before
        self._lengths = HostLengths(device) if getattr(model, "host_lengths", False) else None
        # what a stage hands over is not captured
        sizes = spec.page_size, spec.max_rows, spec.width
        self._graphs = (
            capture_decode(device, model, self._kv, self._slots, *sizes) if links is None else None
        )
        # nothing of its own is in the air when a row ends whose tokens the host brings
        ahead = spec.depth > spec.stages
        eos_dev = eos_table(spec.eos_ids, vocab_size, place) if ahead else None
        drafter = build_drafter(spec, self._slots, model, self._kv) if spec.drafter else None
        # such a drafter reads page tables when the model has long read them
        late = drafter is not None and drafter.uses_pages
        self._also_read = ("pages", "kv") if late else ()
        self._also_written = ("kv",) if late else ()
        fine = spec.fence == "fine" and getattr(model, "fine_fence", False) and not late
        self._fence = Fence(device, fine)
        self._verifier = (
            Verifier(self._slots, self._relay, drafter, spec.page_size) if drafter else None
        )
        last = spec.stage == spec.stages - 1
        loaded = load_processor(spec.processor, vocab_size, place) if last else None
        self._late = LateSide(device, spec, vocab_size, loaded is not None and loaded.waits)
        self._pending = Pending()
        self._stager = Stager(
            *(device, spec, self._slots, self._relay, self._counts, self._keep),
            *(eos_dev, drafter, self._late.bound, loaded),
        )
        self._hand_over = (
            HandOver(device, spec, links, self._slots, self._relay) if links is not None else None
        )
        # drafts and stages have inputs of their own kind, and read more of the model's states than
        # those that are sampled after
        self._samples_only = self._verifier is None and links is None
        sizes = spec.page_size, vocab_size
        self._decode = (
            build_decode(self._slots, self._relay, *sizes) if self._samples_only else None
        )
        self._last = self._hand_over is None or self._hand_over.is_last
        self._sampling = Sampling(
            model.logits,
            self._slots,
            self._relay,
            self._counts,
            self._verifier,
            self._hand_over,
            self._decode,
            self._lengths is not None,
        )

    def launching(self) -> AbstractContextManager[object]:
        """For a thread that does nothing but launch, around all of it: what each launch would enter
        and leave."""
        return inference()

    def now_ns(self) -> int:
        """The device's clock, on which all times in results are."""
        return self._device.now_ns()

    def close(self) -> None:
        """Drops what the device has not run."""
        self._late.close()
        self._device.close()

    # --- launch -----------------------------------------------------------------------------

    def launch(self, plan: Plan) -> RunnerFlight:
        """Queues the step on the device's three streams, but for rows that wait for masks."""
        with step_mark(plan.step):
            return self._launch(plan)

    def finish(self) -> None:
        """Queues the rows that wait for masks, when these are there: the wait is for the step
        before, and for matchers.  Any thread may call it, and the next launch does."""
        self._pending.finish()

    def _launch(self, plan: Plan) -> RunnerFlight:
        device = self._device
        received_ns = device.now_ns()
        self._pending.finish()  # its rows' tokens are inputs of this step
        self._late.change(plan)
        self._keep.make_room()
        if self._lengths is not None and self._stager.decodes(plan):
            self._lengths.fetch(self._slots.computed)
        staged = self._stager.stage(plan)
        fence, fenced_ns = self._fence.event, device.now_ns()
        self._write_pages(staged)
        device.wait(Stream.FORWARD, device.record(Stream.SCHEDULE))
        box, due = StepBox(), None
        box.begin = Once(partial(self._begin, staged, box))
        if self._hand_over is not None:
            due = self._hand_over.arrive(plan, staged, box.arrived)
        start = device.record(Stream.FORWARD)
        arrival = None
        if staged.sent:
            behind = fence if staged.changes.pages_dev is not None else None
            arrival = Arrival(device.now_ns(), self._end, behind, fenced_ns)
        graphs = self._graphs
        if (
            graphs is not None
            and not staged.inputs.chunks
            and graphs.fits(len(staged.inputs.rows_dev))
        ):
            self._enqueue_captured(graphs, staged, box)
        else:
            self._enqueue_forward(staged, box)
        box.begin()
        end = device.record(Stream.FORWARD)
        self._end = end
        self._fence.forward_over(end)
        if self._hand_over is not None:
            self._hand_over.sent(staged, end)
        self._keep.step(staged.blocks, (staged, box))
        if due is not None:
            self._keep.also(due.blocks, due)
        device.wait(Stream.COPY, end)
        flight = self._copy_out(staged, box, (start, end), arrival, received_ns)
        if box.masks is not None:
            self._await_masks(staged, box, flight, box.masks)
        return flight

    def _begin(self, staged: Staged, box: StepBox) -> None:
        """Nothing but the model is left to be launched, or that has been: a thread beside fights
        with this one for the interpreter no longer."""
        if staged.late is not None and self._last:
            box.masks = self._late.masks(staged.late)

    # --- late rows --------------------------------------------------------------------------

    def _await_masks(
        self, staged: Staged, box: StepBox, flight: RunnerFlight, masks: Masks
    ) -> None:
        assert staged.late is not None
        late = flight.late = LateFlight(staged.late, masks, self._pending.finish)
        there = masks.done()
        self._pending.put(partial(self._give_late, staged, box, late, masks, not there))
        if there:
            self._pending.finish()

    def _give_late(
        self, staged: Staged, box: StepBox, late: LateFlight, masks: Masks, waited: bool
    ) -> None:
        try:
            masks.point.wait()
            self._enqueue_late(staged, box, late, masks, waited)
        except BaseException as error:
            late.fail(error)
            raise

    def _enqueue_late(
        self, staged: Staged, box: StepBox, late: LateFlight, masks: Masks, waited: bool
    ) -> None:
        device, rows, step = self._device, late.rows, staged.step
        staging = device.stage_late(step)
        words_dev = staging.add(as_words(masks.words))
        legal_dev = None if masks.legal is None else staging.add(masks.legal)
        staging.send()
        device.wait(Stream.FORWARD, device.record(Stream.SCHEDULE))
        queued_ns, start = device.now_ns(), device.record(Stream.FORWARD)
        name = f"late results {step}"
        device.enqueue(
            Stream.FORWARD,
            partial(self._sampling.late, staged, box, words_dev, legal_dev, masks.known),
            (staging.name, *staged.blocks, *self._late_reads(step)),
            ("slots", "relay", "counts", name, *self._logits(), *self._also_written),
        )
        end = self._end = device.record(Stream.FORWARD)
        self._fence.forward_over(end)
        self._keep.also((staging.name,), None)
        device.wait(Stream.COPY, end)
        brought = self._copy_part(rows.part, box.late, name)
        drafts = None
        if self._verifier is not None:
            drafts = device.download(lambda: made(box.drafts_dev)[rows.rows_dev], name)
        event = self._end_copy(box, name)
        heard = self._late.hear(step, rows, event, brought.tokens, drafts)
        late.queue(Landing(event, brought), (start, end), heard, queued_ns, waited)

    def _late_reads(self, step: int) -> tuple[str, ...]:
        states = (f"states {step}", f"results {step}")
        return ("slots", "relay", "counts", *states, *self._logits(), *self._also_read)

    def _logits(self) -> tuple[str, ...]:
        """Where a graph leaves them."""
        return () if self._graphs is None else (RESULTS,)

    def _write_pages(self, staged: Staged) -> None:
        changes = staged.changes
        joined_dev, pages_dev = changes.joined_dev, changes.pages_dev
        if pages_dev is None:
            return
        self._fence.before_write()
        write = partial(self._slots.apply, joined_dev, pages_dev)
        self._device.enqueue(Stream.SCHEDULE, write, staged.blocks, ("pages",))

    def _enqueue_forward(self, staged: Staged, box: StepBox) -> None:
        device, blocks, step = self._device, staged.blocks, staged.step
        arrived = (f"arrived {step}",) if self._hand_over is not None else ()
        first = Work(
            partial(self._run_model, staged, box),
            (*blocks, *arrived, "pages", "slots", "relay", "kv"),
            ("slots", "relay", "kv", f"states {step}"),
        )
        rest = (
            self._pass_on_work(staged, box)
            if not self._last
            else Work(
                partial(self._sampling.first, staged, box),
                (*blocks, "slots", "relay", "counts", f"states {step}", *self._also_read),
                ("slots", "relay", "counts", *self._given(step), *self._also_written),
            )
        )
        device.enqueue(Stream.FORWARD, first.fn, first.reads, first.writes)
        if self._fence.fine:
            self._fence.reads_over(device.record(Stream.FORWARD))
        device.enqueue(Stream.FORWARD, rest.fn, rest.reads, rest.writes)

    def _given(self, step: int) -> tuple[str, ...]:
        more = () if self._hand_over is None else self._hand_over.given(step)
        return (f"results {step}", *more)

    def _pass_on_work(self, staged: Staged, box: StepBox) -> Work:
        hand_over, step = self._hand_over, staged.step
        assert hand_over is not None
        return Work(
            partial(self._pass_on, hand_over, hand_over.newest, staged, box),
            (*staged.blocks, "slots", f"states {step}"),
            ("slots", *hand_over.touched(step)),
        )

    def _enqueue_captured(self, graphs: DecodeGraphs, staged: Staged, box: StepBox) -> None:
        """As `_enqueue_forward`, for a step that only decodes: model and logits are a graph."""
        blocks = staged.blocks
        run = graphs.launch(
            staged.inputs.rows_dev,
            partial(self._resolve, staged, box),
            (*blocks, "relay", "slots", "counts"),
            ("relay", "slots", "counts"),
        )
        self._fence.reads_over(run.reads_over)
        box.states_dev = run.states_dev
        self._device.enqueue(
            Stream.FORWARD,
            partial(self._sampling.first, staged, box, run.logits_dev),
            (*blocks, "slots", "relay", "counts", RESULTS, *self._also_read),
            ("slots", "relay", "counts", RESULTS, *self._given(staged.step), *self._also_written),
        )

    def _copy_out(
        self,
        staged: Staged,
        box: StepBox,
        forward: tuple[Event, Event],
        arrival: Arrival | None,
        received_ns: int,
    ) -> RunnerFlight:
        device = self._device
        if not self._last:
            return self._stage_flight(staged, forward, arrival, received_ns)
        name = f"results {staged.step}"
        brought = self._copy_part(staged.first, box.first, name)
        prompts = []
        for i, score in enumerate(staged.scores):
            every = np.arange(score.count, dtype=np.int32)
            download = LogprobDownload(device, lambda i=i: box.prompts[i], every, name)
            prompts.append((score, download))
        pooled = None
        if staged.pools:
            pooled = PoolDownload(device, lambda: made(box.sums_dev), staged.pools, name)
        # lengths are there when all rows are sampled
        late = staged.late is not None
        event = device.record(Stream.COPY) if late else self._end_copy(box, name)
        waited = device.waited()
        runs = None
        if self._verifier is not None and self._lengths is None:
            runs = partial(self._stager.rejections.note, staged.inputs.rows)
        return RunnerFlight(
            staged.step,
            Landing(event, brought),
            *forward,
            staged.positions,
            tuple(prompts),
            pooled,
            pulled_back(staged, waited),
            waits(waited),
            arrival,
            received_ns,
            device.now_ns(),
            self._spec.width,
            runs,
        )

    def _end_copy(self, box: StepBox, name: str) -> Event:
        """The event behind all that a step copies out, the slots' lengths last."""
        if self._lengths is None:
            return self._device.record(Stream.COPY)
        lengths = self._device.download(lambda: made(box.lengths_dev), name)
        event = self._device.record(Stream.COPY)
        self._lengths.follow(event, lengths)
        return event

    def _copy_part(self, part: SampledPart, box: PartBox, name: str) -> PartDownload:
        device, group = self._device, part.group
        tokens = device.download(lambda: made(box.tokens_dev), name)
        logprobs = hidden = None
        if len(group.logprob_rows):
            rows = part.places(group.logprob_rows)
            logprobs = LogprobDownload(device, lambda: made(box.logprobs), rows, name)
        if len(group.hidden_rows):
            rows = part.places(group.hidden_rows)
            hidden = HiddenDownload(device, lambda: made(box.hidden_dev), rows, name)
        return PartDownload(tokens, logprobs, hidden, part.at, box.failed)

    def _stage_flight(
        self,
        staged: Staged,
        forward: tuple[Event, Event],
        arrival: Arrival | None,
        received_ns: int,
    ) -> RunnerFlight:
        """The flight of a stage that is not the last: it has no results."""
        device = self._device
        waited = device.waited()
        held = waits(waited)
        return RunnerFlight(
            staged.step,
            Landing(forward[1], PartDownload(Nothing())),
            *forward,
            0,
            (),
            None,
            pulled_back(staged, waited),
            held,
            arrival,
            received_ns,
            device.now_ns(),
        )

    # --- on the device ----------------------------------------------------------------------

    def _run_model(self, staged: Staged, box: StepBox) -> None:
        with inference():
            self._take_over(staged.changes)
            step, verifier = staged.inputs, self._verifier
            if self._decode is not None and step.chunk_tokens_dev is None:
                inputs = self._decode.inputs(step)
                box.ends_dev = self._decode.ends_dev
            elif verifier is None:
                inputs = build_inputs(step, self._slots, self._relay, self._spec.page_size)
            else:
                box.asked = verifier.ask(step)
                inputs = verifier.inputs(step, box.asked)
            if self._samples_only and not staged.scores and not staged.pools:
                inputs = replace(inputs, wanted_dev=step.sampled_dev)
            if box.arrived:
                inputs = replace(inputs, states_dev=box.arrived.pop())
            box.begin()
            self._device.long_next()
            states = self._model(inputs, self._kv)
            if verifier is not None:
                states = verifier.spread(made(box.asked), states)
            box.states_dev = states

    def _pass_on(
        self, hand_over: HandOver, sampled: Sampled | None, staged: Staged, box: StepBox
    ) -> None:
        with inference():
            advance(staged.inputs, self._slots)
            hand_over.pass_on(staged.step, sampled, made(box.states_dev))
            box.states_dev = None

    def _resolve(self, staged: Staged, box: StepBox) -> Tensor:
        box.begin()
        self._device.long_next()
        self._take_over(staged.changes)
        if self._verifier is None:
            return self._relay.resolve(staged.inputs.route)
        box.asked = self._verifier.ask(staged.inputs, captured=True)
        return box.asked.tokens_dev

    def _take_over(self, changes: StagedChanges) -> None:
        if changes.joined_dev is not None:
            self._slots.revive(changes.joined_dev)
            if self._verifier is not None:
                limits_dev = made(changes.limits_dev)
                self._verifier.enter(changes.joined_dev, limits_dev, changes.entering)
        for row, prompt_dev, outputs_dev in changes.counts:
            self._counts.start(row, prompt_dev, outputs_dev)
        for place, tokens_dev in changes.histories:
            self._stager.history.start(place, tokens_dev)
