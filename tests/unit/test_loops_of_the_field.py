"""Loops as people write them, disturbed in every way at once: transcripts and rewards are those of an undisturbed run."""

import asyncio
import contextlib

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from tests.unit.loop_life import output_of, transcripts

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


def candidates_and_judge():
    hosts = Host(PLACES), Host(1)

    async def loop(client, row, params):
        return await TwoCandidatesAndJudge(client, *hosts).run(params, **row)

    def check():
        assert all(not host.open for host in hosts) and hosts[0].most == PLACES

    return loop, check


def test_candidates_with_sandboxes_and_a_judge_say_and_earn_what_they_do_undisturbed():
    """Cut at every token; workers killed; each reward fails once; validation every second step."""
    undisturbed, (validated,) = transcripts(candidates_and_judge, range(20, 26), disturbed=False)
    disturbed, validations = transcripts(candidates_and_judge, range(20, 26), disturbed=True)
    assert disturbed == undisturbed and len(undisturbed) == 6
    assert validations and all(list(validation) == list(validated) for validation in validations)
