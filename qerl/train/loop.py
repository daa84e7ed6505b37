"""The whole algorithm: sample, score, learn, record, again.

``Trainer.step`` is one rollout step, top to bottom; everything it calls lives in the folder of its stage. Order within a
run: layout gate, evaluation before, steps (each may evaluate and save), evaluation after, summary, report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from qerl import memory
from qerl.config.schema import Config
from qerl.data.prompts import PromptSampler
from qerl.eval.evaluate import EvalResult, evaluate
from qerl.eval.files import Measurement, suite_name
from qerl.eval.noise import noise_spread
from qerl.metrics.behavior import behavior_rows
from qerl.metrics.console import Progress
from qerl.metrics.files import whole_folder
from qerl.metrics.run_dir import RunDir
from qerl.metrics.writer import MetricsWriter
from qerl.model.aqn import Noise
from qerl.model.checkpoint import norm_hash
from qerl.objective.advantage import advantages
from qerl.objective.batch import make_samples
from qerl.records import Group, Prompt, Rollout, SamplingSpec
from qerl.reward.compose import Rewarder
from qerl.train import on_policy, step_metrics
from qerl.train.collect import Collected, collect, shortage
from qerl.train.completions_text import completions_text
from qerl.train.diagnostics.observer import Diagnostics
from qerl.train.learn import learn
from qerl.train.noise.director import NoiseDirector
from qerl.train.nonfinite import NonFinite, write_nonfinite
from qerl.train.optimizer import MasterOptimizer
from qerl.train.policy_version import ActivePolicy, activate_policy, assert_clean_scales
from qerl.train.resume import TrainState, prune_checkpoints, save_checkpoint, save_policy
from qerl.train.session import Session
from qerl.train.stop import Deadline, StopRequest
from qerl.train.timing import StageTimer
from qerl.train.warnings import config_warnings, refuse_unscored, step_warnings, trend_warnings


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The live objects of one run. ``train.run.train`` builds it."""

    config: Config
    run: RunDir
    session: Session
    optimizer: MasterOptimizer
    sampler: PromptSampler
    eval_prompts: Sequence[Prompt]
    rewarder: Rewarder
    writer: MetricsWriter
    progress: Progress
    state: TrainState
    timer: StageTimer
    noise: NoiseDirector
    diagnostics: Diagnostics
    history: list[dict[str, Any]]
    """Metrics of the steps so far, oldest first."""
    run_facts: dict[str, str]
    dropped_prompts: int
    began: float
    """Clock reading up to which ``state.wall_seconds`` counts."""
    peak_kv_bytes: int = 0
    evaluate_before: Callable[[Trainer, StopRequest], dict[str, float]] | None = None
    """Makes the evaluation before training, or takes one over that is known, and gives its metrics; None makes it."""
    unscored_note: str | None = None
    """Why the last unscorable answer could not be scored."""

    def fit(self, stop: StopRequest, stop_after: int | None = None, deadline: Deadline | None = None) -> bool:
        """Run to the end of the plan, to ``stop_after``, to a stop request or a deadline; whether the plan was finished."""
        config, state = self.config, self.state
        for text in config_warnings(config):
            self.warn(text)
        if state.step == 0 and config.eval.before and self.eval_prompts:
            first = self.evaluate("before") if self.evaluate_before is None else self.evaluate_before(self, stop)
            self.finish_step(first | {"policy_version": 0}, save=False)
        if deadline is not None:
            deadline.restart()
        while state.step < config.train.steps:
            metrics = self.step()
            last = state.step == config.train.steps
            leaving = last or stop.requested or state.step == stop_after
            if self.eval_prompts and _due(config.eval.every, state.step) and not last:
                metrics |= self.evaluate(f"step {state.step}")
            if last and config.eval.after and self.eval_prompts:
                metrics |= self.evaluate("after")
            # Asked last, so that a stretch holds the step's evaluation too.
            leaving = (deadline is not None and deadline.reached()) or leaving
            self.finish_step(metrics, save=leaving or _due(config.train.save_every, state.step))
            if leaving and not last:
                return False
        return True

    def step(self) -> dict[str, float]:
        """One rollout step: prompts -> answers -> rewards -> advantages -> updates. Returns its metrics."""
        config, state, timer = self.config, self.state, self.timer
        started = time.perf_counter()
        self.progress.begin(f"step {state.step + 1}")
        with timer.stage("noise"):
            policy = activate_policy(
                config,
                self.session.model,
                self.noise,
                base_hash=state.base_hash,
                rollout=state.step,
                completed=state.updates,
            )
        with timer.stage("save"):
            self.keep_adapter()
        with timer.stage("switch"):
            self.session.engine.take()
        collected = collect(config, lambda count, first_key: self.draw(count, first_key, policy))
        rollout, groups, batch = collected.rollout, collected.groups, collected.batch
        with timer.stage("noise"):
            assert_clean_scales(self.session.model, policy)
        if config.rollout.keep_cache == "off":
            with timer.stage("switch"):
                self.session.engine.release()
                memory.return_unused(self.session.device)
        self.progress.running("diagnostics")
        with timer.stage("diagnostics"):
            measured = self.diagnostics.before_updates(rollout, groups, policy)
        values = advantages([[s.reward for s in group.scores] for group in batch], config.objective.advantage)
        samples = make_samples(batch, values, mask_truncated=config.objective.mask_truncated)
        measured |= self.check_on_policy(rollout)
        # Records are written while the device learns: the host would wait for it.
        with ThreadPoolExecutor(max_workers=1) as beside:
            records = beside.submit(self.keep_records, collected)
            stats = learn(
                config,
                self.session.model,
                self.optimizer,
                samples,
                noise=policy.noise,
                completed=state.updates,
                timer=timer,
                report=self.report_nonfinite,
                beside=self.diagnostics.own_answer,
                tell=self.progress.running,
            )
            with timer.stage("save"):
                records.result()
        metrics: dict[str, float] = {
            **step_metrics.group_metrics(groups),
            **step_metrics.rollout_metrics(rollout),
            **step_metrics.sample_metrics(samples),
            **collected.metrics(config),
            **stats.metrics(),
        }
        with timer.stage("noise"):
            self.noise.observe(policy.state.noise, metrics)
            metrics |= self.noise.metrics(policy.state.noise, policy.noise)
        for warning in self.noise.take_warnings():
            self.warn(warning)
        self.progress.running("diagnostics of the updates")
        with timer.stage("diagnostics"):
            scored_as_sampled = policy.noise is None or config.objective.noise == "replayed"
            difference = metrics.get("sampling/sampling_logp_difference/mean") if scored_as_sampled else None
            measured |= self.diagnostics.after_updates(state.step + 1, difference)
        state.step += 1
        state.updates += config.optim.updates_per_rollout
        state.tokens += int(metrics["tokens/prompt"] + metrics["tokens/completion"])
        state.completion_tokens += int(metrics["tokens/completion"])
        text = shortage(config, collected)
        if text is not None:
            self.warn(text, key="dynamic_sampling")
        seconds = time.perf_counter() - started
        return (
            metrics
            | measured
            | {
                "policy_version": state.updates,
                "num_tokens": state.tokens,
                "epoch": self.sampler.epochs,
                "dropped_prompts": self.dropped_prompts,
                "time/step": seconds,
                "tokens_per_second": (metrics["tokens/prompt"] + metrics["tokens/completion"]) / seconds,
                "rollout/tokens_per_second": metrics["tokens/completion"] / rollout.stats["seconds"],
                "rollout/preemptions": rollout.stats["preemptions"],
            }
        )

    def draw(self, count: int, first_key: int, policy: ActivePolicy) -> tuple[Rollout, list[Group]]:
        """Answers to the next ``count`` prompts, and the same by group with scores."""
        prompts = self.sampler.next(count)
        with self.timer.stage("rollout"):
            rollout = self.sample(prompts, policy, first_key)
        with self.timer.stage("reward"):
            return rollout, self.score(rollout)

    def sample(self, prompts: Sequence[Prompt], policy: ActivePolicy, first_key: int) -> Rollout:
        """Answers of the active policy; the first has sample key ``first_key``."""
        config, engine = self.config, self.session.engine
        rollout = config.rollout
        sampling = SamplingSpec(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            max_new_tokens=rollout.max_new_tokens,
            seed=config.train.seed,
            rollout=self.state.step,
        )
        completions, stats = engine.generate(
            prompts,
            sampling,
            group_size=rollout.group_size,
            noise=policy.noise,
            first_sample_key=first_key,
            on_progress=self.progress.answers(rollout.max_new_tokens),
        )
        self.peak_kv_bytes = max(self.peak_kv_bytes, int(stats["kv_bytes"]))
        return Rollout(
            index=self.state.step,
            group_size=rollout.group_size,
            completions=completions,
            sampling=sampling,
            policy=policy.state,
            engine=engine.name,
            kernels=self.session.kernels,
            cache_state="empty",
            stats=stats,
        )

    def score(self, rollout: Rollout) -> list[Group]:
        """Rewards and outcomes, by group."""
        scores = self.rewarder.score(rollout.completions)
        for text in self.rewarder.take_warnings():
            self.warn(text)
        self.unscored_note = next((score.note for score in scores if score.reward is None), self.unscored_note)
        size = rollout.group_size
        return [
            Group(
                prompt=rollout.completions[i].prompt,
                completions=tuple(rollout.completions[i : i + size]),
                scores=tuple(scores[i : i + size]),
            )
            for i in range(0, len(scores), size)
        ]

    def check_on_policy(self, rollout: Rollout) -> dict[str, float]:
        """Whether this step's updates are on-policy, by identity; counted for the summary."""
        config, session, state = self.config, self.session, self.state
        trained = on_policy.training_facts(config, rollout, norm_hash=norm_hash(session.model), kernels=session.kernels)
        found = on_policy.differences(
            on_policy.sampling_facts(rollout), trained, updates=config.optim.updates_per_rollout
        )
        on_policy.count_step(state.off_policy, found, state.step + 1)
        state.on_policy_steps += not found
        return {"on_policy": float(not found)}

    def report_nonfinite(self, found: NonFinite) -> None:
        """Write the batch of an update that cannot be made, and stop or warn as ``optim.nonfinite`` says."""
        path = self.run.nonfinite_path(found.update)
        write_nonfinite(path, found)
        if self.config.optim.nonfinite == "stop":
            raise found.error(path)
        self.warn(
            f"The gradient of update {found.update} was not finite and the update was left out; its batch is in {path.name} "
            "under nonfinite/. Metric nonfinite_updates counts them.",
            key="nonfinite",
        )

    def evaluate(self, moment: str) -> dict[str, float]:
        """Evaluate under the declared policy; ``moment`` is ``before``, ``after`` or ``step N``. After training with noise,
        with its noise too, unless the declared policy has it already."""
        config, state = self.config, self.state
        self.progress.begin(f"evaluation {moment}")
        with self.timer.stage("evaluate"):
            noise = self.noise.evaluation(step=state.step, completed=state.updates)
            result = self.answer_questions(noise)
            self.run.write_evaluation(state.step, result.rows)
            state.evaluations[moment] = result.to_dict() | {"step": state.step}
            self.progress.note(f"evaluation {moment}: {result.headline()}")
            noisy = self.evaluate_noisy(result) if moment == "after" and not config.eval.noise else {}
        return result.metrics() | noisy

    def evaluate_noisy(self, clean: EvalResult) -> dict[str, float]:
        """The trained policy with its noise, once for every key, against ``clean``; nothing where there is no noise."""
        state, drawn = self.state, []
        draws = self.config.eval.noisy_draws if self.config.aqn.enabled else 0
        for draw in range(draws if clean.unscorable < 1.0 else 0):
            noise = self.noise.deployment(step=state.step, completed=state.updates, draw=draw)
            if noise is None:
                return {}
            result = self.answer_questions(noise)
            self.run.write_evaluation(state.step, result.rows, draw=draw)
            drawn.append((noise.state.to_dict(), self.measurement(f"noise draw {draw}", result)))
        if not drawn:
            return {}
        spread = noise_spread(self.measurement("trained", clean), drawn)
        state.noisy = spread.to_dict() | {"step": state.step}
        self.progress.note(f"evaluation with noise: {spread.line()}")
        return {"eval/noisy_accuracy": spread.mean, "eval/noise_difference": spread.against_clean.difference}

    def answer_questions(self, noise: Noise | None) -> EvalResult:
        """The held-out questions under the declared policy, with this noise."""
        config = self.config
        longest = config.eval.max_new_tokens or config.rollout.max_new_tokens
        return evaluate(
            self.session.engine,
            self.eval_prompts,
            self.rewarder,
            eval_cfg=config.eval,
            seed=config.train.seed,
            max_new_tokens=longest,
            noise=noise,
            on_progress=self.progress.answers(longest),
        )

    def measurement(self, policy: str, result: EvalResult) -> Measurement:
        """``result`` with the names that comparisons show."""
        source = str(self.config.data.eval)
        return Measurement(suite=suite_name(source), policy=policy, location=source, result=result)

    def keep_adapter(self) -> None:
        """Keep the adapter (or the model) this rollout samples with, so that its records can be scored again."""
        every, session = self.config.train.save_adapter_every, self.session
        assert every != "auto", "resolved by the configuration"
        if every and self.state.step % every == 0:
            with whole_folder(self.run.adapter_path(self.state.step)) as folder:
                save_policy(session.model, folder, base_path=session.model_path, config=self.config)

    def keep_records(self, collected: Collected) -> None:
        """Behavior records for machines, some answers as text for people."""
        rollout, groups = collected.rollout, collected.groups
        rows = behavior_rows(rollout, groups, collected.in_batch)
        self.run.write_rollout_parquet(rollout.index, rows, run_facts=self.run_facts)
        if self.config.log.completions:
            text = completions_text(rollout, groups, self.config.log.completions)
            self.run.write_completions_text(rollout.index + 1, text)

    def finish_step(self, metrics: dict[str, float], *, save: bool) -> None:
        """Write the step's line, tell the terminal, save when due. The checkpoint comes last: resuming cuts off later lines,
        so a line may be without its checkpoint and a checkpoint never without its line. Its seconds count for the next step."""
        state = self.state
        stages = self.timer.end_step()
        metrics |= {f"time/{name}": seconds for name, seconds in stages.items()}
        metrics["time/compile"] = self.timer.compiling.take()
        metrics |= step_metrics.memory_metrics(self.timer.peaks)
        metrics["time/elapsed"] = state.wall_seconds + time.perf_counter() - self.began
        if state.portable:
            metrics["resumes/portable"] = len(state.portable)
        if state.step:
            self.history.append(metrics)
            for notice in step_warnings(self.config, metrics) + trend_warnings(self.config, self.history):
                self.warn(notice.text, key=notice.key)
        self.writer.write(state.step, metrics)
        self.progress.step(metrics | {"step": state.step})
        refuse_unscored(self.config, self.history, self.unscored_note)
        if save:
            with self.timer.stage("save"):
                self.save()

    def save(self) -> None:
        """Write a checkpoint of everything the next step depends on; drop the oldest beyond ``keep_checkpoints``."""
        state = self.state
        state.sampler = self.sampler.state_dict()
        state.noise = self.noise.state_dict()
        now = time.perf_counter()
        state.wall_seconds += now - self.began
        self.began = now
        state.stage_seconds = dict(self.timer.total)
        folder = self.run.checkpoint(state.step)
        session, noise_sum = self.session, self.noise.total
        save_checkpoint(
            folder, session.model, self.optimizer, state, self.config, session.model_path, noise_sum=noise_sum
        )
        prune_checkpoints(self.run, self.config.train.keep_checkpoints)

    def warn(self, text: str, *, key: str | None = None) -> None:
        """Show a warning and keep it for the summary: one of each key a run (the text is its own key if none is given)."""
        if (key or text) not in self.state.warned:
            self.state.warned.append(key or text)
            self.state.warnings.append(text)
            self.progress.warn(text)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
