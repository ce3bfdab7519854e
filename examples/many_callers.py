"""Many callers, one engine: a list, threads, asyncio. They all run in one continuous batch.

python examples/many_callers.py [MODEL]
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from deepseek_flash import FlashEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
cities = ["Paris", "Rome", "Cairo", "Lima", "Oslo", "Tokyo"]
shared = "You are a tour guide. Answer with one plain sentence and nothing else.\n\nTell me about the city of "
params = SamplingParams(temperature=0.0, max_new_tokens=16)


def one_line(text: str) -> str:
    return " ".join(text.split())


async def many_tasks(engine: FlashEngine) -> None:
    # Awaiting several requests at once; cancelling a task would cancel its request.
    answers = await asyncio.gather(*(engine.agenerate(f"{shared}{city}.", params) for city in cities))
    for city, answer in zip(cities, answers, strict=True):
        print(f"asyncio  {city:6} {one_line(answer.text)}")

    # Streams are async iterators too.
    print("asyncio  ", end="")
    async for delta in engine.stream(f"{shared}Vienna.", params):
        print(delta.text.replace("\n", " "), end="", flush=True)
    print()


with FlashEngine(model) as engine:
    # A list in, a list out, in order. The shared beginning is computed once.
    results = engine.generate([f"{shared}{city}." for city in cities], params)
    for city, result in zip(cities, results, strict=True):
        print(f"list     {city:6} {one_line(result.text)}  [{result.usage.cached_tokens} tokens shared]")

    # Any thread may call; the answers are the same ones.
    with ThreadPoolExecutor() as pool:
        threaded = list(pool.map(lambda city: engine.generate(f"{shared}{city}.", params), cities))
    for city, result in zip(cities, threaded, strict=True):
        print(f"threads  {city:6} {one_line(result.text)}")

    asyncio.run(many_tasks(engine))
