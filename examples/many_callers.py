"""Many callers, one engine: a list, threads, asyncio. They all run in one continuous batch.

python examples/many_callers.py [MODEL]
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from deepseek_flash import FlashEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
cities = ["Paris", "Rome", "Cairo", "Lima", "Oslo", "Tokyo"]
# A raw prompt is continued as it is: examples show the model what to write, a stop string says where to end.
shared = (
    "City: Madrid. Country: Spain. Continent: Europe.\n"
    "City: Nairobi. Country: Kenya. Continent: Africa.\n"
    "City: Toronto. Country: Canada. Continent: North America.\n"
    "City: "
)
params = SamplingParams(temperature=0.0, max_new_tokens=16, stop="\n")


async def many_tasks(engine: FlashEngine) -> None:
    # Awaiting several requests at once; cancelling a task would cancel its request.
    answers = await asyncio.gather(*(engine.agenerate(f"{shared}{city}.", params) for city in cities))
    for city, answer in zip(cities, answers, strict=True):
        print(f"asyncio  {city:6} {answer.text.strip()}")

    # Streams are async iterators too.
    print("asyncio  Vienna", end="")
    async for delta in engine.stream(f"{shared}Vienna.", params):
        print(delta.text, end="", flush=True)
    print()


with FlashEngine(model) as engine:
    # A list in, a list out, in order. The shared beginning is computed once.
    results = engine.generate([f"{shared}{city}." for city in cities], params)
    for city, result in zip(cities, results, strict=True):
        print(f"list     {city:6} {result.text.strip()}  [{result.usage.cached_tokens} tokens shared]")

    # Any thread may call; the answers are the same ones.
    with ThreadPoolExecutor() as pool:
        threaded = list(pool.map(lambda city: engine.generate(f"{shared}{city}.", params), cities))
    for city, result in zip(cities, threaded, strict=True):
        print(f"threads  {city:6} {result.text.strip()}")

    asyncio.run(many_tasks(engine))
