"""Checks of the reference trainer, run in the trainers' environment by `test_learn.py`: one process for all of them.

Each function `check_*` is one. A folder of its own is its argument. With `--model-for PROGRAM` it makes a tiny model in
the folder `MODEL`, and runs the program.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from launch.learning.demonstrations import demonstrations
from prorl_trio.chat.format import ChatFormat
from prorl_trio.client.word_problems import demonstrated
from prorl_trio.learn.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from prorl_trio.learn.objectives import (
    OBJECTIVES,
    STD_FLOOR,
    advantages,
    importance_weights,
    kl_estimate,
    overlong_penalty,
    token_loss,
    token_weights,
)
from prorl_trio.learn.rows import Row, pack_rows, rows_of
from prorl_trio.learn.trainer import Recipe, Trainer
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory

VOCABULARY = 50
LONGEST = 12


def close(actual, expected, tolerance=1e-6):
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert torch.allclose(actual, expected, rtol=0, atol=tolerance), (actual, expected)


def refused(kind, call, *args):
    """The message of the exception of that kind that a call raises."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")


# ---------------------------------------------------------------- objectives, by hand and against plain Python


def check_advantages_by_hand(_):
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    half = 0.5 / (0.5 + STD_FLOOR)
    for name in ("grpo", "dapo"):
        close(advantages(OBJECTIVES[name], rewards), [half, -half, -half, half])
    for name in ("dr-grpo", "ppo"):
        close(advantages(OBJECTIVES[name], rewards), [0.5, -0.5, -0.5, 0.5])
    rewards = torch.tensor([3.0, 0.0, 0.0])
    close(advantages(OBJECTIVES["rloo"], rewards), [3.0 - 0.0, 0.0 - 1.5, 0.0 - 1.5])


def check_overlong_penalty_by_hand(_):
    penalty = overlong_penalty(torch.tensor([1, 6, 7, 8, 10, 12]), longest=10, cache=4)
    close(penalty, [0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


def check_token_weights_by_hand(_):
    lengths = torch.tensor([2.0, 3.0])
    close(token_weights(OBJECTIVES["dapo"], lengths, 10), [1 / 5, 1 / 5])
    close(token_weights(OBJECTIVES["grpo"], lengths, 10), [1 / 4, 1 / 6])
    close(token_weights(OBJECTIVES["dr-grpo"], lengths, 10), [1 / 20, 1 / 20])
    close(token_weights(OBJECTIVES["rloo"], lengths, 10), [1 / 2, 1 / 2])


def check_clipping_by_hand(_):
    # A ratio of 1.25 with a positive advantage: above 1.2 GRPO takes 1.2, and DAPO, up to 1.28, the ratio itself.
    new, old = torch.tensor([math.log(1.25), math.log(0.7), math.log(1.5)]), torch.zeros(3)
    advantage = torch.tensor([1.0, -1.0, -1.0])
    close(token_loss(OBJECTIVES["grpo"], new, old, advantage), [-1.2, 0.8, 1.5])
    close(token_loss(OBJECTIVES["dapo"], new, old, advantage), [-1.25, 0.8, 1.5])
    close(token_loss(OBJECTIVES["rloo"], new, old, advantage), [-math.log(1.25), math.log(0.7), math.log(1.5)])


def check_importance_weights_by_hand(_):
    old = torch.tensor([math.log(0.5), math.log(0.5), math.log(0.5)], requires_grad=True)
    weights = importance_weights(old, torch.tensor([math.log(0.5), math.log(0.25), math.log(0.1)]), cap=3.0)
    close(weights, [1.0, 2.0, 3.0])
    assert not weights.requires_grad


def check_kl_estimate_has_the_divergence_as_its_mean(_):
    new, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    estimate = kl_estimate(new, reference)
    assert (estimate >= 0).all()
    close((new.exp() * estimate).sum(), (new.exp() * (new - reference)).sum())


def naive_loss(name, groups, cap):
    """The loss of a batch in plain Python. A group is rewards and rollouts; a rollout lists (new, old, sampled)."""
    rollouts = [rollout for _, members in groups for rollout in members]
    tokens = sum(map(len, rollouts))
    total = 0.0
    for rewards, members in groups:
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for index, (reward, member) in enumerate(zip(rewards, members, strict=True)):
            if name == "rloo":
                others = [other for place, other in enumerate(rewards) if place != index]
                advantage = reward - sum(others) / len(others)
            else:
                advantage = reward - mean
            if name in ("grpo", "dapo"):
                advantage /= std + STD_FLOOR
            for new, old, sampled in member:
                ratio = math.exp(new - old)
                high = 1.28 if name == "dapo" else 1.2
                surrogate = min(ratio * advantage, min(max(ratio, 0.8), high) * advantage)
                if name == "rloo":
                    surrogate = new * advantage
                loss = -surrogate * min(math.exp(old - sampled), cap)
                divisor = {
                    "grpo": len(rollouts) * len(member),
                    "ppo": len(rollouts) * len(member),
                    "dapo": tokens,
                    "dr-grpo": len(rollouts) * LONGEST,
                    "rloo": len(rollouts),
                }[name]
                total += loss / divisor
    return total


def made_up_groups(seed=0):
    rng = np.random.default_rng(seed)
    groups = []
    for size in (3, 4):
        members = []
        for _ in range(size):
            old = -rng.uniform(0.2, 3.0, rng.integers(1, LONGEST))
            members.append([(o + rng.normal(0, 0.3), o, o + rng.normal(0, 0.6)) for o in old])
        groups.append((rng.choice([0.0, 1.0, 0.5], size).tolist(), members))
    return groups


def tensor_loss(name, groups, cap, new):
    """The same by our functions; `new` [T] are the log-probabilities in training."""
    objective = OBJECTIVES[name]
    rollouts = [rollout for _, members in groups for rollout in members]
    lengths = torch.tensor([float(len(rollout)) for rollout in rollouts])
    of = torch.repeat_interleave(torch.arange(len(rollouts)), lengths.long())
    old, sampled = (torch.tensor([token[at] for rollout in rollouts for token in rollout]) for at in (1, 2))
    advantage = torch.cat([advantages(objective, torch.tensor(rewards)) for rewards, _ in groups])
    weight = token_weights(objective, lengths, LONGEST)
    losses = token_loss(objective, new, old, advantage[of]) * importance_weights(old, sampled, cap)
    return (losses * weight[of]).sum()


def check_each_objective_and_its_gradient_against_plain_python(_):
    torch.set_default_dtype(torch.float64)
    try:
        for name in OBJECTIVES:
            groups, cap, step = made_up_groups(), 1.5, 1e-6
            places = [(g, m, t) for g, (_, ms) in enumerate(groups) for m, r in enumerate(ms) for t in range(len(r))]
            new = torch.tensor([groups[g][1][m][t][0] for g, m, t in places], requires_grad=True)
            loss = tensor_loss(name, groups, cap, new)
            loss.backward()
            close(loss, naive_loss(name, groups, cap), 1e-6)
            for place, (g, m, t) in enumerate(places):
                member = groups[g][1][m]
                value, old, sampled = member[t]
                ends = []
                for change in (step, -step):
                    member[t] = (value + change, old, sampled)
                    ends.append(naive_loss(name, groups, cap))
                member[t] = (value, old, sampled)
                close(new.grad[place], (ends[0] - ends[1]) / (2 * step), 1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------- rows and packs


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def segment(rng, prompt):
    """A prompt, a turn, an observation and another turn."""
    first, seen, second = rng.integers(1, 5, 3)
    ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, first + seen + second)]).astype(np.int32)
    mask = np.concatenate([np.zeros(len(prompt)), np.ones(first), np.zeros(seen), np.ones(second)]).astype(np.uint8)
    logprobs = np.where(mask, -rng.uniform(2.0, 5.0, len(ids)), 0.0).astype(np.float32)
    span = PolicySpan(start=len(prompt), end=len(ids), policy_version="0", engine="e")
    return Segment.from_arrays(ids, logprobs, mask, [span])


def outcome(job_id, reward, segments):
    return Outcome(
        job_id=job_id,
        instance_id="i",
        group_id="g",
        status="completed",
        reward=reward,
        cause=None,
        error="",
        trajectory=Trajectory(segments=segments, turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
    )


def outcomes(seed=0, groups=3):
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, 5 + group)
        rewards = [1.0, 0.0, 0.0, 1.0]
        made.append(
            [
                outcome(f"{group}-{n}", reward, [segment(rng, prompt) for _ in range(1 + (n == 3))])
                for n, reward in enumerate(rewards)
            ]
        )
    return made


def log_probs_alone(model, row):
    """The log-probabilities of the sampled tokens of a row, by the model as it is, with nothing packed."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    where = np.flatnonzero(row.loss_mask)
    return logits[torch.from_numpy(where - 1), ids[where]]


def check_packed_log_probs_are_those_of_each_row_alone(_):
    model = tiny_model()
    trainer = Trainer(model, Recipe())
    rows = rows_of([each for group in outcomes() for each in group])
    assert len(rows) == 15
    for limit in (1, 40, 10_000):
        with torch.no_grad():
            packed = torch.cat([trainer.log_probs(pack) for pack in pack_rows(rows, limit)])
            alone = torch.cat([log_probs_alone(model, row) for row in rows])
        close(packed, alone, 1e-5)


def check_a_prompt_is_computed_once_for_its_group(_):
    rows = rows_of([each for group in outcomes(groups=1) for each in group])
    (pack,) = pack_rows(rows, 10_000)
    assert pack.token_ids.shape[1] == 5 + sum(len(row.token_ids) - 5 for row in rows)
    assert pack.targets.tolist() == np.concatenate([row.token_ids[row.loss_mask == 1] for row in rows]).tolist()
    assert pack.rollout.tolist() == [row.rollout for row in rows for _ in range(int(row.loss_mask.sum()))]
    close(pack.sampled, np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows]))


def check_packs_keep_their_limit(_):
    rows = rows_of([each for group in outcomes(groups=6) for each in group])
    longest = max(len(row.token_ids) for row in rows)
    sizes = [pack.token_ids.shape[1] for pack in pack_rows(rows, 2 * longest)]
    assert max(sizes) <= 2 * longest
    assert len(sizes) < len(rows)
    assert sum(len(pack.targets) for pack in pack_rows(rows, 2 * longest)) == sum(
        int(row.loss_mask.sum()) for row in rows
    )


def check_other_prompts_of_the_same_length_are_not_shared(_):
    rng = np.random.default_rng(1)
    rows = [
        Row(each.token_ids, each.logprobs, each.loss_mask, number)
        for number, each in enumerate(segment(rng, rng.integers(0, VOCABULARY, 6)) for _ in range(3))
    ]
    (pack,) = pack_rows(rows, 10_000)
    assert pack.token_ids.shape[1] == sum(len(row.token_ids) for row in rows)


# ---------------------------------------------------------------- updates


def weights_of(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def update(groups, seed=0, **recipe):
    trainer = Trainer(tiny_model(seed), Recipe(**{"learning_rate": 1e-3, "longest": LONGEST, **recipe}))
    figures = trainer.update(groups)
    return trainer, figures


def check_an_update_does_not_depend_on_how_it_is_cut(_):
    for objective in OBJECTIVES:
        whole, figures = update(outcomes(), objective=objective)
        cut, cut_figures = update(outcomes(), objective=objective, tokens_per_pack=20)
        close(weights_of(cut), weights_of(whole), 1e-5)
        close(cut_figures.gradient_norm, figures.gradient_norm, 1e-5)
        assert (
            cut_figures.tokens
            == figures.tokens
            == sum(int(each.loss_mask.sum()) for group in outcomes() for o in group for each in o.trajectory.segments)
        )


def check_the_gradient_of_an_update_is_that_of_the_formula(_):
    """The loss written down without packs, masks or micro-batches, and differentiated by torch."""
    groups = outcomes()
    for name in OBJECTIVES:
        _, figures = update(groups, objective=name)
        model, objective = tiny_model(), OBJECTIVES[name]
        rollouts = [each for group in groups for each in group]
        new = [torch.cat([log_probs_alone(model, row) for row in rows_of([each])]) for each in rollouts]
        sampled = [np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows_of([each])]) for each in rollouts]
        advantage = torch.cat([advantages(objective, torch.tensor([o.reward for o in group])) for group in groups])
        lengths = torch.tensor([float(len(each)) for each in new])
        weight = token_weights(objective, lengths, LONGEST)
        loss = sum(
            (
                token_loss(objective, mine, mine.detach(), advantage[at])
                * importance_weights(mine, torch.from_numpy(sampled[at]), 2.0)
                * weight[at]
            ).sum()
            for at, mine in enumerate(new)
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        close(figures.loss, loss.detach(), 1e-5)
        close(figures.gradient_norm, norm, 1e-5)


def check_gradients_beyond_the_limit_are_scaled_down_to_it(_):
    moved = []
    for limit in (1e9, 1e-3):
        trainer = Trainer(tiny_model(), Recipe(longest=LONGEST, max_gradient_norm=limit))
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        before = weights_of(trainer)
        norm = trainer.update(outcomes()).gradient_norm
        moved.append((weights_of(trainer) - before).norm())
    close(moved[0], norm, 1e-4)
    close(moved[1], 1e-3, 1e-5)


def check_later_minibatches_know_the_weights_that_the_update_began_from(_):
    _, figures = update(outcomes(groups=4), minibatches=2, learning_rate=2e-2)
    one, _ = update(outcomes(groups=4)[:2], learning_rate=2e-2)
    with torch.no_grad():
        rows = rows_of([each for group in outcomes(groups=4)[2:] for each in group])
        start = Trainer(tiny_model(), Recipe())
        old = torch.cat([start.log_probs(pack) for pack in pack_rows(rows, 1024)])
        new = torch.cat([one.log_probs(pack) for pack in pack_rows(rows, 1024)])
    ratio = (new - old).exp()
    outside = int(((ratio < 0.8) | (ratio > 1.28)).sum())
    assert outside > 0, "the learning rate moves no ratio out of its bounds"
    assert figures.clipped == outside


def check_a_gradient_that_is_not_finite_changes_nothing(_):
    groups = outcomes()
    broken = outcome("x", math.nan, groups[0][0].trajectory.segments)
    trainer = Trainer(tiny_model(), Recipe(longest=LONGEST))
    before = weights_of(trainer)
    assert "nan" in refused(FloatingPointError, trainer.update, [[broken, *groups[0][1:]], *groups[1:]])
    assert torch.equal(weights_of(trainer), before)
    trainer.update(groups)
    assert not torch.equal(weights_of(trainer), before)
    assert torch.isfinite(weights_of(trainer)).all()


def check_groups_without_rewards_are_refused(_):
    trainer, groups = Trainer(tiny_model(), Recipe()), outcomes(groups=1)
    for wrong in (groups[0][:1], [*groups[0][:2], outcome("x", None, groups[0][0].trajectory.segments)]):
        assert "two or more rollouts" in refused(ValueError, trainer.update, [wrong])


def check_the_gap_is_the_mean_over_all_sampled_tokens(_):
    rollouts = [each for group in outcomes(seed=1) for each in group]
    trainer = Trainer(tiny_model(), Recipe(tokens_per_pack=30))
    with torch.no_grad():
        rows = rows_of(rollouts)
        mine = torch.cat([log_probs_alone(trainer.model, row) for row in rows])
        theirs = torch.from_numpy(np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows]))
    close(trainer.gap(rollouts), (mine - theirs).abs().mean(), 1e-5)


def check_kl_holds_the_policy_at_its_reference(_):
    free, _ = update(outcomes(), max_gradient_norm=1e9)
    held = Trainer(tiny_model(), Recipe(longest=LONGEST, learning_rate=1e-3, kl_weight=100.0), reference=tiny_model())
    start = weights_of(held)
    for _ in range(3):
        held.update(outcomes())
        free.update(outcomes())
    assert (weights_of(held) - start).norm() < (weights_of(free) - start).norm()


def check_overlong_rollouts_earn_less(_):
    groups = outcomes()
    plain, _ = update(groups, overlong_cache=0)
    shaped, _ = update(groups, overlong_cache=8)
    assert not torch.equal(weights_of(plain), weights_of(shaped))


def check_imitation_lowers_the_loss_of_what_it_imitates(_):
    trainer = Trainer(tiny_model(), Recipe(learning_rate=1e-2, tokens_per_pack=30))
    rows = rows_of([each for group in outcomes() for each in group])
    with torch.no_grad():
        whole = torch.cat([log_probs_alone(trainer.model, row) for row in rows])
    losses = [trainer.imitate(rows) for _ in range(5)]
    close(losses[0], -whole.mean(), 1e-5)
    assert losses[-1] < losses[0] - 0.1


def check_every_objective_makes_right_answers_likelier(_):
    for name in OBJECTIVES:
        trainer = Trainer(tiny_model(), Recipe(objective=name, learning_rate=3e-3, longest=LONGEST, importance_cap=2.0))
        groups = [sampled_group(trainer, seed) for seed in range(3)]
        right = [each for group in groups for each in group if each.reward == 1.0]
        wrong = [each for group in groups for each in group if each.reward == 0.0]
        margin = mean_log_prob(trainer, right) - mean_log_prob(trainer, wrong)
        for _ in range(3):
            trainer.update(groups)
        assert mean_log_prob(trainer, right) - mean_log_prob(trainer, wrong) > margin + 0.05, name


def sampled_group(trainer, seed):
    """A group whose recorded log-probabilities are the model's own."""
    (group,) = outcomes(seed=seed, groups=1)
    made = []
    for each in group[:3] if seed % 2 else group:
        segments = []
        for part in each.trajectory.segments:
            row = Row(part.token_ids, part.logprobs, part.loss_mask, 0)
            logprobs = np.zeros(len(row.token_ids), np.float32)
            with torch.no_grad():
                logprobs[row.loss_mask == 1] = log_probs_alone(trainer.model, row).numpy()
            segments.append(Segment.from_arrays(part.token_ids, logprobs, part.loss_mask, part.spans))
        made.append(outcome(each.job_id, each.reward, segments))
    return made


def mean_log_prob(trainer, rollouts):
    with torch.no_grad():
        return float(torch.cat([log_probs_alone(trainer.model, row) for row in rows_of(rollouts)]).mean())


# ---------------------------------------------------------------- demonstrations


def check_demonstrations_are_what_a_node_would_have_recorded(folder):
    tokenizer = make_tiny_model(folder)
    rows = demonstrations(ChatFormat.load(folder), 8, seed=3)
    assert len({row.token_ids.tobytes() for row in rows}) == 8
    assert [row.rollout for row in rows] == list(range(8))
    for number, row in enumerate(rows):
        problem = demonstrated(number, seed=3)
        said = f"```python\n{problem.program}\n```<|im_end|>", f"\\boxed{{{problem.answer}}}<|im_end|>"
        assert tokenizer.decode(row.token_ids.tolist()) == (
            f"<|im_start|>system\nUse Python.<|im_end|>\n<|im_start|>user\n{problem.question}<|im_end|>\n"
            f"<|im_start|>assistant\n{said[0]}\n<|im_start|>user\n<tool_response>\n{problem.answer}\n"
            f"</tool_response><|im_end|>\n<|im_start|>assistant\n{said[1]}"
        )
        assert tokenizer.decode(row.token_ids[row.loss_mask == 1].tolist()) == "".join(said)


# ---------------------------------------------------------------- checkpoints


def check_a_run_that_goes_on_from_a_checkpoint_is_the_same_run(folder):
    recipe = Recipe(learning_rate=1e-3, longest=LONGEST)
    straight = Trainer(tiny_model(), recipe)
    for seed in range(4):
        straight.update(outcomes(seed=seed))
    first = Trainer(tiny_model(), recipe)
    for seed in range(2):
        first.update(outcomes(seed=seed))
    torch.manual_seed(5)
    save_checkpoint(folder, first, 2, {"batch": 2})
    drawn = torch.rand(3)
    second = Trainer(tiny_model(seed=9), recipe)
    assert load_checkpoint(latest_checkpoint(folder), second) == {"step": 2, "batch": 2}
    assert torch.equal(torch.rand(3), drawn)
    for seed in range(2, 4):
        second.update(outcomes(seed=seed))
    assert torch.equal(weights_of(second), weights_of(straight))


def check_only_whole_checkpoints_count_and_old_ones_go(folder):
    trainer = Trainer(tiny_model(), Recipe())
    assert latest_checkpoint(folder) is None
    for step in (1, 2, 3):
        save_checkpoint(folder, trainer, step, {})
    (folder / ".step-000004.part").mkdir()
    assert latest_checkpoint(folder).name == "step-000003"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000003"]
    save_checkpoint(folder, trainer, 4, {})
    assert latest_checkpoint(folder).name == "step-000004"


def check_the_weights_of_a_checkpoint_are_those_that_transformers_reads(folder):
    trainer, _ = update(outcomes())
    trainer.model.config.save_pretrained(save_checkpoint(folder, trainer, 1, {}))
    loaded = LlamaForCausalLM.from_pretrained(latest_checkpoint(folder))
    names = load_file(latest_checkpoint(folder) / "model.safetensors").keys()
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names, "engines keep copies of a tied output layer"
    assert torch.equal(weights_of(Trainer(loaded, Recipe())), weights_of(trainer))


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "--model-for":
        tiny_model().save_pretrained(os.environ["MODEL"])
        Path(os.environ["MODEL"], "tokenizer.json").write_text("{}")
        runpy.run_path(sys.argv[2], run_name="__main__")
        return
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    check(Path(folder))
                    results[name] = ""
                except Exception:
                    results[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
