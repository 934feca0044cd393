"""Loops as people write them, disturbed in every way at once: transcripts and rewards are those of an undisturbed run."""

import asyncio
import contextlib

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from tests.unit.loop_life import Life, output_of, play

PLACES = 2


class Sandbox:
    """Runs programs; what it says depends on all that it has run."""

    def __init__(self):
        self.state = 0

    async def run(self, program):
        await asyncio.sleep(0.002)
        self.state = (31 * self.state + sum(program)) % 97
        return self.state


class Host:
    """Has room for the sandboxes of some conversations at once."""

    def __init__(self, places):
        self.places, self.open, self.most = asyncio.Semaphore(places), 0, 0

    @contextlib.asynccontextmanager
    async def sandboxes(self, number):
        async with self.places:
            self.open += 1
            self.most = max(self.most, self.open)
            try:
                yield [Sandbox() for _ in range(number)]
            finally:
                self.open -= 1


class TwoCandidatesAndJudge(AgentLoopBase):
    """Two candidates, each with a sandbox, side by side; a judge's word says which one is trained."""

    def __init__(self, server_manager, host, hosts_validation):
        self.server_manager = server_manager
        validates = getattr(server_manager, "sample_id", None) is None
        self.host = hosts_validation if validates else host

    async def ask(self, prompt, params, tokens):
        answer = await self.server_manager.generate(
            "r", prompt_ids=prompt, sampling_params={**params, "max_tokens": tokens}
        )
        return answer.token_ids, answer.log_probs

    async def candidate(self, prompt, params, sandbox):
        response, mask, log_probs = [], [], []
        for _ in range(2):
            program, likely = await self.ask(prompt + response, params, 6)
            said = await sandbox.run(program)
            response += [*program, said]
            mask += [*[1] * len(program), 0]
            log_probs += [*likely, 0.0]
        return output_of(prompt, response, mask, response_logprobs=log_probs)

    async def run(self, sampling_params, *, number, **row):
        prompts = [[7, 8, number, which] for which in range(2)]
        async with self.host.sandboxes(len(prompts)) as sandboxes:
            candidates = await asyncio.gather(
                *[self.candidate(prompt, sampling_params, box) for prompt, box in zip(prompts, sandboxes, strict=True)]
            )
        (word,), _ = await self.ask([9, *[output.response_ids[-1] for output in candidates]], sampling_params, 1)
        return candidates[word % 2]


def transcripts(*, disturbed):
    """``{number: (prompt, response, mask, reward)}`` of a training of six rows, and the validations' responses."""
    failed, hosts = set(), []

    async def loop(client, row, params):
        return await TwoCandidatesAndJudge(client, *hosts).run(params, **row)

    async def score(output, row):
        if disturbed and row["number"] not in failed:
            failed.add(row["number"])
            raise ConnectionError("the reward's service is away")
        output.reward_score = float(sum(output.response_ids) % 7)

    def life():
        hosts[:] = Host(PLACES), Host(1)
        life = Life(loop, [{"number": number} for number in range(20, 26)], slots=3, score=score)
        life.engine.repeats = True
        return life

    async def story(life):
        validated = []
        killing = asyncio.ensure_future(deaths(life)) if disturbed else None
        while len(life.outputs) < len(life.rows):
            life.engine.cut_after = 1 if disturbed else None
            await life.stop_round()
            # verl's validations are not interrupted
            life.engine.cut_after = None
            if disturbed and life.version % 2:
                validated.append((await life.validate({"number": 30})).response_ids)
            if len(life.outputs) < len(life.rows):
                await life.next_round()
        if not disturbed:
            validated.append((await life.validate({"number": 30})).response_ids)
        assert killing is None or killing.done()
        assert all(not host.open for host in hosts) and hosts[0].most == PLACES
        assert not disturbed or (life.lives == 3 and len(failed) == len(life.rows))
        return {uid: said(*outputs) for uid, outputs in life.outputs.items()}, validated

    async def deaths(life):
        """Two in rounds, by the requests that the engine has had."""
        for lives, requests in ((2, 30), (3, 80)):
            while life.lives < lives:
                await asyncio.sleep(0.001)
                if len(life.engine.asked) >= requests:
                    await life.die()

    return play(life, story)


def said(output):
    assert not output.masked, output.extra_fields
    return (
        output.prompt_ids.tolist(),
        output.response_ids.tolist(),
        list(map(int, output.response_mask)),
        output.reward_score,
    )


def test_candidates_with_sandboxes_and_a_judge_say_and_earn_what_they_do_undisturbed():
    """Cut at every token; workers killed; each reward fails once; validation every second step."""
    undisturbed, (validated,) = transcripts(disturbed=False)
    disturbed, validations = transcripts(disturbed=True)
    assert disturbed == undisturbed and len(undisturbed) == 6
    assert validations and all(list(validation) == list(validated) for validation in validations)
